"""Rollouts of a step as lines for people: what was asked, said, earned, and every token's numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.rollout.chat import Template
from tandem.trainer.pack import StepBatch
from tandem.trainer.step import StepStats
from tandem.types import UNKNOWN, Json, Message, Rollout


def records(step: int, batch: StepBatch, stats: StepStats, template: Template) -> list[dict[str, Json]]:
    """One record for each rollout of the batch, failed ones included."""
    out: list[dict[str, Json]] = []
    for group in batch.groups:
        for rollout in group.rollouts:
            advantage = batch.advantages.get(rollout.id)
            out.append(
                {
                    "step": step,
                    "group": group.id,
                    "rollout": rollout.id,
                    "env": group.env,
                    "task": rollout.task.id,
                    "prompt": _plain(rollout.task.prompt),
                    "messages": _plain(rollout.messages),
                    "answer": rollout.task.answer,
                    "text": rollout.text,
                    "rewards": rollout.rewards,
                    "reward": rollout.reward,
                    "advantage": advantage,
                    "status": rollout.status,
                    "error": rollout.error,
                    "truncated": rollout.truncated,
                    "versions": _versions(rollout),
                    "turns": [len(turn.completion.tokens) for turn in rollout.turns],
                    "tokens": list(_tokens(rollout, advantage, stats.logprobs.get(rollout.id), template)),
                }
            )
    return out


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in messages]


def _versions(rollout: Rollout) -> list[int]:
    spans = [turn.completion for turn in rollout.turns if turn.completion.tokens]
    return [min(c.version_min for c in spans), max(c.version_max for c in spans)] if spans else []


def _tokens(
    rollout: Rollout, advantage: float | None, trained: Sequence[float] | None, template: Template
) -> Iterator[dict[str, Json]]:
    """Sampled tokens of all turns; ``tp`` is the trainer's logprob of those it trained."""
    trainer = iter(trained or ())
    given = iter(rollout.advantages or ())
    for turn in rollout.turns:
        completion = turn.completion
        for text, token, logprob in zip(
            template.pieces(completion.tokens), completion.tokens, completion.logprobs, strict=True
        ):
            yield {
                "t": text,
                "id": token,
                "lp": None if logprob == UNKNOWN else round(logprob, 5),
                "tp": None if trained is None else round(next(trainer), 5),
                "adv": next(given, advantage),
                "m": int(trained is not None),
            }
