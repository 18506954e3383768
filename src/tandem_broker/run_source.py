"""The rollout source of a recipe with ``broker:``. Imported by such runs alone."""

from __future__ import annotations

import logging
from pathlib import Path

from tandem.config.loading import RunConfig
from tandem.engines.base import Engine, ReportsChecksums
from tandem.observability.emit import Telemetry
from tandem.observability.loggers.wandb import Wandb
from tandem.rollout.template import Template
from tandem.trainer.environments import StepCounter, dropped
from tandem_broker.client import Connection, TrainerClient, key_in
from tandem_broker.protocol.convert import Rules
from tandem_broker.protocol.messages import RunParameters
from tandem_broker.source import BrokerSource, BrokerSourceOptions

log = logging.getLogger(f"tandem.{__name__}")


def broker_source(
    config: RunConfig,
    *,
    folder: Path,
    context: int,
    vocabulary: int,
    template: Template,
    trained: StepCounter,
    telemetry: Telemetry,
    engine: Engine,
) -> BrokerSource:
    """The source of rollouts that other environments hand to a broker.

    Args:
        config: of the run; it has a broker.
        folder: the run's; environments keep what is theirs beneath it.
        context: most tokens of a sequence.
        vocabulary: token ids of the model are below this.
        template: tells the text of tokens.
        trained: the policy step.
        telemetry: is told of dropped groups.
        engine: what the environments sample from.

    Raises:
        ConfigError: the broker's key is not set.
    """
    options = config.broker
    assert options is not None
    if ReportsChecksums not in config.engine.capabilities:
        log.warning("environments elsewhere cannot sample from an engine within the trainer; they need engine: vllm")
    rules = Rules(
        max_tokens=context,
        vocabulary=vocabulary,
        temperature=config.sampling.temperature,
        env_advantages=options.env_advantages,
        policy_logprobs=options.missing_logprobs == "policy",
        decode=template.decode,
    )
    return BrokerSource(
        broker=TrainerClient(Connection(options.url, key_in(options.key_variable, "broker"))),
        run=_parameters(config, folder, context),
        options=BrokerSourceOptions(
            groups_per_step=config.groups_per_step,
            max_lag=config.max_lag,
            drop_zero_variance=config.zero_variance_groups == "drop",
            lease_seconds=options.lease_seconds,
            rules=rules,
            sampling=config.sampling,
        ),
        version=trained.current,
        on_drop=dropped(config, trained, telemetry),
        failure=lambda: engine.failure,
    )


def _parameters(config: RunConfig, folder: Path, context: int) -> RunParameters:
    board = next((logger for logger in config.loggers if isinstance(logger, Wandb)), None)
    return RunParameters(
        wandb_group=(board.group or "") if board else "",
        wandb_project=board.project if board else "",
        batch_size=config.groups_per_step * config.group_size,
        max_token_len=context,
        checkpoint_dir=str(folder.absolute()),
        save_checkpoint_interval=config.checkpoint.every,
        starting_step=0,
        num_steps=config.steps,
    )
