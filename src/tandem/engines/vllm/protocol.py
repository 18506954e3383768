"""Wire types between the trainer and an engine's HTTP process: msgspec structs that refuse unknown fields."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, repeat
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from tandem.engines.base import MOST_SECONDS
from tandem.types import Sampling

Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What vLLM's processes can tell each other; a larger number would fail on the way, as an error of the server's."""
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""A token id; that it is the model's is checked with its vocabulary."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=MOST_SECONDS)]
"""A time that something may take."""
Text = Annotated[str, msgspec.Meta(max_length=4096)]
"""A name, a digest, a path: what is kept or logged."""
MOST_ANSWERS = 1024
"""Most answers to one prompt."""
Length = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
"""Tokens of an answer; that they fit the engine's context is checked with it."""
Likeliest = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
"""Of how many of the likeliest tokens logprobs are told; -1: of all."""
Temperature = Annotated[float, msgspec.Meta(ge=0, le=100)]
Penalty = Annotated[float, msgspec.Meta(ge=-100, le=100)]
Stops = Annotated[list[Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]], msgspec.Meta(max_length=256)]
Dtype = Annotated[
    str,
    msgspec.Meta(pattern=r"^(torch\.)?(float(16|32|64)|bfloat16|float8_(e4m3fn|e5m2)|u?int8|int(16|32|64)|bool)$"),
]
"""torch's name of a type."""
Shape = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**40)]], msgspec.Meta(max_length=8)]
"""Of a tensor."""

T = TypeVar("T")

Entry = tuple[Text, Shape, Dtype]
"""Name, shape and type of a tensor that is sent."""

IN_PLACE = "tandem"
"""Name of the adapter whose tensors are overwritten by each publish."""


class Refusal(Exception):
    """A request that is answered with an error; ``status`` is HTTP's."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


def parsed(body: bytes, kind: type[T]) -> T:
    """A request's body; an empty one is an empty object.

    Raises:
        Refusal: it is no JSON, or not of this type; the message says where.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"the request's body is not as expected: {error}") from error


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A request's body."""


class Ids(Body):
    """A prompt as token ids."""

    prompt_token_ids: list[Token]


_NOT_SAMPLING = frozenset({"prompt", "adapter", "stream", "min_step"})
"""Fields of ``Generate`` that say nothing of sampling."""
UNFILTERED = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0
}  # fmt: skip
"""Fields of ``Generate`` and of ``Sampling`` that change the distribution, beside the temperature, with the values that
leave it alone."""


class Generate(Body):
    """POST /generate. Fields that nothing is said of are those of vLLM's SamplingParams."""

    prompt: str | Ids
    """Text, or token ids."""
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_ANSWERS)] = 1
    max_tokens: Length = 16
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    temperature: Temperature = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0
    """Logits are divided by it: by less than its bound, they overflow."""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: Whole | None = None
    stop: str | Stops | None = None
    stop_token_ids: Annotated[list[Token], msgspec.Meta(max_length=4096)] | None = None
    include_stop_str_in_output: bool = False
    regex: Text | None = None
    """What an answer must match, by vLLM's grammar."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: Likeliest | None = None
    """0 and 1 tell that of the sampled token; more, those of as many of the likeliest too; null tells none at all."""
    prompt_logprobs: Likeliest | None = None
    detokenize: bool = True
    """False spares the text."""
    adapter: Text | None = None
    """Name of a loaded adapter, instead of what is served."""
    min_step: Whole = -1
    """Oldest policy step that may sample it: it waits until that is published, or is being proven. -1: any may."""
    stream: bool = False
    """Refused when true: /v1/completions streams."""

    def sampling(self) -> dict[str, Any]:
        """Arguments of SamplingParams."""
        plain = msgspec.to_builtins(self)
        arguments = {name: value for name, value in plain.items() if name not in _NOT_SAMPLING}
        if self.logprobs == 1:
            arguments["logprobs"] = 0  # vLLM would tell the likeliest token's beside the sampled one's
        # Said even where vLLM's default is the same: its defaults are not ours to rely on.
        return {"n": self.n, "max_tokens": self.max_tokens, "temperature": self.temperature, **arguments}


def completion_request(
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    limit: int,
    ends: Sequence[int],
    min_step: int = -1,
) -> Generate:
    """A request for one completion of at most ``limit`` tokens, with the logprob of each token.

    ``ends`` are the model's own end tokens.
    """
    return Generate(
        prompt=Ids(prompt_token_ids=list(prompt)),
        max_tokens=min(sampling.max_tokens, limit),
        min_tokens=min(sampling.min_tokens, limit),
        stop=list(sampling.stop) or None,
        stop_token_ids=[*ends, *sampling.stop_token_ids],
        include_stop_str_in_output=True,
        regex=sampling.regex or None,
        logprobs=0,
        min_step=min_step,
        detokenize=bool(sampling.stop),
        **{name: getattr(sampling, name) for name in ("temperature", *UNFILTERED)},
    )


class Generated(msgspec.Struct, kw_only=True):
    """Answer of /generate. One entry per completion."""

    text: list[str]
    prompt: str
    finish_reasons: list[str]
    token_ids: list[list[int]]
    prompt_token_ids: list[int]
    versions: list[list[tuple[int, int]]]
    """Policy steps that sampled the tokens, as runs of (step, tokens)."""
    engine: str
    """Name that the HTTP process gave itself when it started."""
    logprobs: list[list[list[dict[int, float]]]] | None = None
    """Per token a list with one mapping of token id to logprob."""
    prompt_logprobs: list[dict[int, float] | None] | None = None
    cached: int = 0
    """Prompt tokens that came from the prefix cache."""


class Pause(Body):
    """POST /bridge/pause."""

    finish: bool = False
    """Let requests in flight end first."""
    seconds: Seconds = 600.0
    """How long it may last, proof included: an engine that is not resumed by then is stopped instead of hanging."""
    step: Whole | None = None
    """Policy step that is about to be published, if any: requests for it are sampled beside its proof."""
    by: Text = ""
    """The client that pauses it, shown at /health."""


class Sleep(Body):
    """POST /bridge/sleep."""

    level: Literal[1, 2]
    """1 keeps the weights in the host's memory; 2 keeps nothing, so they must be published again."""


