"""What fills a run's rollout buffer where the tasks are played in this process, as its recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.config.loading import RunConfig
from tandem.observability.dropped import DroppedGroups
from tandem.observability.emit import Telemetry
from tandem.rollout.feed import BufferOptions, RolloutBuffer
from tandem.rollout.judges import Judge, as_is, penalise_truncated
from tandem.rollout.rate import Budget, Pace, RateState
from tandem.rollout.streams import Stream


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
        on_drop=dropped(config, trained, telemetry),
        pace=pace,
        happened=lambda name, told: telemetry.event(name, **told),
    )


def dropped(config: RunConfig, trained: StepCounter, telemetry: Telemetry) -> DroppedGroups:
    """Reports groups that are left out of training."""
    return DroppedGroups(
        telemetry=telemetry,
        version=trained.current,
        groups_per_step=config.groups_per_step,
        max_tokens=config.sampling.max_tokens,
    )
