"""What fills a run's rollout buffer where the tasks are played in this process, as its recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.config.loading import RunConfig
from tandem.observability.completions import DroppedGroups
from tandem.observability.emit import Telemetry
from tandem.rollout.buffer import BufferOptions, RolloutBuffer
from tandem.rollout.group_runner import PostprocessRewards, keep_rewards, penalise_truncated
from tandem.rollout.lag_control import LagControl, LagController, RateState
from tandem.rollout.task_sampler import EnvRunner


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


def lag_control(config: RunConfig, state: RateState | None, telemetry: Telemetry) -> LagControl:
    """How far sampling may be ahead of training; ``state`` is that of a resumed run's controller."""
    ahead = config.most_lag - config.sync.behind
    if config.max_lag != "auto":
        return LagControl.fixed(config.groups_per_step, ahead)
    budget = LagController(
        groups_per_step=config.groups_per_step,
        most=ahead * config.groups_per_step,
        ess_floor=config.lag_control.ess_floor,
    )
    return LagControl.auto(budget, state, lambda told: telemetry.event("lag_changed", **told))


def postprocess(config: RunConfig) -> PostprocessRewards:
    """What has the last word on a group's rewards."""
    return penalise_truncated(config.truncated_penalty) if config.truncated == "penalise" else keep_rewards


def played(
    config: RunConfig,
    runners: Sequence[EnvRunner],
    trained: StepCounter,
    telemetry: Telemetry,
    lag_control: LagControl,
) -> RolloutBuffer:
    """Tasks that are played here."""
    return RolloutBuffer(
        runners=runners,
        options=BufferOptions(
            groups_per_step=config.groups_per_step,
            group_size=config.group_size,
            max_lag=config.most_lag,
            behind=config.sync.behind,
            drop_zero_variance=config.zero_variance_groups == "drop",
            sampling=config.sampling,
            steps=config.steps,
            max_resample_times=config.max_resample_times,
            replay=config.replay,
            reroll=config.reroll,
            curriculum=config.curriculum,
        ),
        version=trained.current,
        postprocess_rewards=postprocess(config),
        on_drop=dropped(config, trained, telemetry),
        lag_control=lag_control,
        on_event=lambda name, fields: telemetry.event(name, **fields),
    )


def dropped(config: RunConfig, trained: StepCounter, telemetry: Telemetry) -> DroppedGroups:
    """Reports groups that are left out of training."""
    return DroppedGroups(
        telemetry=telemetry,
        version=trained.current,
        groups_per_step=config.groups_per_step,
        max_tokens=config.sampling.max_tokens,
    )
