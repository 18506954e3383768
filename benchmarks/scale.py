"""More cards than were at hand: what a card holds, and what a step takes, computed from measured pieces.

    python benchmarks/scale.py

Nothing is run. Memory is Tandem's own plan of a recipe (``tandem check``), which was within a tenth of what cards held;
what it leaves is keys and values. Times are a step of pairs measured on one card and on two (``pairs.py``), of which
what travels is scaled with the number of cards and the rest stays: each card has the same work. So waits for the
slowest of many cards, and a network that others use, are not in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _models import model_config
from _versus import aligned

from tandem.config import loading as recipes
from tandem.machine import Machine
from tandem.trainer import memory_plan as memory

GIB = 1 << 30
USABLE = 0.95
"""Of a card: the rest is the allocator's and the driver's."""
SMALLEST_CACHE = 1e-6
"""GB of keys and values in the plan, whose room is what it leaves."""
CARDS = 8
HOST = Machine(name="host", free=1 << 42, total=1 << 42, is_host=True)


@dataclass(frozen=True, kw_only=True)
class Division:
    """How eight cards divide a model, and the optimizer that they divide its states of."""

    shape: str
    workers: int = 1
    """Of each engine; 1: pairs, whole weights on every card."""
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        """For a row."""
        way = "pairs" if self.workers == 1 else f"weights cut, {CARDS // self.workers} engines of {self.workers}"
        return f"{self.shape}, {way}, {self.optimizer}"

    def options(self) -> dict[str, Any]:
        """The recipe."""
        return {
            "model": self.shape,
            "steps": 1,
            "env": "arithmetic",
            "ranks": CARDS,
            "distributed": {"shard": "weights" if self.workers > 1 else "states"},
            "engine": {"kind": "vllm", "tensor_parallel_size": self.workers, "kv_cache_gb": SMALLEST_CACHE},
            "sync": "shared",
            "dtype": "bfloat16",
            "optimizer": {"kind": self.optimizer},
            "checkpointing": "full",
            "micro_batch_tokens": 8192,
            "sampling": {"max_tokens": 2048},
        }


DIVISIONS = (
    Division(shape="qwen2.5-3b"),
    Division(shape="qwen2.5-7b"),
    Division(shape="qwen2.5-14b"),
    Division(shape="qwen2.5-14b", optimizer="adamw8bit"),
    Division(shape="qwen2.5-14b", workers=2),
    Division(shape="qwen2.5-32b", optimizer="adamw8bit"),
    Division(shape="qwen2.5-32b", workers=4),
    Division(shape="qwen2.5-32b", workers=8),
    Division(shape="qwen2.5-72b", workers=8),
)


def memory_rows() -> Iterator[list[str]]:
    """What a card of 80 GiB and of 141 GiB holds, and the tokens that an engine keeps in what is left."""
    yield ["eight cards", "plan, GB of a card", *(f"{gib} GiB: left, tokens of an engine" for gib in (80, 141))]
    for division in DIVISIONS:
        config = recipes.from_options(division.options(), [], Path("scale")).config
        shape = model_config(division.shape)
        planner = memory.planner(config, shape, card(141), HOST)
        total = planner.plan(config).total
        head = shape.hidden_size // shape.num_attention_heads
        token = 2 * 2 * shape.num_hidden_layers * head * max(1, shape.num_key_value_heads // division.workers)
        room = [card(gib).free - total for gib in (80, 141)]
        yield [
            division.name,
            f"{total / 1e9:.0f}",
            *(f"{left / 1e9:.0f}, {left // token // 1000:,}k" if left > 0 else "no" for left in room),
        ]


def card(gib: int) -> Machine:
    """A card with so much memory."""
    return Machine(name="card", free=int(USABLE * gib * GIB), total=gib * GIB, is_host=False)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Milliseconds of a step's parts, medians."""

    sampling: float
    compute: float
    """Forward and backward, with the sums of gradients at a pass's end."""
    optimizer: float
    """Without the gather of weights that follows."""
    gather: float
    publish: float
    """Pause, probe, checksums."""
    rest: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.sampling + self.compute + self.optimizer + self.gather + self.publish + self.rest


ONE = Measured(sampling=1203, compute=1368, optimizer=52, gather=0, publish=115, rest=27)
TWO = Measured(sampling=1227, compute=1423, optimizer=43, gather=11, publish=259, rest=18)
"""One H100 with 128 rollouts of Qwen2.5-3B's shape, and two that are pairs with 256, on the same machine within a
quarter of an hour (docs/design/performance.md)."""
WEIGHTS = 6.17e9
"""Bytes of them in bfloat16."""
NETWORK = 45e9
"""Bytes a second of each card between hosts, of a network card of 400 Gbit/s for each: a guess."""


def received(cards: int) -> float:
    """Share of all weights that a rank receives in a gather, and sends as gradients."""
    return (cards - 1) / cards


def step(cards: int, *, slowest: float | None = None) -> Measured:
    """A step of so many pairs, each with one card's work.

    Args:
        cards: two or more.
        slowest: bytes a second between hosts; None: all are in one, and exchanges are as fast as between two cards.
    """
    more = received(cards) / received(2)
    gather, sums = TWO.gather * more, (TWO.compute - ONE.compute) * more
    if slowest is not None:
        gather = max(gather, 1000 * WEIGHTS * received(cards) / slowest)
        sums = max(sums, 1000 * 2 * WEIGHTS * received(cards) / slowest)  # float32
    divided = 2 * (ONE.optimizer - TWO.optimizer)  # what two ranks halve
    optimizer = ONE.optimizer - divided * received(cards)
    return replace(TWO, compute=ONE.compute + sums, optimizer=optimizer, gather=gather)


def step_rows() -> Iterator[list[str]]:
    """Steps of pairs by the number of cards."""
    yield [
        "pairs, the same work on each card",
        "sampling",
        "compute",
        "optimizer",
        "gather",
        "publish",
        "step",
        "of one",
    ]
    rows = {"1 card, measured": ONE, "2 cards, measured": TWO}
    rows |= {f"{cards} cards of one host": step(cards) for cards in (4, 8)}
    rows |= {f"{cards} cards, {cards // 8} hosts": step(cards, slowest=NETWORK) for cards in (16, 32)}
    for name, row in rows.items():
        parts = (row.sampling, row.compute, row.optimizer, row.gather, row.publish, row.step)
        yield [name, *(f"{part:,.0f}" for part in parts), f"{row.step / ONE.step:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(aligned(list(memory_rows())), aligned(list(step_rows())), sep="\n\n")


if __name__ == "__main__":
    main()
