"""Looks for every alarm after every step: raises each once per episode, and again if it lasts much longer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.observability.alarms.base import Alarm, Finding
from tandem.observability.alarms.entropy import EntropyAlarm
from tandem.observability.alarms.environments import EnvironmentsAlarm
from tandem.observability.alarms.ess import EssAlarm
from tandem.observability.alarms.grad_norm import GradNormAlarm
from tandem.observability.alarms.grading import GradingAlarm
from tandem.observability.alarms.history import MetricsHistory, RecipeOptions
from tandem.observability.alarms.kl_behavior import KlBehaviorAlarm
from tandem.observability.alarms.length import LengthAlarm
from tandem.observability.alarms.loss import LossAlarm
from tandem.observability.alarms.reward_hacking import RewardHackingAlarm
from tandem.observability.alarms.stragglers import StragglersAlarm
from tandem.observability.alarms.zero_variance import ZeroVarianceAlarm
from tandem.types import Json

ALARMS: tuple[Alarm, ...] = (
    LossAlarm(), RewardHackingAlarm(), LengthAlarm(), EntropyAlarm(), ZeroVarianceAlarm(), KlBehaviorAlarm(),
    EssAlarm(), GradNormAlarm(), EnvironmentsAlarm(), GradingAlarm(), StragglersAlarm(),
)  # fmt: skip
"""All of them, in the order in which they are told."""
CLEAR = 10
"""Steps in a row without the pattern that end an alarm's first episode; twice as many each later one."""
LONGEST_CLEAR = 16 * CLEAR
"""Most steps in a row that an episode needs to end."""
AGAIN = 100
"""Steps after which an episode that lasts is told again; then after twice as many, and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """An alarm that was raised, is raised again, or is over."""

    alarm: str
    """Its name."""
    step: int
    """The step after which it was."""
    since: int
    """First step that showed it."""
    finding: Finding | None
    """What was found; None: it is over."""
    metrics: tuple[str, ...] = ()
    """Metrics that it looked at."""

    def fields(self) -> dict[str, Json]:
        """As an event tells it."""
        head: dict[str, Json] = {"alarm": self.alarm, "step": self.step, "since": self.since}
        if self.finding is None:
            return head
        texts = {"seen": self.finding.seen, "means": self.finding.means, "change": self.finding.change}
        return {**head, **texts, "metrics": list(self.metrics)}


@dataclass(slots=True)
class _Episode:
    """Where one alarm stands."""

    since: int = 0
    shown: int = 0
    """Steps in a row that showed the pattern."""
    clear: int = 0
    """Steps in a row that did not."""
    notified: int | None = None
    """Step at which it was told last; None while it is not open."""
    again: int = AGAIN
    clears: int = CLEAR
    """Steps in a row without the pattern that end it: an alarm that comes and goes is one that stays."""


class AlarmWatch:
    """The alarms of one run. What it knows it knows from metrics alone, so a resumed run knows the same."""

    def __init__(self, config: Mapping[str, Json]) -> None:
        """Nothing has happened yet.

        Args:
            config: the resolved recipe as plain data; its ``alarms`` say what is ignored, and what becomes of the run.
        """
        options = config.get("alarms") or {}
        self._alarms = [alarm for alarm in ALARMS if alarm.name not in (options.get("ignore") or ())]
        self._stops = options.get("action") == "stop"
        self._history = MetricsHistory(RecipeOptions(config))
        self._episodes = {alarm.name: _Episode() for alarm in self._alarms}
        self.ended: Notice | None = None
        """The alarm for which the run was stopped."""
        self.stop: Callable[[], None] = lambda: None
        """Called once, when an alarm is open and the recipe asks for a stop."""

    def replay(self, rows: Iterable[Mapping[str, Json]], evaluations: Sequence[Mapping[str, Json]]) -> None:
        """What a run did before it was resumed, quietly.

        Args:
            rows: of metrics.jsonl.
            evaluations: ``step`` and ``scalars`` of each, by step.
        """
        stops, self._stops = self._stops, False
        later = list(evaluations)
        for row in rows:
            while later and later[0]["step"] < row["step"]:
                self.evaluation(later[0]["step"], later.pop(0)["scalars"])
            self.step(row["step"], {name: _number(value) for name, value in row["metrics"].items()})
        for each in later:
            self.evaluation(each["step"], each["scalars"])
        self._stops = stops

    def evaluation(self, step: int, scalars: Mapping[str, float]) -> None:
        """The numbers of an evaluation."""
        self._history.evaluations.append((step, scalars))

    def step(self, step: int, scalars: Mapping[str, float]) -> list[Notice]:
        """The metrics of a step: what is told after it."""
        self._history.add(step, scalars)
        notices = []
        for alarm in self._alarms:
            episode, finding = self._episodes[alarm.name], alarm.look(self._history)
            if (notice := self._notice(alarm, episode, finding, step)) is not None:
                notices.append(notice)
            if self._stops and self.ended is None and finding is not None and episode.notified is not None:
                self.ended = Notice(alarm=alarm.name, step=step, since=episode.since, finding=finding)
                self.stop()
        return notices

    def scalars(self) -> dict[str, float]:
        """How many alarms are open, and a 1 for each of them."""
        names = [f"alarms/{name}" for name, episode in self._episodes.items() if episode.notified is not None]
        return {"alarms": float(len(names)), **dict.fromkeys(names, 1.0)}

    def _notice(self, alarm: Alarm, episode: _Episode, finding: Finding | None, step: int) -> Notice | None:
        """Take in what an alarm found, and tell it if it is time."""
        if finding is None:
            episode.shown = 0
            episode.clear += 1
            if episode.notified is None or episode.clear < episode.clears:
                return None
            episode.notified = None
            episode.clears = min(2 * episode.clears, LONGEST_CLEAR)
            return Notice(alarm=alarm.name, step=step, since=episode.since, finding=None)
        if not episode.shown and episode.notified is None:
            episode.since = step
        episode.shown += 1
        episode.clear = 0
        if episode.notified is None and episode.shown >= alarm.confirm:
            episode.again = AGAIN
        elif episode.notified is not None and step - episode.notified >= episode.again:
            episode.again *= 2
        else:
            return None
        episode.notified = step
        return Notice(alarm=alarm.name, step=step, since=episode.since, finding=finding, metrics=alarm.metrics)


def _number(value: Json) -> float:
    """A number of metrics.jsonl, where one that is not finite is null."""
    return float("nan") if value is None else float(value)
