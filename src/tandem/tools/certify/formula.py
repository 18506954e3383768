"""What a recipe says of its objective, read as plain data, and the sequences that formulas are of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tandem.types import Json

Options = Mapping[str, Json]
"""A part's options by name."""
Weights = Mapping[str, Mapping[str, float]]
"""Of each reward, by environment and by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """What a recipe says of its objective."""

    advantage: tuple[str, Options]
    """Kind and options."""
    loss: tuple[str, Options]
    """Kind and options."""
    corrections: tuple[tuple[str, Options], ...]
    """Kinds and options."""
    reference: tuple[str, Options] | None
    """Kind and options: beta, estimator, ratio_corrected, and those of its kind."""
    recomputed: bool
    """Ratios are against the policy as the step began."""
    updates: int
    """On the batch."""
    sampling: Options
    """Its limits, penalties and max_tokens are read."""
    ends: tuple[int, ...]
    """Token ids that end an answer."""
    mask_truncated: bool
    """Leave out answers that were cut."""
    weights: Weights
    """Of the rewards."""


def formula(recipe: Mapping[str, Json], weights: Weights, ends: Iterable[int]) -> Formula:
    """Read a recipe that was made plain; ``ends`` are the model's own end tokens."""
    reference = recipe.get("reference")
    return Formula(
        advantage=part(recipe["advantage"]),
        loss=part(recipe["loss"]),
        corrections=tuple(map(part, recipe["corrections"])),
        reference=None if reference is None else part(reference),
        recomputed=recipe["old_logprobs"] == "recomputed",
        updates=recipe["updates_per_batch"],
        sampling=recipe["sampling"],
        ends=(*ends, *recipe["sampling"]["stop_token_ids"]),
        mask_truncated=recipe["truncated"] == "mask",
        weights=weights,
    )


def part(plain: Json) -> tuple[str, Options]:
    """Kind and options of a part that was made plain."""
    return (plain, {}) if isinstance(plain, str) else (plain["kind"], plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """One sequence with sampled tokens in it."""

    rollout: str
    """Id of the rollout that it is of, or is part of."""
    ids: tuple[int, ...]
    """All tokens."""
    at: tuple[int, ...]
    """Which of them were sampled."""
    begins: tuple[int, ...]
    """Where the answer begins that each of these is in."""
    told: tuple[float, ...]
    """The sampler's logprob of each of these."""
    advantages: tuple[float, ...]
    """Of each of these."""
    temperature: float
    """At which they were sampled."""
