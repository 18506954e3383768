"""What travels between the trainer and an engine's HTTP process, as types that refuse what they do not know."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby, repeat
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from tandem.types import Sampling

T = TypeVar("T")


Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What vLLM's processes can tell each other; a larger number would fail on the way, as an error of the server's."""
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""A token id; that it is the model's is checked with its vocabulary."""
Seconds = Annotated[float, msgspec.Meta(gt=0)]
"""A time that something may take."""

IN_PLACE = "tandem"
"""Name of the adapter whose tensors are overwritten by each publish."""


class Refused(Exception):
    """A request that is answered with an error; ``status`` and ``headers`` are HTTP's."""

    def __init__(self, status: int, reason: str, headers: Sequence[tuple[bytes, bytes]] = ()):
        super().__init__(reason)
        self.status = status
        self.headers = headers


def parsed(body: bytes, kind: type[T]) -> T:
    """A request's body; an empty one is an empty object.

    Raises:
        Refused: it is no JSON, or not of this type; the message says where.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"the request's body is not as expected: {error}") from error


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A request's body."""


class Ids(Body):
    """A prompt as token ids."""

    prompt_token_ids: list[Token]


_OURS = frozenset({"prompt", "adapter", "stream", "flat_logprobs", "min_step"})
"""Fields of ``Generate`` that say nothing of sampling."""


class Generate(Body):
    """POST /generate. Fields that nothing is said of are those of vLLM's SamplingParams."""

    prompt: str | Ids
    """Text, or token ids."""
    n: Whole = 1
    max_tokens: Whole = 16
    min_tokens: Whole = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Whole = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Whole | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: Whole | None = None
    """0 and 1 tell that of the sampled token; more, those of as many of the likeliest too; null tells none at all."""
    flat_logprobs: bool = False
    """True tells each token's own alone, as ``token_logprobs`` instead of ``logprobs``."""
    prompt_logprobs: Whole | None = None
    detokenize: bool = True
    """False spares the text."""
    adapter: str | None = None
    """Name of a loaded adapter, instead of what is served."""
    min_step: Whole = -1
    """Oldest policy step that may sample it: it waits until that is published, or is being proven. -1: any may."""
    stream: bool = False
    """Refused when true: /v1/completions streams."""

    def sampling(self) -> dict[str, Any]:
        """Arguments of SamplingParams."""
        plain = msgspec.to_builtins(self)
        given = {name: value for name, value in plain.items() if name not in _OURS}
        if self.logprobs == 1:
            given["logprobs"] = 0  # vLLM would tell the likeliest token's beside the sampled one's
        # Said even where vLLM's default is the same: its defaults are not ours to rely on.
        return {"n": self.n, "max_tokens": self.max_tokens, "temperature": self.temperature, **given}


