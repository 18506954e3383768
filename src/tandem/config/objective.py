"""Which options of the objective change nothing, given the others, and what it must have to train on older tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.config.loading import RunConfig


def inert_objective(config: RunConfig) -> dict[str, str]:
    """Options by dotted path, and why each changes nothing.

    A loss names its own by class variables: ``at_ratio_one``, those that nothing reaches while every ratio is 1, and
    ``per_token``, those that matter where the tokens of one answer have different advantages; ``compares`` is false
    if it has no ratio.
    """
    unread: dict[str, str] = {}
    recomputed, loss = config.old_logprobs == "recomputed", config.loss
    if recomputed and config.updates == 1:
        why = "old_logprobs: recomputed with updates: 1 makes every ratio 1"
        unread |= {f"loss.{name}": why for name in getattr(loss, "at_ratio_one", ())}
    if config.broker is None or not config.broker.given_advantages:
        why = "the tokens of an answer have one advantage (broker.given_advantages is not set)"
        unread |= {f"loss.{name}": why for name in getattr(loss, "per_token", ())}
    compares = getattr(loss, "compares", True) or getattr(config.reference, "ratio_corrected", False)
    if not compares and not config.corrections:
        unread["old_logprobs"] = "this loss has no ratio, and there are no corrections"
    return unread


def only_by_advantage(config: RunConfig) -> bool:
    """Whether a sample whose every advantage is 0 has no gradient: the loss says so, and nothing is added to it."""
    return config.reference is None and getattr(config.loss, "by_advantage", False)


def replay_fault(config: RunConfig) -> str | None:
    """What replay must be given with, if the objective would take replayed tokens for the policy's own."""
    ratios = config.old_logprobs == "sampled" and getattr(config.loss, "compares", True)
    if not config.replay.size or ratios or any(getattr(one, "weighs", True) for one in config.corrections):
        return None
    return (
        "given with corrections that weigh tokens by their ratio, or with old_logprobs: sampled and a loss that has a "
        "ratio: replayed tokens are older than the policy, and nothing else weighs that"
    )
