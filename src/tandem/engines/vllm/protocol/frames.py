"""What travels where many answers are asked for at once: one request, and a frame for each answer."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec

from tandem.engines.vllm.protocol.fields import MOST_ANSWERS, Text, Whole
from tandem.engines.vllm.protocol.messages import Body, Generate


class Siblings(Body):
    """Answers to one prompt, each a request of its own to vLLM."""

    asked: msgspec.Raw
    """What all have in common: a ``Generate`` with token ids as its prompt and one answer with flat logprobs. Read by
    itself, so that what is wrong with it costs these answers alone."""
    seeds: Annotated[list[Whole | None], msgspec.Meta(max_length=MOST_ANSWERS)]
    """Of each answer; null: it draws from the engine's stream."""


def siblings(asked: Generate) -> Siblings:
    """Answers to a prompt, none yet."""
    return Siblings(asked=msgspec.Raw(msgspec.json.encode(asked)), seeds=[])


class Many(Body):
    """POST /generate/many: answered by a frame for each answer, as soon as it is there."""

    id: Text
    """By which answers are taken back."""
    prompts: Annotated[list[Siblings], msgspec.Meta(max_length=MOST_ANSWERS)]
    """Answers are numbered in this order, from 0."""


class TakeBack(Body):
    """POST /generate/take_back: nobody waits for these answers any more."""

    id: Text
    """Of the request for many."""
    numbers: list[Whole]
    """Of the answers."""


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A frame: one of the answers."""

    number: int
    """Which."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token its own."""
    versions: list[tuple[int, int]]
    """Policy steps that sampled the tokens, as runs of (step, tokens)."""
    finish: str
    engine: str
    """Name that the HTTP process gave itself when it started."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A frame: why one of the answers is not there, as a request that is refused is told it."""

    number: int
    """Which."""
    status: int
    title: str
    detail: str


Frame = Sampled | Failed

KIND = b"application/vnd.tandem.frames"
"""Type of a body of frames: of each its length, and then MessagePack, since numbers as text take ten times as long."""
_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def framed(frame: Frame) -> bytes:
    """A frame as it travels."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def frames(buffer: bytearray) -> Iterator[Frame]:
    """Take the frames that are there out of what came so far.

    Raises:
        msgspec.DecodeError: they are something else.
    """
    at = 0
    while len(buffer) >= at + _LENGTH.size:
        begin = at + _LENGTH.size
        end = begin + _LENGTH.unpack_from(buffer, at)[0]
        if len(buffer) < end:
            break
        yield _decoder.decode(memoryview(buffer)[begin:end].tobytes())
        at = end
    del buffer[:at]