def asked(
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    limit: int,
    ends: Sequence[int],
    seed: int | None = None,
    flat: bool = False,
    min_step: int = -1,
) -> Generate:
    """A request for one completion of at most ``limit`` tokens, with the logprob of each token.

    ``ends`` are the model's own end tokens.
    """
    return Generate(
        prompt=Ids(prompt_token_ids=list(prompt)),
        max_tokens=min(sampling.max_tokens, limit),
        min_tokens=min(sampling.min_tokens, limit),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=seed,
        stop=list(sampling.stop) or None,
        stop_token_ids=[*ends, *sampling.stop_token_ids],
        include_stop_str_in_output=True,
        logprobs=0,
        flat_logprobs=flat,
        min_step=min_step,
        detokenize=bool(sampling.stop),
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
    token_logprobs: list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    """Per token its own; there where they were asked for flat."""
    prompt_logprobs: list[dict[int, float] | None] | None = None
    cached: int = 0
    """Prompt tokens that came from the prefix cache."""


class Pause(Body):
    """POST /bridge/pause."""

    finish: bool = False
    """Let requests in flight end first."""
    seconds: Seconds = 600.0
    """How long it may last, proof included: an engine that nobody resumes by then is stopped instead of hanging."""
    step: Whole | None = None
    """Policy step that is about to be published, if any: requests for it are sampled beside its proof."""


class Sleep(Body):
    """POST /bridge/sleep."""

    level: Literal[1, 2]
    """1 keeps the weights in the host's memory; 2 keeps nothing, so they must be published again."""


class Wake(Body):
    """POST /bridge/wake."""

    seconds: Seconds = 600.0
    """How long the pause that goes on may last, as that of /bridge/pause."""


class Lend(Body):
    """POST /bridge/lend."""

    folder: str
    """Where shared memory files are made; read on a CPU alone."""


class Stamp(Body):
    """POST /bridge/stamp and /bridge/notify_update."""

    step: Whole | None = None
    """Policy step of the weights held now; by default one more than the last."""
    digest: str = ""
    """Of their bytes."""
    adapter: str | None = None
    """Name of the loaded adapter that this step is."""


class Notify(Stamp):
    """POST /bridge/notify_update, also as Atropos' example trainer sends it."""

    update_count: Whole | None = None
    """Updates so far: the step, where that is not said."""
    trainer_rank: int = 0
    """Who sends it; nothing depends on it."""
    timestamp: float = 0.0
    """When it was sent; nothing depends on it."""


class Stop(Body):
    """POST /bridge/stop."""

    reason: str


class Checksums(Body):
    """POST /bridge/checksums."""

    travels: Literal["weights", "adapter"] = "weights"
    """What is compared."""
    adapter: str | None = None
    """Which adapter, by name; by default the one written in place."""
    names: list[str] = []
    """Of a named adapter: its tensors."""
    config: dict[str, Any] = {}
    """Of a named adapter: PEFT's configuration."""


class Probe(Body):
    """POST /bridge/probe."""

    tokens: list[Token]
    temperature: float = 0.7
    max_tokens: Whole = 8
    seed: Whole = 0
    adapter: str | None = None


class Probed(msgspec.Struct, kw_only=True):
    """Answer of /bridge/probe."""

    scored: list[float | None]
    """None where it is no finite number, which JSON has no word for."""
    tokens: list[int]
    logprobs: list[float | None]
    finish: str
    cached: int
    temperature: float


class LendSlot(Body):
    """POST /bridge/lend_slot."""

    config: dict[str, Any]
    """PEFT's configuration."""
    tensors: list[tuple[str, list[int], str]]
    """Name, shape and type of each tensor that will be written."""
    folder: str
    """Where shared memory files are made; read on a CPU alone."""


class Adapt(Body):
    """POST /bridge/adapt: the borrower of the slot will write it now."""

    key: str
    """That came with the slot."""


class LoadAdapter(Body):
    """POST /lora/load."""

    adapter_path: str
    adapter_name: str | None = None
    """By default the folder's name."""
    served: bool = True
    """Sample from it at once, if nobody has ever stamped a step here; a trainer stamps what it has proven."""


class UnloadAdapter(Body):
    """POST /lora/unload."""

    adapter_name: str | None = None
    """By default all, the one written in place included."""
    unless_used: bool = False
    """Leave it loaded while a request is being sampled with it."""


class Adopt(Body):
    """POST /bridge/adopt."""

    trainer: Annotated[str, msgspec.Meta(pattern=r"^\d+:.+$")]
    """``pid:start time`` of the process whose death ends the engine, after a while."""


class Metadata(msgspec.Struct, kw_only=True):
    """One tensor that will be sent."""

    shape: list[Whole]
    dtype: str


class Listed(Body):
    """All tensors that will be sent, as Atropos' example trainer says it."""

    param_names: list[str]
    """In the order in which they come."""
    param_shapes: dict[str, list[Whole]]
    param_dtypes: dict[str, str]
    num_params: int | None = None
    """How many; checked."""


Entry = tuple[str, list[int], str]
"""Name, shape and type of a tensor that is sent."""


class StartReceiver(Body):
    """POST /nccl/start_receiver."""

    init_method: str
    """tcp://host:port of rank 0."""
    world_size: Whole
    param_metadata: dict[str, Any] = {}
    """What comes with each publish, in this order, as ``Metadata`` by name or as ``Listed``; otherwise every
    /nccl/receive says it."""
    param_mappings: dict[str, Any] = {}
    """The engine's names of it; checked, for the engine knows where its tensors lie."""
    first_rank: Whole = 1
    """Rank of this engine's first worker."""
    backend: str | None = None
    """nccl or gloo; by default what the device has."""
    name: str = "tandem"
    seconds: Seconds = 120.0
    """Deadline of joining and of each transfer."""


class Receive(Body):
    """POST /nccl/receive."""

    manifest: list[Entry] = []
    """Each tensor, in the order in which they come; by default what came last, or what start_receiver announced."""
    bucket_bytes: Annotated[int, msgspec.Meta(gt=0, le=2**63 - 1)] = 64 << 20
    """Most bytes of one transfer, as rank 0 sends them."""
    config: dict[str, Any] | None = None
    """PEFT's configuration, where it is an adapter that comes."""


class Workers(msgspec.Struct, kw_only=True):
    """Part of /bridge/info."""

    rank: int
    world: int
    pid: int
    device: str
    accelerator: str = ""
    """UUID of the GPU; nothing on a host."""
    torch: str
    backend: str
    peak_bytes: int = 0
    """Most that torch has held of a GPU at a time: weights, keys and values, working memory; 0 on a host."""


class Info(msgspec.Struct, kw_only=True):
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


def steps(found: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Inverse of ``runs``."""
    return tuple(chain.from_iterable(repeat(step, count) for step, count in found))
