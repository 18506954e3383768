"""Synthetic groups with every case that the trainer distinguishes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, cycle, islice

from tandem.config.loading import RunConfig
from tandem.testing.oracle import Formula
from tandem.types import UNKNOWN_LOGPROB, Completion, Finish, Group, Message, Rollout, Task, Turn

Own = Callable[[Sequence[int], Sequence[int], float], Sequence[float]]
"""The policy's own logprobs of a prompt's completion at a temperature."""

DRIFTS: tuple[tuple[float, ...], ...] = (
    (0.4931, 1.0137, 2.0731, 0.8931, 1.0931, 4.1131, 1.2637, 0.8113),
    (1.0001,),
    (1.1731, 1.0391),
    (0.4391, 0.1217, 0.9217),
    (7.31, 0.0713, 0.9871, 1.0129),
    (0.9953, 1.0051),
)
"""Ratios of policy to sampler, token by token, repeated: within and beyond the bounds of tokens and of whole answers.

None is a number that a person would choose for a bound: on a bound, rounding decides.
"""
STRETCH = 18
"""Tokens of a prompt or of a turn which are enough to be computed once for all that go on from there."""
OTHER_TEMPERATURE = 0.8
"""What one group's temperature is multiplied by: a batch may hold several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUpRollout:
    """One made-up rollout."""

    lengths: tuple[int, ...]
    """Sampled tokens of each turn."""
    score: float
    """How good it is, from 0 to 1."""
    finish: Finish = "stop"
    """Of its last turn."""
    before: Finish = "stop"
    """Of the turns before."""
    cools: float = 1.0
    """Each turn's temperature is that of the turn before times this."""
    goes_on: bool = True
    """Later turns repeat the earlier ones, so that all are one sequence."""
    trained: bool = True
    """Its tokens are trained."""
    failed: bool = False
    """It has no reward."""
    depth: int = 0
    """Stretches of the group's conversation between the opening and its prompt's end."""
    rewards: tuple[float, ...] = ()
    """Those of its turns."""
    left_out: tuple[int, ...] = ()
    """Turns that are not trained."""
    spoken: bool = False
    """Its only turn is the conversation's next stretch, so that it is in the prompts of others."""


GROUPS: Mapping[tuple[int, float], tuple[MadeUpRollout, ...]] = {
    (9, 1.0): (
        MadeUpRollout(lengths=(8,), score=0.0),
        MadeUpRollout(lengths=(3, 6), score=1.0),
        MadeUpRollout(lengths=(12,), score=0.5, finish="length"),
        MadeUpRollout(lengths=(1,), score=1.0),
    ),
    (17, OTHER_TEMPERATURE): (
        MadeUpRollout(lengths=(5,), score=1.0),
        MadeUpRollout(lengths=(16,), score=0.0),
        MadeUpRollout(lengths=(4, 5), score=0.25, goes_on=False),
        MadeUpRollout(lengths=(2,), score=0.0, failed=True),
    ),
    (6, 1.0): (MadeUpRollout(lengths=(4,), score=0.5), MadeUpRollout(lengths=(6,), score=0.5)),
    (1, 1.0): (
        MadeUpRollout(lengths=(1,), score=0.0),
        MadeUpRollout(lengths=(7,), score=0.0),
        MadeUpRollout(lengths=(9,), score=1.0),
        MadeUpRollout(lengths=(3,), score=1.0, trained=False),
    ),
    (STRETCH, 1.0): (
        MadeUpRollout(lengths=(STRETCH,), score=0.5, spoken=True),
        MadeUpRollout(lengths=(3,), score=0.0),
        MadeUpRollout(lengths=(5,), score=1.0, depth=1),
        MadeUpRollout(lengths=(STRETCH,), score=0.25, depth=1, spoken=True),
        MadeUpRollout(lengths=(2,), score=0.75, depth=2),
        MadeUpRollout(lengths=(4,), score=0.0, depth=2),
    ),
    (7, 1.0): (
        MadeUpRollout(lengths=(4, 3, 5), score=1.0, finish="length", rewards=(0.5, 0.0, 0.25), left_out=(1,)),
        MadeUpRollout(lengths=(3, 4), score=0.0, goes_on=False, finish="length"),
        MadeUpRollout(lengths=(2, 6, 3), score=0.25, rewards=(0.0, 1.0, 0.5)),
        MadeUpRollout(lengths=(5, 2), score=0.75, before="length"),
        MadeUpRollout(lengths=(6, 4), score=0.9, cools=0.9),
    ),
}
"""Rollouts by the tokens of their prompt and the factor of their temperature."""