class SetVersion(Body):
    """POST /bridge/stamp and /bridge/notify_update."""

    step: Whole | None = None
    """Policy step of the weights held now; by default one more than the last."""
    digest: Text = ""
    adapter: Text | None = None
    """Name of the loaded adapter that this step is."""


class Notify(SetVersion):
    """POST /bridge/notify_update, also as Atropos' example trainer sends it."""

    update_count: Whole | None = None
    """Updates so far: the step, where that is not said."""
    trainer_rank: int = 0
    """The client that sends it; nothing depends on it."""
    timestamp: float = 0.0
    """When it was sent; nothing depends on it."""


class Stop(Body):
    """POST /bridge/stop."""

    reason: str


class Checksums(Body):
    """POST /bridge/checksums."""

    payload: Literal["weights", "adapter"] = msgspec.field(default="weights", name="travels")
    adapter: Text | None = None
    """Which adapter, by name; by default the one written in place."""
    names: list[Text] = []
    """Of a named adapter: its tensors."""
    config: dict[str, Any] = {}
    """Of a named adapter: PEFT's configuration."""


class ProbeRequest(Body):
    """POST /bridge/probe."""

    tokens: Annotated[list[Token], msgspec.Meta(min_length=1)]
    temperature: Temperature = 0.7
    max_tokens: Length = 8
    adapter: Text | None = None


class ProbeResponse(msgspec.Struct, kw_only=True):
    """Answer of /bridge/probe."""

    scored: list[float | None]
    """None where it is no finite number, which JSON has no word for."""
    tokens: list[int]
    logprobs: list[float | None]
    finish: str
    cached: int


class ExportAdapter(Body):
    """POST /bridge/lend_slot."""

    config: dict[str, Any]
    """PEFT's configuration."""
    tensors: list[Entry]
    """Name, shape and type of each tensor that will be written."""


class LoadAdapter(Body):
    """POST /lora/load."""

    adapter_path: Text
    adapter_name: Text | None = None
    """By default the folder's name."""
    served: bool = True
    """Sample from it at once, if no step was ever stamped here; a trainer stamps what it has proven."""


class UnloadAdapter(Body):
    """POST /lora/unload."""

    adapter_name: Text | None = None
    """By default all, the one written in place included."""
    unless_used: bool = False
    """Leave it loaded while a request is being sampled with it."""


class Reattach(Body):
    """POST /bridge/adopt."""

    trainer: Annotated[str, msgspec.Meta(pattern=r"^\d{1,9}:.{1,200}$")]
    """``pid:start time`` of the process whose death ends the engine, after a while."""


