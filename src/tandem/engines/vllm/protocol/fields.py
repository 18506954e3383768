"""What fields of messages to an engine may hold: ranges that no model, context or machine goes beyond."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What vLLM's processes can tell each other; a larger number would fail on the way, as an error of the server's."""
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""A token id; that it is the model's is checked with its vocabulary."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=7 * 24 * 3600)]
"""A time that something may take; a week at most."""
Text = Annotated[str, msgspec.Meta(max_length=4096)]
"""A name, a digest, a path: what is kept or logged."""
MOST_ANSWERS = 1024
"""Most answers to one prompt."""
Answers = Annotated[int, msgspec.Meta(ge=1, le=MOST_ANSWERS)]
"""How many answers to one prompt."""
Length = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
"""Tokens of an answer; that they fit the engine's context is checked with it."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A number of tokens that may be none."""
Likeliest = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
"""Of how many of the likeliest tokens logprobs are told; -1: of all."""
Temperature = Annotated[float, msgspec.Meta(ge=0, le=100)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
TopK = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, msgspec.Meta(ge=0, le=1)]
Repetition = Annotated[float, msgspec.Meta(ge=0.01, le=100)]
"""Logits are divided by it: by less, they are no numbers any more."""
Penalty = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Stops = Annotated[list[Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]], msgspec.Meta(max_length=256)]
StopTokens = Annotated[list[Token], msgspec.Meta(max_length=4096)]
Dtype = Annotated[
    str,
    msgspec.Meta(pattern=r"^(torch\.)?(float(16|32|64)|bfloat16|float8_(e4m3fn|e5m2)|u?int8|int(16|32|64)|bool)$"),
]
"""torch's name of a type."""
Shape = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**40)]], msgspec.Meta(max_length=8)]
"""Of a tensor."""
DEPTH = 64
"""Most objects and lists in each other; more than any message has, and less than anybody's recursion takes."""


def shallow(value: Any) -> None:
    """See that free JSON is no deeper than ``DEPTH`` and has no number that vLLM's processes could not tell each other.

    Raises:
        ValueError: it is, or has.
    """
    level = [value]
    for _ in range(DEPTH):
        inner = [each for one in level for each in (one.values() if isinstance(one, dict) else one)]
        if any(isinstance(each, int) and not -(2**63) <= each < 2**63 for each in inner):
            raise ValueError("a number has more than 64 bits")
        level = [each for each in inner if isinstance(each, (dict, list))]
        if not level:
            return
    raise ValueError(f"objects and lists are nested more than {DEPTH} levels deep")
