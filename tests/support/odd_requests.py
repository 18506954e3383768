"""Requests to an engine that nobody should send, made from those that somebody would."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

IDS = {"prompt_token_ids": [72, 105]}
SIBLINGS = {"asked": {"prompt": IDS, "max_tokens": 2, "logprobs": 0}, "seeds": [1, None]}
META = {"w": {"shape": [2, 3], "dtype": "float32"}}
LISTED = {"param_names": ["w"], "param_shapes": {"w": [2, 3]}, "param_dtypes": {"w": "float32"}, "num_params": 1}
JOIN = {"init_method": "tcp://127.0.0.1:9", "world_size": 2, "seconds": 0.5, "backend": "gloo", "first_rank": 1}
CONFIG = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
SAMPLING = {"max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "n": 1, "seed": 3}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "min_tokens": 1}
STOPS = {"stop": ["x"], "stop_token_ids": [3], "ignore_eos": True}

OURS: list[tuple[str, Any]] = [
    ("/generate", {"prompt": "Hi", **SAMPLING, "logprobs": 1}),
    ("/generate", {"prompt": IDS, **SAMPLING, **PENALTIES, **STOPS, "prompt_logprobs": 1}),
    ("/generate", {"prompt": IDS, "max_tokens": 2, "logprobs": 0, "detokenize": False}),
    ("/generate/many", {"id": "a", "prompts": [SIBLINGS, SIBLINGS]}),
    ("/generate/take_back", {"id": "a", "numbers": [0]}),
    ("/bridge/pause", {"finish": False, "seconds": 30.0, "step": 3}),
    ("/bridge/resume", {}),
    ("/bridge/stamp", {"step": 3, "digest": "d", "adapter": None}),
    ("/bridge/notify_update", {"update_count": 3, "trainer_rank": 0, "timestamp": 1.5}),
    ("/bridge/stop", {"reason": "a test"}),
    ("/bridge/sleep", {"level": 1}),
    ("/bridge/wake", {}),
    ("/bridge/lend", {}),
    ("/bridge/lend_slot", {"config": CONFIG, "tensors": [["a.lora_A.weight", [8, 64], "float32"]]}),
    ("/bridge/adopt", {"trainer": "4000000:12 boot"}),
    ("/bridge/checksums", {"travels": "weights", "adapter": None, "names": [], "config": {}}),
    ("/bridge/probe", {"tokens": [72, 105], "temperature": 0.7, "max_tokens": 2}),
    ("/lora/load", {"adapter_path": "/nowhere", "adapter_name": "a", "served": False}),
    ("/lora/unload", {"adapter_name": "a", "unless_used": True}),
    ("/nccl/start_receiver", {**JOIN, "param_metadata": META}),
    ("/nccl/start_receiver", {**JOIN, "param_metadata": LISTED, "param_mappings": {"w": "w"}}),
    ("/nccl/receive", {"manifest": [["w", [2, 3], "float32"]], "bucket_bytes": 1024, "config": None}),
    ("/nccl/stop_receiver", {}),
]
"""Routes of ours, each with what somebody would send; no ``min_step``, which may be waited for for ever."""

ODD: list[Any] = [
    None, True, -1, 0, 5, 7.5, 2**31, 2**31 - 1, 2**63, 2**63 - 1, -(2**63), 10**25, 1.5, -0.0, -0.5, 1e-300, 1e308, "",
    "x", "7", "nan", "\x00", "\U0001f600", [], {}, [[]], [[[]]], [None], {"a": None}, [1, "a"], [[1, 2], [3]],
    "x" * 5000, [-1], [259], [10**6], [2**31 - 1], [3] * 5000, "a" * 300_000, 10**6,
]  # fmt: skip
"""In the place of some value."""

NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 400, b"-", b"1.", b"0x1", b"2147483648", b"-1")


def deep(levels: int) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def mutated(value: Any, draw: random.Random) -> Any:
    """A valid body with one place made odd; others may be too."""
    inside = isinstance(value, (dict, list)) and value and draw.random() < 0.9
    if inside and isinstance(value, dict):
        made, name = dict(value), draw.choice(list(value))
        made[name] = mutated(value[name], draw)
        if draw.random() < 0.1:
            made.pop(draw.choice(list(value)))
        return made if draw.random() < 0.8 else mutated(made, draw)
    if inside:
        made, place = list(value), draw.randrange(len(value))
        made[place] = mutated(value[place], draw)
        return made if draw.random() < 0.7 else made * draw.choice([0, 2, 50])
    return deep(draw.choice([40, 300, 900])) if draw.random() < 0.05 else draw.choice(ODD)


def damaged(body: bytes, draw: random.Random) -> bytes:
    """Bytes cut, turned, doubled or replaced."""
    place = draw.randrange(len(body)) if body else 0
    ways: list[Callable[[], bytes]] = [
        lambda: body[:place],
        lambda: body[place:],
        lambda: body[:place] + bytes([draw.randrange(256)]) + body[place + 1 :],
        lambda: body + body[place:],
        lambda: body.replace(b"1", draw.choice(NUMBERS), 1),
        lambda: body.replace(b"2", draw.choice(NUMBERS), 1),
        lambda: body.replace(b"{", b'{"a":' + b"[" * draw.choice([2, 500, 90_000]), 1),
        lambda: body.replace(b":", b":" + b'{"a":' * draw.choice([2, 500, 90_000]), 1),
    ]
    return draw.choice(ways)()


RESTORE: list[tuple[str, Any]] = [
    ("/bridge/wake", {}),
    ("/bridge/pause", {}),
    ("/bridge/stamp", {"step": 1}),
    ("/bridge/resume", {}),
]
"""What has an engine serve again, whatever it was told before."""


def controls(path: str) -> bool:
    """Whether a route may leave the engine otherwise than it was."""
    return path.startswith(("/bridge/", "/nccl/"))


def request(draw: random.Random, valid: list[tuple[str, Any]]) -> tuple[str, bytes]:
    """A route and the body that it is sent."""
    path, value = draw.choice(valid)
    body = json.dumps(mutated(value, draw) if draw.random() < 0.8 else value).encode()
    return path, damaged(body, draw) if draw.random() < 0.3 else body
