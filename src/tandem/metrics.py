"""Metrics are values that add up: parts of a step report theirs, and merging gives the step's.

A mean is kept as a sum and a count, so that a mean of means can never be written by accident.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import quantiles
from typing import Protocol, Self


class Value(Protocol):
    """A number that merges with its own kind."""

    def merge(self, other: Self) -> Self:
        """The value over both populations."""
        ...

    def scalars(self, name: str) -> dict[str, float]:
        """What is written to a logger."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over ``n`` things."""

    sum: float
    """Total over the things."""
    n: float
    """How many things there are; seconds, for a rate."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """Mean of the values; an empty iterable gives n = 0, which is not written."""
        items = list(values)
        return cls(math.fsum(items), len(items))

    def merge(self, other: Mean) -> Mean:
        """Pooled mean."""
        return Mean(self.sum + other.sum, self.n + other.n)

    def scalars(self, name: str) -> dict[str, float]:
        """``{name: mean}``, nothing if n is 0."""
        return {name: self.sum / self.n} if self.n else {}


@dataclass(frozen=True, slots=True)
class Sum:
    """A total: tokens, seconds, dropped groups."""

    value: float
    """The total so far."""

    def merge(self, other: Sum) -> Sum:
        """Total of both."""
        return Sum(self.value + other.value)

    def scalars(self, name: str) -> dict[str, float]:
        """``{name: total}``."""
        return {name: self.value}


@dataclass(frozen=True, slots=True)
class Max:
    """The largest seen: a lag, a ratio, a gigabyte."""

    value: float
    """The largest so far."""

    def merge(self, other: Max) -> Max:
        """Larger of both."""
        return Max(max(self.value, other.value))

    def scalars(self, name: str) -> dict[str, float]:
        """``{name: maximum}``."""
        return {name: self.value}


@dataclass(frozen=True, slots=True)
class Share:
    """An effective sample size as a share of the sample: (sum w)^2 / (n sum w^2), 1 where all weights are alike."""

    sum: float
    """Total of the weights."""
    squares: float
    """Total of their squares."""
    n: float
    """How many weights there are."""

    def merge(self, other: Share) -> Share:
        """Of both samples together."""
        return Share(self.sum + other.sum, self.squares + other.squares, self.n + other.n)

    def scalars(self, name: str) -> dict[str, float]:
        """``{name: share}``; 0 where every weight is 0, nothing if n is 0."""
        if not self.n:
            return {}
        return {name: self.sum * self.sum / (self.n * self.squares) if self.squares else 0.0}


@dataclass(frozen=True, slots=True)
class Histogram:
    """A population, kept whole within a step; written as mean, std and quartiles."""

    values: tuple[float, ...]
    """Every member, in no particular order."""

    def merge(self, other: Histogram) -> Histogram:
        """Both populations."""
        return Histogram(self.values + other.values)

    def scalars(self, name: str) -> dict[str, float]:
        """``name`` (mean), ``name/std`` (population), ``name/min``, ``/p25``, ``/p50``, ``/p75``, ``/max``."""
        if not self.values:
            return {}
        n, mean = len(self.values), math.fsum(self.values) / len(self.values)
        quartiles = quantiles(self.values, n=4, method="inclusive") if n > 1 else self.values * 3
        named = zip(("min", "p25", "p50", "p75", "max"), (min(self.values), *quartiles, max(self.values)), strict=True)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in self.values) / n)
        return {name: mean, f"{name}/std": std, **{f"{name}/{part}": value for part, value in named}}


Metrics = Mapping[str, Value]
"""Names to values; a name is ``area/thing`` and never changes its kind."""


def merge(parts: Iterable[Metrics]) -> dict[str, Value]:
    """Merge metrics of several parts of one step."""
    out: dict[str, Value] = {}
    for part in parts:
        for name, value in part.items():
            if name not in out:
                out[name] = value
            elif type(out[name]) is type(value):
                out[name] = out[name].merge(value)
            else:
                raise TypeError(f"metric {name!r} is a {type(out[name]).__name__} and a {type(value).__name__}")
    return out


def flatten(metrics: Metrics) -> dict[str, float]:
    """Plain numbers by name, for loggers."""
    return {key: number for name, value in metrics.items() for key, number in value.scalars(name).items()}