@dataclass(slots=True, kw_only=True)
class GroupMaker:
    """Makes groups up, the same for the same seed."""

    config: RunConfig
    """Of a recipe with a broker some logprobs are unknown, and advantages given token by token if it has them so."""
    known: Formula
    """Its end tokens are not drawn: an answer that goes on after one, or has one too early, was never sampled."""
    vocabulary: int
    """Token ids are below it."""
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    """Of token ids."""

    def groups(self, own: Own) -> list[Group]:
        """The groups."""
        broker, envs = self.config.broker, list(self.known.weights) or ["made-up"]
        made = [self._group(i, envs[i % len(envs)], *prompt, plans) for i, (prompt, plans) in enumerate(GROUPS.items())]
        drifts = cycle(DRIFTS)
        for g, group in enumerate(made):
            rollouts = tuple(_with_logprobs(rollout, own, next(drifts)) for rollout in group.rollouts)
            made[g] = replace(group, rollouts=rollouts)
        if broker is not None:
            made[0] = replace(made[0], rollouts=(_silent(made[0].rollouts[0]), *made[0].rollouts[1:]))
        if broker is not None and broker.env_advantages:
            differing = tuple((-1.0) ** i * (i % 5) for i in range(made[1].rollouts[1].num_tokens))  # in sign too
            own_way = replace(made[1].rollouts[1], advantages=differing)
            made[1] = replace(made[1], rollouts=(made[1].rollouts[0], own_way, *made[1].rollouts[2:]))
        return made

    def _group(self, index: int, env: str, prompt: int, factor: float, plans: Sequence[MadeUpRollout]) -> Group:
        id = f"made-up-{index}@0"
        stretches = [self._tokens(prompt)]
        stretches += (self._tokens(STRETCH) for _ in range(max(plan.depth + plan.spoken for plan in plans)))
        rollouts = [self._rollout(f"{id}/{s}", env, stretches, factor, plan) for s, plan in enumerate(plans)]
        return Group(id=id, index=index, env=env, rollouts=tuple(rollouts))

    def _rollout(
        self, id: str, env: str, stretches: Sequence[tuple[int, ...]], factor: float, plan: MadeUpRollout
    ) -> Rollout:
        """One that goes on where ``told``, an opening and what followed it, has got to."""
        opening = tuple(chain.from_iterable(stretches[: plan.depth + 1]))
        turns: list[Turn] = []
        for i, length in enumerate(plan.lengths):
            before = turns[-1].prompt + turns[-1].completion.tokens if turns and plan.goes_on else opening
            last = i == len(plan.lengths) - 1
            completion = Completion(
                tokens=stretches[plan.depth + 1] if plan.spoken else self._tokens(length),
                logprobs=(0.0,) * length,
                versions=(0,) * length,
                finish=plan.finish if last else plan.before,
            )
            temperature = (self.config.sampling.temperature or 1.0) * factor * plan.cools**i
            prompt = before + (self._tokens(3) if turns else ())
            turns.append(
                Turn(
                    prompt=prompt,
                    completion=completion,
                    temperature=temperature,
                    reward=plan.rewards[i] if plan.rewards else None,
                    trained=i not in plan.left_out,
                )
            )
        names = self.known.weights.get(env, {})
        # The first reward is the score; the others rank the answers differently.
        rewards = {name: (plan.score + 0.3 * k * plan.lengths[0]) % 1.25 for k, name in enumerate(names)}
        reward = math.fsum(names[name] * value for name, value in rewards.items()) if names else plan.score
        task = Task(id=id.partition("@")[0], env=env, prompt=(Message(role="user", content="?"),), answer="")
        return Rollout(
            id=id,
            task=task,
            turns=tuple(turns),
            messages=task.prompt,
            status="error" if plan.failed else "ok",
            rewards={} if plan.failed else rewards,
            reward=None if plan.failed else reward,
            trained=plan.trained,
        )

    def _tokens(self, length: int) -> tuple[int, ...]:
        drawn = (self.draw.randrange(self.vocabulary) for _ in count())
        return tuple(islice((token for token in drawn if token not in self.known.ends), length))


def _silent(rollout: Rollout) -> Rollout:
    """The same from a sampler that told no logprobs."""
    return _with_logprobs(rollout, lambda prompt, tokens, temperature: [UNKNOWN_LOGPROB] * len(tokens), (1.0,))


def _with_logprobs(rollout: Rollout, own: Own, drift: Sequence[float]) -> Rollout:
    """With the logprobs of a sampler that is this far from the policy."""
    turns, ratios = [], cycle(drift)
    for turn in rollout.turns:
        now = own(turn.prompt, turn.completion.tokens, turn.temperature)
        logprobs = [value - math.log(next(ratios)) for value in now]
        turns.append(replace(turn, completion=replace(turn.completion, logprobs=tuple(logprobs))))
    return replace(rollout, turns=tuple(turns))
