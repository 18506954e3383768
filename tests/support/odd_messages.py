"""Messages to a broker that nobody would send: valid ones with something odd in them, and bytes that are broken."""

from __future__ import annotations

import random
from typing import Any

from support.brokers import ENV, RUN, group

BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/register"): RUN,
    ("POST", "/register-env"): ENV,
    ("POST", "/disconnect-env"): {"env_id": 0},
    ("GET", "/status-env"): {"env_id": 0},
    ("POST", "/scored_data"): group(2, messages=[[{"role": "user", "content": "x"}]] * 2, env_id=0),
    ("POST", "/scored_data_list"): [group(2), group(3, env_id=0)],
    ("POST", "/ack"): {"batch": "x"},
    ("POST", "/release"): {"batch": "x"},
}
ODD: list[Any] = [
    None, True, -1, 0, 5, 2**31, 2**63, -(2**63), 10**25, 1.5, -0.0, 1e308, "", "x", "7", "nan", "\x00", "\U0001f600",
    [], {}, [[]], [[[]]], [None], {"a": None}, [1, "a"], [[1, 2], [3]], "x" * 5000,
]  # fmt: skip


def mutated(value: Any, draw: random.Random) -> Any:
    """A valid message with one or more places made odd."""
    if draw.random() < 0.15:
        return draw.choice(ODD)
    if isinstance(value, dict):
        made = {key: mutated(one, draw) if draw.random() < 0.3 else one for key, one in value.items()}
        if made and draw.random() < 0.2:
            made.pop(draw.choice(list(made)))
        if draw.random() < 0.1:
            made[draw.choice(["images", "env_id", "group_overrides", "new"])] = draw.choice(ODD)
        return made
    if isinstance(value, list) and value:
        made = list(value)
        place = draw.randrange(len(made))
        made[place] = mutated(made[place], draw)
        return made if draw.random() < 0.7 else made[:-1]
    return draw.choice(ODD)


def damaged(body: bytes, draw: random.Random) -> bytes:
    """Bytes cut, turned, doubled or replaced."""
    if not body:
        return body
    place = draw.randrange(len(body))
    return draw.choice(
        [
            lambda: body[:place],
            lambda: body[place:],
            lambda: body[:place] + bytes([draw.randrange(256)]) + body[place + 1 :],
            lambda: body + body[place:],
            lambda: body.replace(
                b"1", draw.choice([b"NaN", b"1e999", b"-Infinity", b"9" * 400, b"-", b"1.", b"0x1"]), 1
            ),
            lambda: body.replace(b"[", b"[" * draw.choice([2, 500, 90_000]), 1),
        ]
    )()
