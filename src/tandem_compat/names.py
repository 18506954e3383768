"""Tandem's names for options of TRL, verl, ms-swift and Axolotl, for the error when a recipe uses one of theirs.

The tables of the dialects that are read whole know most of the names; ``names.toml`` has those that none of them has.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from tandem.errors import DOCS
from tandem_compat.axolotl.options import TOP, TRL, VLLM
from tandem_compat.swift.options import RLHF
from tandem_compat.table import ForeignOption


def meant(option: str) -> str | None:
    """Hint for another system's option, such as ``from TRL? here it is group_size (https://.../guide/trl/)``.

    Args:
        option: a name, or a dotted path of verl's or Axolotl's.

    Returns:
        None for a name that none of them has.
    """
    for system, table in _tables():
        if option in table:
            left_out = table[option].removeprefix("nothing: ")
            here = f"leave it out: {left_out}" if left_out != table[option] else f"here it is {left_out}"
            page = "axolotl" if system == "Axolotl" else "trl"
            return f"from {system}? {here} ({DOCS}/guide/{page}/)"
    return None


@cache
def _tables() -> tuple[tuple[str, Mapping[str, str]], ...]:
    """System and its names; of two that have a name the first is looked at."""
    groups = {"": TOP, "trl.": TRL, "vllm.": VLLM}
    axolotl = {prefix + name: _meaning(row) for prefix, rows in groups.items() for name, row in rows.items()}
    swift = {name: _meaning(argument) for argument in RLHF for name in (argument.name, *argument.also)}
    plain = tomllib.loads((files(__package__) / "names.toml").read_text(encoding="utf-8"))
    return (
        ("TRL", plain["TRL"]),
        ("TRL or Axolotl", {name: _meaning(option) for name, option in TRL.items()}),
        ("verl", plain["verl"]),
        ("prime-rl", plain["prime-rl"]),
        ("TRL or ms-swift", swift),
        ("Axolotl", axolotl),
    )


def _meaning(option: ForeignOption) -> str:
    """What a dialect's table says of one, without the default that it has there."""
    return option.becomes.partition("; default")[0] or f"nothing: {option.idle or option.refused}"
