"""Environments: one of several gives nothing to train on, rollouts fail, or the trainer waits for slow ones."""

from __future__ import annotations

from typing import ClassVar

from tandem.observability.alarms.base import Alarm, Finding, Name, first
from tandem.observability.alarms.grading import FAILURES, sampled
from tandem.observability.alarms.history import MetricsHistory, Window, percent, short

WITHIN = 10
"""Steps in which an environment of a mixture gives nothing."""
EXPECTED = 5.0
"""Groups that it should have given in them, by its share of the mixture."""
FAILED = 0.2
"""Share of rollouts that environments may lose."""
WAITS = 0.7
"""Part of a step that the trainer waits, from which on waiting dominates."""
WAITS_ELSEWHERE = 0.9
"""The same where a broker brings the groups, and environments sample meanwhile."""
SLOWER = 3.0
"""Multiple of an earlier wait for as many tokens and rollouts that shows that sampling is held up."""
SECONDS = 1.0
"""Least wait of a step, in seconds, that is worth telling of."""


class EnvironmentsAlarm(Alarm):
    """The data that a step needs do not come."""

    name: ClassVar[Name] = "environments"
    metrics: ClassVar[tuple[str, ...]] = ("seconds/wait", "groups/trained", "rollouts/failed")

    def look(self, history: MetricsHistory) -> Finding | None:
        now = history.now()
        if now is None:
            return None
        return first((self._gives_nothing(history), self._fails(history, now), self._slow(history, now)))

    def _gives_nothing(self, history: MetricsHistory) -> Finding | None:
        window = history.now(WITHIN)
        if window is None:
            return None
        trained = window.total("groups/trained")
        for name, share in history.recipe.shares.items():
            if window.total(f"env/{name}/trained") or share * trained < EXPECTED:
                continue
            groups, zero_variance = window.total(f"env/{name}/groups"), window.mean(f"env/{name}/zero_variance")
            played = f"{groups:g} groups of it were played" + (
                f", {percent(zero_variance)} with zero variance" if zero_variance else ""
            )
            return Finding(
                seen=f"no group of environment {name} was trained on in {window}, of {trained:g} in all, where its "
                f"share is {percent(share)}; {played}",
                means="The mixture became another one without it: its tasks are too hard or too easy for any variance, "
                "its rollouts fail, or its episodes take much longer than those of the others.",
                change=f"Look at its rewards and errors (events.jsonl, logs/run.log). Easier or harder tasks in "
                f"envs.{name}.env; envs.{name}.min_share={share / 2:.2g}; or take it out of envs.",
            )
        return None

    def _fails(self, history: MetricsHistory, now: Window) -> Finding | None:
        rollouts = sampled(history, now)
        graders = sum(now.total(f"grading/failed_{why}") for why in FAILURES)
        failed = now.total("rollouts/failed") - graders
        if not rollouts or failed < FAILED * rollouts:
            return None
        return Finding(
            seen=f"{percent(failed / rollouts)} of rollouts failed in their environment ({now}: {failed:g} of "
            f"{rollouts:g})",
            means="An environment raises, or what it needs (a tool, a service, a sandbox) does not answer; its failed "
            "rollouts are left out of their groups.",
            change="logs/run.log has each error with its traceback; mend the environment, or leave it out.",
        )

    def _slow(self, history: MetricsHistory, now: Window) -> Finding | None:
        step, wait = now.median("seconds/step"), now.median("seconds/wait")
        if not step or wait is None or wait < max(SECONDS, WAITS * step):
            return None
        if history.recipe.elsewhere and wait >= WAITS_ELSEWHERE * step:
            return self._finding(history, f"the trainer waits for {percent(wait / step)} of a step ({now})")
        for then in history.earlier():
            slower = self._slower(history, now, then)
            if slower is not None and slower >= SLOWER:
                return self._finding(
                    history,
                    f"the trainer waits for {percent(wait / step)} of a step ({now}), {short(slower)} times as long "
                    f"for what is sampled as at {then}",
                )
        return None

    def _slower(self, history: MetricsHistory, now: Window, then: Window) -> float | None:
        """How many times as long it waits, for a token or for a rollout, whichever is less: lengths may change."""
        wait, before = now.median("seconds/wait"), then.median("seconds/wait")
        tokens, tokens_then = now.mean("tokens/generated"), then.mean("tokens/generated")
        rollouts, rollouts_then = (sampled(history, w) / len(w.rows) for w in (now, then))
        if not (wait and before and tokens and tokens_then and rollouts and rollouts_then):
            return None
        return wait / before / max(1.0, tokens / tokens_then, rollouts / rollouts_then)

    def _finding(self, history: MetricsHistory, seen: str) -> Finding:
        lag = history.recipe.get("max_lag")
        overlap = f"max_lag={lag + 1} (now {lag})" if isinstance(lag, int) else "a larger lag_control.max_lag"
        return Finding(
            seen=seen,
            means="Rollouts do not arrive as fast as they did: environments or their services are slow, the engine is "
            "shared with others, or too few workers play.",
            change="tandem why runs/NAME says who waits for whom. "
            + ("More workers (tandem work), or more engines for them." if history.recipe.elsewhere
               else f"A faster environment; {overlap} lets sampling overlap with training."),
        )  # fmt: skip