class Workers(msgspec.Struct, kw_only=True):
    """Part of /bridge/info."""

    rank: int
    pid: int
    device: str
    accelerator: str = ""
    """UUID of the GPU; nothing on a host."""


class EngineInfo(msgspec.Struct, kw_only=True):
    """Answer of /bridge/info."""

    engine: str
    state: str
    reason: str
    step: int
    digest: str
    updates: int
    running: int
    adapter: str | None
    model: str
    context: int
    logprobs: str
    """vLLM's logprobs_mode."""
    adapters: bool
    """True if LoRA is enabled."""
    workers: list[Workers]


def runs(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of equal steps: ``[3, 3, 4]`` is ``[(3, 2), (4, 1)]``."""
    return [(step, sum(1 for _ in same)) for step, same in groupby(steps)]


def steps(pairs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Inverse of ``runs``."""
    return tuple(chain.from_iterable(repeat(step, count) for step, count in pairs))


MOST_MEMBERS = 1024
"""Most members of a group: each keeps a record of all others."""


class Metadata(msgspec.Struct, kw_only=True):
    """Shape and dtype of one tensor of a publish."""

    shape: Shape
    dtype: Dtype


class Listed(Body):
    """Manifest of a publish in the form of Atropos' example trainer."""

    param_names: list[Text]
    """In the order in which they come."""
    param_shapes: dict[Text, Shape]
    param_dtypes: dict[Text, Dtype]
    num_params: int | None = None


class StartReceiver(Body):
    """POST /nccl/start_receiver."""

    init_method: Text
    """tcp://host:port of rank 0."""
    world_size: Annotated[int, msgspec.Meta(ge=2, le=MOST_MEMBERS)]
    param_metadata: msgspec.Raw = msgspec.Raw(b"{}")
    """What comes with each publish, in this order, as ``Metadata`` by name or as ``Listed``; otherwise every
    /nccl/receive says it."""
    param_mappings: dict[Text, msgspec.Raw] = msgspec.field(default_factory=dict)
    """The engine's names of it; nothing depends on it, for the engine knows where its tensors lie."""
    first_rank: Annotated[int, msgspec.Meta(ge=1, lt=MOST_MEMBERS)] = 1
    """Rank of this engine's first worker."""
    backend: Literal["nccl", "gloo"] | None = None
    """nccl or gloo; by default what the device has."""
    name: Text = "tandem"
    seconds: Seconds = 120.0
    """Deadline of joining and of each transfer."""


class Receive(Body):
    """POST /nccl/receive."""

    manifest: list[Entry] = msgspec.field(default_factory=list)
    """Each tensor, in the order in which they come; by default what came last, or what start_receiver announced."""
    bucket_bytes: Annotated[int, msgspec.Meta(gt=0, le=2**40)] = 64 << 20
    """Most bytes of one transfer, as rank 0 sends them."""
    config: dict[str, Any] | None = None
    """PEFT's configuration, where it is an adapter that comes."""
    verify: bool = False
    """Sample on as soon as all of it is there, and give nothing of that out before a version is set."""


class SiblingRequests(Body):
    """Completions of one prompt, each a request of its own to vLLM."""

    request: msgspec.Raw = msgspec.field(name="asked")
    """What all have in common: a ``Generate`` with token ids as its prompt and one answer. Read by
    itself, so that what is wrong with it costs these answers alone."""
    seeds: Annotated[list[Whole | None], msgspec.Meta(max_length=MOST_ANSWERS)]
    """Of each answer; null: it draws from the engine's stream."""


class Many(Body):
    """POST /generate/many: answered by a frame for each answer, within 20 ms of its end."""

    id: Text
    """By which answers are taken back."""
    prompts: Annotated[list[SiblingRequests], msgspec.Meta(max_length=MOST_ANSWERS)]
    """Answers are numbered in this order, from 0."""


class TakeBack(Body):
    """POST /generate/take_back: cancels requests whose responses are no longer wanted."""

    id: Text
    """Of the request for many."""
    numbers: list[Whole]


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A frame of /generate/many: one finished completion."""

    number: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token its own."""
    versions: list[tuple[int, int]]
    """Policy steps that sampled the tokens, as runs of (step, tokens)."""
    finish: str
    engine: str
    """Name that the HTTP process gave itself when it started."""
    experts: bytes = b""
    """Experts that tokens were routed to, as in ``Completion``."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A frame of /generate/many: the error of one completion, with the status of a refused request."""

    number: int
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
