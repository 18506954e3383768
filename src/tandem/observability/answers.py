"""Answers for people: some of each step, and of dropped groups, with why each was not trained on and what to change."""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.errors import Bounded, bounded
from tandem.observability.emit import Telemetry
from tandem.types import Group, Json, Rollout

log = logging.getLogger(__name__)

WARN = 5
"""Batches' worth of groups dropped for one step that are warned of."""
LOOKED_AT = 64
"""Dropped groups by which it is judged what to change, the latest ones."""
ZERO, FAILED, STALE = "every reward 0", "failed", "stale"
MOST_TEXT = 4000
"""Characters of a prompt or an answer that are shown; of a longer one its beginning and its end."""


def shown(rollout: Rollout) -> dict[str, Json]:
    """An answer as the event ``completions`` and recorded groups have it."""
    return {
        "env": rollout.task.env,
        "task": rollout.task.id,
        "prompt": shortened(rollout.task.prompt[-1].content if rollout.task.prompt else ""),
        "answer": shortened(rollout.task.answer),
        "text": shortened(rollout.text),
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "tokens": rollout.num_tokens,
        "truncated": rollout.truncated,
        "error": shortened(rollout.error),
    }


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """A text of at most about ``most`` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [... {len(text) - most:,} characters ...] {text[-(most - most // 2) :]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintCompletions(Bounded):
    """Showing what the policy writes: sampled answers with their rewards, in the console and in loggers."""

    every: int = bounded(10)
    """Steps between two times at which answers are shown, the first step among them; 0 never shows any."""
    count: int | None = bounded(1, least=1)
    """Answers shown at a time, drawn from the step's; null: all of them."""

    def due(self, step: int) -> bool:
        """Whether answers of this step are shown."""
        return self.every > 0 and (step == 1 or step % self.every == 0)

    def inert(self) -> Mapping[str, str]:
        """Of none that are shown there is no number."""
        return {} if self.every else {"count": "every is 0, so no answers are shown"}

    def show(self, telemetry: Telemetry, step: int, groups: Sequence[Group], advantages: Mapping[str, float]) -> None:
        """Send loggers some of the answers that a step was trained on, as the event ``completions``.

        ``advantages`` are by rollout id. The same step always shows the same answers.
        """
        if not self.due(step):
            return
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        count = len(rollouts) if self.count is None else min(self.count, len(rollouts))
        picked = random.Random(step).sample(rollouts, count) if count < len(rollouts) else rollouts
        samples = [shown(rollout) | {"advantage": advantages.get(rollout.id)} for rollout in picked]
        telemetry.event("completions", step=step, samples=samples)


@dataclass(slots=True)
class DroppedGroups:
    """Log of dropped groups: a few lines a run, however many there are.

    At the first of a run, and once for each kind at five batches' worth for one step (a warning); each step's own line
    has their number.
    """

    telemetry: Telemetry
    """Where it is said: the events ``group_dropped`` and ``groups_dropped``."""
    version: Callable[[], int]
    """Optimizer steps taken."""
    groups_per_step: int
    """Groups in a batch."""
    max_tokens: int
    """Most tokens of an answer."""
    _step: int = -1
    _why: Counter[str] = field(default_factory=Counter)
    _warned: set[str] = field(default_factory=set)
    """Commonest kinds that were warned of; the empty one: a first group was told."""
    _last: deque[tuple[str, Group]] = field(default_factory=lambda: deque(maxlen=LOOKED_AT))

    def __call__(self, reason: str, group: Group) -> None:
        """A group was dropped: zero_variance, stale or failed."""
        step = self.version() + 1
        if step != self._step:
            self._step = step
            self._why.clear()
            self._last.clear()
        self._last.append((reason, group))
        self._why[why(reason, group)] += 1
        rewards: Json = [rollout.reward for rollout in group.rollouts]
        error = next((rollout.error for rollout in group.rollouts if rollout.error), None)
        self.telemetry.event("group_dropped", step=step, reason=reason, group=group.id, rewards=rewards, error=error)
        count = self._why.total()
        warns = count == WARN * self.groups_per_step
        kind = self._why.most_common(1)[0][0] if warns else ""
        if group.rollouts and (warns or count == 1) and kind not in self._warned:
            self._say(step, group, warns)
            self._warned.add(kind)

    def _say(self, step: int, group: Group, warns: bool) -> None:
        count, why = self._why.total(), dict(self._why)
        fields: dict[str, Json] = {"step": step, "dropped": count, "why": why, "warning": warns}
        fields["example"] = shown(next((r for r in group.rollouts if r.error), group.rollouts[0]))
        if warns:
            fields["change"] = change(self._last, self.max_tokens)
        log.info("step %d: %d groups dropped so far: %s", step, count, why)
        self.telemetry.event("groups_dropped", **fields)


def why(reason: str, group: Group) -> str:
    """Why a group is not trained on, in words that make groups of a kind countable: ``every reward 0``."""
    if reason != "zero_variance":
        return reason
    rewards = [rollout.reward for rollout in group.scored if rollout.reward is not None]
    return ZERO if not any(rewards) else f"every reward {rewards[0]:.4g}"


def change(dropped: Collection[tuple[str, Group]], max_tokens: int) -> str:
    """Advice on dropped groups.

    Args:
        dropped: some of them, at least one, each with its reason: zero_variance, stale or failed.
        max_tokens: most tokens of an answer.
    """
    groups = [group for _, group in dropped]
    commonest = Counter(why(reason, group) for reason, group in dropped).most_common(1)[0][0]
    answers = [rollout for group in groups for rollout in group.scored]
    cut = sum(rollout.truncated for rollout in answers)
    alike = sum(len({rollout.text for rollout in group.scored}) == 1 for group in groups)
    if commonest == STALE:
        return "raise max_lag, or let fewer environments run ahead"
    if commonest == FAILED:
        error = next((rollout.error for group in groups for rollout in group.rollouts if rollout.error), "")
        return f"the environment or a reward fails: {shortened(error, 200) or 'answers have no reward'}"
    if alike * 2 > len(groups):
        return "answers to a task are all alike: raise sampling.temperature, or begin again with a smaller optimizer.lr"
    if cut * 2 > len(answers):
        share = f"{cut} of {len(answers)} answers were cut at a length limit"
        return f"{share}: raise sampling.max_tokens ({max_tokens}), or ask for shorter answers"
    if commonest == ZERO:
        return "read the answer: if it is right, mend the reward; if not, use easier tasks, or a stronger model"
    return "harder tasks, or a reward that tells a good answer from a better one"
