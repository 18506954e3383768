"""Sampling penalties: repetition, presence, frequency, and answers that may not end yet.

In vLLM's order and by its definitions, on logits as the head gives them, before the temperature:

1. in the first ``min_tokens`` tokens of an answer, those that end it are left out;
2. ``repetition_penalty``: the logit of every token that is in the prompt or the answer so far is divided by it where it
   is positive, else multiplied;
3. ``frequency_penalty`` is taken off as often as the token is in the answer so far, ``presence_penalty`` once if it is.

The prompt is all that the engine was given: in a conversation, the turns before. A row is one sampled token, in the
order of the answers; N counts rows, W a range of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.types import Sampling

OUTSIDE = -1e30
"""Logit of a token that is left out: its probability is 0, and 0 times it is 0 (with -inf it is NaN)."""

Ints = NDArray[np.int64]
Number = float | Tensor
"""One for all rows, or (N, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalty options of a ``Sampling``."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_tokens: int = 0
    """Tokens of an answer before which none of ``ends`` is sampled."""
    ends: tuple[int, ...] = ()
    """Token ids that end an answer; empty without ``min_tokens``."""

    @classmethod
    def of(cls, sampling: Sampling, ends: Sequence[int]) -> Self | None:
        """Those of a sampling, None if it has none; ``ends`` are the model's own end tokens."""
        if not sampling.penalised:
            return None
        return cls(
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
            min_tokens=sampling.min_tokens,
            ends=tuple(sorted({*ends, *sampling.stop_token_ids})) if sampling.min_tokens else (),
        )


def penalise(
    logits_NW: Tensor,
    seen_NW: Tensor | None,
    output_NW: Tensor | None,
    repetition: Number,
    presence: Number,
    frequency: Number,
) -> Tensor | None:
    """Apply penalties in place; returns the slope of each result in its logit, None where all are 1.

    Args:
        logits_NW: as the head gives them, in float32 or wider.
        seen_NW: above 0 where the token is in the prompt or the answer so far; None: ``repetition`` is not looked at.
        output_NW: how often it is in the answer so far; None: ``presence`` and ``frequency`` are not looked at.
        repetition: see the module.
        presence: see the module.
        frequency: see the module.
    """
    slope_NW = None
    if seen_NW is not None:
        unit = logits_NW.new_ones(())
        slope_NW = torch.where(logits_NW > 0, unit / repetition, unit * repetition)
        slope_NW = torch.where(seen_NW > 0, slope_NW, unit)
        logits_NW.mul_(slope_NW)
    if output_NW is not None:
        logits_NW.sub_(output_NW * frequency).sub_((output_NW > 0) * presence)
    return slope_NW


class Past(NamedTuple):
    """Tokens before each row of some answers, as arrays of events."""

    seen_column: Ints
    """Token id of each different token of a sequence."""
    seen_first: Ints
    """First row that comes after it."""
    seen_end: Ints
    """Row after the last of its sequence."""
    output_column: Ints
    """Token id of each sampled token."""
    output_first: Ints
    """First row that comes after it."""
    output_end: Ints
    """Row after the last of its answer."""
    age: Ints
    """Of each row: tokens of its answer before it."""

    @classmethod
    def of(cls, tokens: Ints, at: Ints, begins: Sequence[int], ends: Sequence[int]) -> Self:
        """Of one sequence.

        Args:
            tokens: all of it.
            at: places of some sampled tokens, ascending: its rows.
            begins: where each answer begins, ascending; all of it was sampled.
            ends: the place after the end of each.
        """
        sampled = np.concatenate([np.arange(*answer) for answer in zip(begins, ends, strict=True)])
        different, places = np.unique(tokens[: at[-1]] if len(at) else tokens[:0], return_index=True)
        return cls(
            seen_column=different,
            seen_first=np.searchsorted(at, places, side="right"),
            seen_end=np.full(len(different), len(at)),
            output_column=tokens[sampled],
            output_first=np.searchsorted(at, sampled, side="right"),
            output_end=np.searchsorted(at, np.repeat(ends, np.subtract(ends, begins))),
            age=at - np.asarray(begins)[np.searchsorted(begins, at, side="right") - 1],
        )


def joined(pasts: Sequence[Past]) -> Past:
    """One after another."""
    starts = np.cumsum([0, *(len(past.age) for past in pasts)])
    rows = ("seen_first", "seen_end", "output_first", "output_end")
    shifted = [
        past._replace(**{name: getattr(past, name) + start for name in rows})
        for past, start in zip(pasts, starts, strict=False)
    ]
    return Past(*(np.concatenate(parts) for parts in zip(*shifted, strict=True)))


Part = tuple[Tensor | None, Tensor | None, float, float, float]
"""Arguments of ``penalise`` for some rows and columns of the logits, but for these."""


class Events(NamedTuple):
    """Tokens that count in some rows each."""

    column_E: Tensor
    """int64 token ids."""
    first_E: Tensor
    """int64; the first row in which each counts."""
    end_E: Tensor
    """int64; the row after the last one."""

    def counts(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """How many count in each row of a range and each column of a range, int32."""
        num, width = rows[1] - rows[0], columns[1] - columns[0]
        # Along a column the events are steps up and down, and their running sum is the count.
        here_E = (self.column_E >= columns[0]) & (self.column_E < columns[1])
        base_E = (self.column_E - columns[0]).clamp(0, width - 1) * (num + 1)
        up_E = here_E.int()
        steps = torch.zeros(width * (num + 1), dtype=torch.int32, device=self.column_E.device)
        steps.scatter_add_(0, base_E + (self.first_E - rows[0]).clamp(0, num), up_E)
        steps.scatter_add_(0, base_E + (self.end_E - rows[0]).clamp(0, num), -up_E)
        # In memory a row of counts is a column, since only along the last axis is a running sum fast.
        return steps.view(width, num + 1).cumsum_(1)[:, :num].t()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """Penalties, and the tokens before each of N rows, on the device."""

    penalties: Penalties
    seen: Events
    """Different tokens before a row in its sequence."""
    output: Events
    """Tokens before a row in its answer."""
    age_N1: Tensor
    """int64; tokens of its answer before a row."""

    @classmethod
    def of(cls, penalties: Penalties, arrays: Sequence[Tensor]) -> Self:
        """``arrays`` are those of a ``Past``, in order, on the device."""
        seen, output = Events(*arrays[:3]), Events(*arrays[3:6])
        return cls(penalties=penalties, seen=seen, output=output, age_N1=arrays[6][:, None])

    def part(self, rows: tuple[int, int], columns: tuple[int, int]) -> Part:
        """What is done to some rows and columns of the logits."""
        penalties = self.penalties
        seen_NW = self.seen.counts(rows, columns) if penalties.repetition != 1.0 else None
        output_NW = self.output.counts(rows, columns) if penalties.presence or penalties.frequency else None
        return seen_NW, output_NW, penalties.repetition, penalties.presence, penalties.frequency

    def bar(self, logits_NW: Tensor, targets_N1: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> None:
        """Leave tokens out, in place, that would end an answer too early, but none that was sampled."""
        for end in self.penalties.ends:
            if columns[0] <= end < columns[1]:
                at = end - columns[0]
                early_N1 = self.age_N1[rows[0] : rows[1]] < self.penalties.min_tokens
                logits_NW[:, at : at + 1].masked_fill_(early_N1 & (targets_N1 != end), OUTSIDE)


def penalise_rows(
    logits_NV: Tensor,
    of_rows: Sequence[Penalties | None],
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> None:
    """Apply each row's own penalties in place, of the tokens that may follow it.

    Args:
        logits_NV: as the head gives them, in float32 or wider.
        of_rows: of each row; None: it has none.
        prompts: tokens before the answer of each row.
        answers: tokens of it so far.
    """
    nothing = -1  # the token that is sampled is not known yet
    for penalties in {each for each in of_rows if each is not None}:
        rows = [row for row, each in enumerate(of_rows) if each == penalties]
        pasts = []
        for row in rows:
            tokens = np.array([*prompts[row], *answers[row], nothing])
            pasts.append(Past.of(tokens, np.array([len(tokens) - 1]), [len(prompts[row])], [len(tokens)]))
        arrays = [torch.from_numpy(array).to(logits_NV.device) for array in joined(pasts)]
        history = TokenHistory.of(penalties, arrays)
        logits_MV = logits_NV[rows]
        every = (0, len(rows)), (0, logits_NV.shape[1])
        history.bar(logits_MV, torch.full_like(history.age_N1, nothing), *every)
        penalise(logits_MV, *history.part(*every))
        logits_NV[rows] = logits_MV
