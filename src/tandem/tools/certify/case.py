"""``tandem certify``: a recipe's own parts on made-up groups, and every check of what they compute."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.config import loading as recipes
from tandem.config.loading import RunConfig
from tandem.errors import ConfigError
from tandem.model.packing import torch_alone
from tandem.testing import oracle
from tandem.testing.oracle import Formula, SampledSequence
from tandem.tools.certify import optimizer
from tandem.tools.certify.made_up import GroupMaker
from tandem.tools.certify.policy import (
    Certificate,
    CertificateLine,
    CertifiedPolicy,
    Gradient,
    distance,
    judged,
    norm,
    skipped,
)  # fmt: skip
from tandem.tools.certify.variations import VARIATIONS
from tandem.trainer.pack import Packer
from tandem.types import Group

EXACT = 1e-5
"""Largest distance of float32 from the float64 formulas: logprobs are exact to some 1e-6."""
PENALTY = 1e-4
"""Largest distance of a penalty, which is of the difference of logprobs that are nearly alike."""
SAME = 1e-6
"""Largest distance of gradients that must be the same, in float32."""

FORMULAS = "whole gradient by formulas"
FOLLOWS = "reference as it follows"
_STYLES = {"pass": "green", "fail": "bold red", "skipped": "yellow"}


def print_certificate(recipe: Path, overrides: Sequence[str]) -> int:
    """Print the certificate; returns 0 if it passes, else 1.

    Args:
        recipe: what is certified.
        overrides: laid over it.

    Raises:
        ConfigError: the recipe is wrong, or its model cannot be read.
    """
    certificate, console = certify(recipes.load(recipe, overrides).config), Console()
    table = Table(box=None, pad_edge=False)
    for column in ("", "what was compared", "apart", "allowed", "with what"):
        table.add_column(column, justify="right" if column in ("apart", "allowed") else "left")
    for line in certificate.lines:
        figures = ["" if value is None else f"{value:.1e}" if value else "0" for value in (line.figure, line.bound)]
        table.add_row(Text(line.state, _STYLES[line.state]), line.name, *figures, Text(line.note))
    console.print(certificate.model, markup=False, highlight=False)
    console.print(table)
    failed = sum(line.state == "fail" for line in certificate.lines)
    verdict = f"{failed} failed" if failed else "passed"
    console.print(f"{verdict} in {certificate.seconds:.0f} s", style="bold red" if failed else "green", highlight=False)
    return 1 if failed else 0


def certify(config: RunConfig) -> Certificate:
    """Look at the gradient of a recipe's own parts, and at what its optimizer makes of it.

    Args:
        config: the recipe; a tiny model of its architecture stands for its own.

    Raises:
        ConfigError: the model cannot be read.
    """
    began = time.monotonic()
    with torch_alone(), contextlib.closing(CertifiedPolicy(config)) as live:
        lines = tuple(_lines(live))
        count = sum(parameter.numel() for parameter in live.policy.model.parameters())
        described = f"a tiny {live.policy.config.model_type}, {count:,} parameters, float32 on the CPU"
    return Certificate(model=described, lines=lines, seconds=time.monotonic() - began)


def _lines(live: CertifiedPolicy) -> Iterator[CertificateLine]:
    config = live.config
    weights = {
        env: {name: spec.weight for name, spec in source.rewards.items()} for env, source in config.sources.items()
    }
    ends = (*live.policy.end_tokens, *config.sampling.stop_token_ids)
    known = Formula(recipe=recipes.as_json(config), ends=ends, weights=weights)
    groups, pack = _groups(live, known), Packer.of(config, live.policy)
    batch = pack(groups, version=0)
    base = live.gradients(batch)
    size = norm(base)
    sound = math.isfinite(size) and size > 0
    yield CertificateLine(name="the gradient is there", state="pass" if sound else "fail", figure=size, note="0")
    unknown = oracle.unknown(known)
    if live.exact.kind not in oracle.TRAINABLES:
        unknown.append(f"trainable {live.exact.kind}")
    expected = [] if unknown else oracle.gradients(live.exact, live.placed, [(1, groups)], known)
    off = distance(base, expected) if expected else 0.0
    slack = max(1.0, _rounding(live, groups, known, expected)) if off > EXACT / 4 else 1.0
    # Two results that rounding puts so far from float64 may be twice as far from one another.
    same = max(SAME * slack, min(2 * off, EXACT / 2))
    for name, variation in VARIATIONS.items():
        try:
            figures = [distance(each, base) for each in variation(live, pack, groups)]
        except ConfigError as error:
            yield skipped(name, str(error))
            continue
        yield judged(name, figures, same, "the recipe's own way", f"{len(figures)} ways")
    if unknown:
        yield skipped(FORMULAS, f"no formula is known here for {', '.join(unknown)}")
    else:
        others = sorted(frozenset(base[0]) ^ live.exact.names)
        note = f"first of {len(others)}: {others[0]}" if others else ""
        yield judged("weights that are trained", [len(others)], 0.0, "the recipe", note)
        yield judged(FORMULAS, [off], EXACT * slack, "float64, one sequence at a time")
        if known.reference is not None:
            yield _followed(live, pack, groups, known, slack)
    yield from optimizer.lines(live, base[0], EXACT * slack)


def _rounding(live: CertifiedPolicy, groups: Sequence[Group], known: Formula, expected: Sequence[Gradient]) -> float:
    """Factor of the bounds for an architecture that is not as exact in float32 as most: its plain forward shows it."""
    rounded = copy.deepcopy(live.exact)
    rounded.model.float()
    return 4 * distance(oracle.gradients(rounded, live.placed, [(1, groups)], known), expected) / EXACT


def _groups(live: CertifiedPolicy, known: Formula) -> list[Group]:
    """Made-up groups, sampled by policies near to this one and far from it."""
    maker = GroupMaker(config=live.config, known=known, vocabulary=live.policy.head.weight.shape[0])
    live.exact.put(live.exact.held(live.placed(0)))
    return maker.groups(functools.partial(_own, live, known))


@torch.no_grad()
def _own(
    live: CertifiedPolicy, known: Formula, prompt: Sequence[int], tokens: Sequence[int], temperature: float
) -> list[float]:
    """The policy's logprobs, by the formulas."""
    at, begins = range(len(prompt), len(prompt) + len(tokens)), (len(prompt),) * len(tokens)
    one = SampledSequence(ids=(*prompt, *tokens), at=tuple(at), begins=begins, temperature=temperature)
    return oracle.logprobs(live.exact, one, known).tolist()


def _followed(
    live: CertifiedPolicy, pack: Packer, groups: Sequence[Group], known: Formula, slack: float
) -> CertificateLine:
    """The penalty's gradient in the steps before and after a reference follows, twice."""
    assert known.reference is not None
    every = known.reference[1].get("every", 1)
    numbers = sorted({every, every + 1, 2 * every, 2 * every + 1})
    steps = [(number, [_without_advantage(groups[i % 2])]) for i, number in enumerate(numbers)]
    expected: list[Gradient] = [*oracle.gradients(live.exact, live.placed, steps, known)]
    walked = live.walk([(number, pack(some, version=0)) for number, some in steps])
    note = f"steps {', '.join(map(str, numbers))}"
    return judged(FOLLOWS, [distance(walked, expected)], PENALTY * slack, "float64 formula", note)


def _without_advantage(group: Group) -> Group:
    """The same, of which no answer is better than another."""
    return dataclasses.replace(
        group, rollouts=tuple(dataclasses.replace(r, advantages=(0.0,) * r.num_tokens) for r in group.rollouts)
    )
