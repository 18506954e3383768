"""Where a run's groups come from, by its recipe: tasks played in this process, or a broker."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.broker.client import Connection, TrainerClient
from tandem.broker.protocol.convert import Rules
from tandem.broker.protocol.messages import RunParameters
from tandem.config.loading import RunConfig
from tandem.engines.base import CanAttest, Engine
from tandem.errors import ConfigError
from tandem.observability.dropped import DroppedGroups
from tandem.observability.emit import Telemetry
from tandem.observability.loggers.wandb import Wandb
from tandem.rollout.chat import Template
from tandem.rollout.feed import BufferOptions, RolloutBuffer
from tandem.rollout.foreign import BrokerSource, BrokerSourceOptions, full_marks
from tandem.rollout.judges import Judge, as_is, penalise_truncated
from tandem.rollout.rate import Budget, Pace, RateState
from tandem.rollout.streams import Stream

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepCounter:
    """The policy step that training has reached, from which lag is measured."""

    step: int
    """Optimizer steps taken."""

    def advance(self, step: int) -> None:
        """Another step was taken."""
        self.step = step

    def current(self) -> int:
        """Optimizer steps taken."""
        return self.step


def pace(config: RunConfig, state: RateState | None, telemetry: Telemetry) -> Pace:
    """How far sampling may be ahead of training; ``state`` is that of a resumed run's controller."""
    ahead = config.most_lag - config.sync.behind
    if config.max_lag != "auto":
        return Pace.fixed(config.groups_per_step, ahead)
    budget = Budget(
        groups_per_step=config.groups_per_step,
        most=ahead * config.groups_per_step,
        ess_floor=config.rate.ess_floor,
    )
    return Pace.auto(budget, state, lambda told: telemetry.event("rate_changed", **told))


def judge(config: RunConfig) -> Judge:
    """What has the last word on a group's rewards."""
    return penalise_truncated(config.truncated_penalty) if config.truncated == "penalise" else as_is


def played(
    config: RunConfig,
    streams: Sequence[Stream],
    trained: StepCounter,
    telemetry: Telemetry,
    pace: Pace,
) -> RolloutBuffer:
    """Tasks that are played here."""
    return RolloutBuffer(
        streams=streams,
        options=BufferOptions(
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            max_lag=config.most_lag,
            behind=config.sync.behind,
            drop_flat=config.flat_groups == "drop",
            sampling=config.sampling,
            steps=config.steps,
            max_resample_times=config.max_resample_times,
            replay=config.replay,
            reroll=config.reroll,
            curriculum=config.curriculum,
        ),
        version=trained.current,
        judge=judge(config),
        on_drop=_dropped(config, trained, telemetry),
        pace=pace,
        happened=lambda name, told: telemetry.event(name, **told),
    )


def foreign(
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
    """Groups of environments elsewhere.

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
    asked = config.broker
    assert asked is not None
    if CanAttest not in config.engine.ports:
        log.warning(
            "nobody elsewhere can sample from this run's engine, which lives in the trainer's own process, so what the "
            "broker serves is not this policy's; environments need engine: vllm"
        )
    rules = Rules(
        max_tokens=context,
        vocabulary=vocabulary,
        temperature=config.sampling.temperature,
        given_advantages=asked.given_advantages,
        policy_logprobs=asked.missing_logprobs == "policy",
        decode=template.decode,
    )
    return BrokerSource(
        broker=TrainerClient(Connection(asked.url, _key(asked.key_variable))),
        run=_parameters(config, folder, context),
        options=BrokerSourceOptions(
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            max_lag=config.most_lag,
            drop_flat=config.flat_groups == "drop",
            lease_seconds=asked.lease_seconds,
            rules=rules,
            sampling=config.sampling,
        ),
        version=trained.current,
        solved=full_marks,
        on_drop=_dropped(config, trained, telemetry),
        failure=lambda: engine.failure,
    )


def _parameters(config: RunConfig, folder: Path, context: int) -> RunParameters:
    board = next((sink for sink in config.sinks if isinstance(sink, Wandb)), None)
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


def _key(variable: str) -> str:
    if variable and not os.environ.get(variable):
        raise ConfigError(
            f"broker.key_variable: the environment variable {variable} is not set; export the broker's key"
        )
    return os.environ.get(variable, "") if variable else ""


def _dropped(config: RunConfig, trained: StepCounter, telemetry: Telemetry) -> DroppedGroups:
    return DroppedGroups(
        telemetry=telemetry,
        version=trained.current,
        groups_per_step=config.groups_per_step,
        max_tokens=config.sampling.max_tokens,
    )
