"""What a rollout buffer counts: groups trained, dropped and reused since its metrics were last collected."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tandem.metrics import Histogram, Sum, Value, merge
from tandem.rollout.measure import measure
from tandem.rollout.source import Draw
from tandem.rollout.task_sampler import EnvRunner
from tandem.types import Group


class BufferMetrics:
    """Counters of a rollout buffer since its metrics were last collected."""

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, runners: Mapping[str, EnvRunner]) -> None:
        self._runners = runners
        self._playing = 0
        self._idle_since = self.clock()
        self._reset()

    def _reset(self) -> None:
        self.dropped: Counter[str] = Counter()
        """Groups, by reason."""
        self.trained: Counter[str] = Counter()
        """Groups, by environment."""
        self.reused: Counter[str] = Counter()
        """Groups that took the place of others: replayed, rerolled, kept_zero_variance."""
        self.ages: list[float] = []
        """Of the replayed groups, in steps."""
        self.tokens_dropped = 0
        """Sampled tokens of groups that were dropped."""
        self._measured: list[Mapping[str, Value]] = []
        self._idle = 0.0

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Around the playing of each group: while there is none, the engine is idle."""
        self._count_idle()
        self._playing += 1
        try:
            yield
        finally:
            self._count_idle()
            self._playing -= 1

    def _count_idle(self) -> None:
        now = self.clock()
        if not self._playing:
            self._idle += now - self._idle_since
        self._idle_since = now

    def count(self, draw: Draw, group: Group) -> None:
        """Count a group once: with the step that takes or drops it, for however long it waited."""
        if not group.replayed:
            self._measured.append(measure([group], self._runners[draw.env].solved))

    def drop(self, reason: str, draw: Draw, group: Group | None) -> None:
        """Count a group that is not trained; None: its answers were cut off."""
        self.dropped[reason] += 1
        if group is not None:
            self.tokens_dropped += sum(rollout.num_tokens for rollout in group.rollouts)
            self.count(draw, group)

    def collect(self) -> Mapping[str, Value]:
        """The metrics; counting begins anew."""
        self._count_idle()
        idle = {"engine/idle_seconds": Sum(self._idle)}
        reasons = ("zero_variance", "stale", "failed", "surplus")
        drops = {f"groups/dropped_{reason}": Sum(float(self.dropped[reason])) for reason in reasons}
        drops["tokens/dropped"] = Sum(float(self.tokens_dropped))
        taken = {f"env/{name}/trained": Sum(float(self.trained[name])) for name in self._runners}
        kinds = ("replayed", "rerolled", "kept_zero_variance")
        reused = {f"groups/{kind}": Sum(float(self.reused[kind])) for kind in kinds}
        ages = {"replay/age": Histogram(tuple(self.ages))}
        metrics = merge([*self._measured, idle, drops, taken, reused, ages])
        self._reset()
        return metrics
