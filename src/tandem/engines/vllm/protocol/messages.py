"""What travels between the trainer and an engine's HTTP process, as types that refuse what they do not know."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby, repeat
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from tandem.engines.vllm.protocol.fields import (
    Answers,
    Count,
    Dtype,
    Length,
    Likeliest,
    MinP,
    Penalty,
    Repetition,
    Seconds,
    Shape,
    Stops,
    StopTokens,
    Temperature,
    Text,
    Token,
    TopK,
    TopP,
    Whole,
    shallow,
)
from tandem.types import Sampling

T = TypeVar("T")


Entry = tuple[Text, Shape, Dtype]
"""Name, shape and type of a tensor that is sent."""

REFUSED = "refused"
"""Under which a worker tells why it does not do what was asked, in the place of what it was asked for."""
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the request's body is not as expected: {error}") from error


def unrefused(ranks: list[Any]) -> list[Any]:
    """What workers answered; raises Refused where one of them refuses."""
    for found in ranks:
        if isinstance(found, dict) and REFUSED in found:
            raise Refused(409, found[REFUSED])
    return ranks


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
    n: Answers = 1
    max_tokens: Length = 16
    min_tokens: Count = 0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: Repetition = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: Whole | None = None
    stop: str | Stops | None = None
    stop_token_ids: StopTokens | None = None
    include_stop_str_in_output: bool = False
    regex: Text | None = None
    """What an answer must match, by vLLM's grammar."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: Likeliest | None = None
    """0 and 1 tell that of the sampled token; more, those of as many of the likeliest too; null tells none at all."""
    flat_logprobs: bool = False
    """True tells each token's own alone, as ``token_logprobs`` instead of ``logprobs``."""
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
        regex=sampling.regex or None,
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
    by: Text = ""
    """Who pauses it, for whoever looks at /health."""


class Sleep(Body):
    """POST /bridge/sleep."""

    level: Literal[1, 2]
    """1 keeps the weights in the host's memory; 2 keeps nothing, so they must be published again."""


class Wake(Body):
    """POST /bridge/wake."""

    seconds: Seconds = 600.0
    """How long the pause that goes on may last, as that of /bridge/pause."""


class Stamp(Body):
    """POST /bridge/stamp and /bridge/notify_update."""

    step: Whole | None = None
    """Policy step of the weights held now; by default one more than the last."""
    digest: Text = ""
    """Of their bytes."""
    adapter: Text | None = None
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
    adapter: Text | None = None
    """Which adapter, by name; by default the one written in place."""
    names: list[Text] = []
    """Of a named adapter: its tensors."""
    config: dict[str, Any] = {}
    """Of a named adapter: PEFT's configuration."""

    def __post_init__(self) -> None:
        shallow(self.config)


class Probe(Body):
    """POST /bridge/probe."""

    tokens: Annotated[list[Token], msgspec.Meta(min_length=1)]
    temperature: Temperature = 0.7
    max_tokens: Length = 8
    seed: Whole = 0
    adapter: Text | None = None


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
    tensors: list[Entry]
    """Name, shape and type of each tensor that will be written."""

    def __post_init__(self) -> None:
        shallow(self.config)


class Adapt(Body):
    """POST /bridge/adapt: the borrower of the slot will write it now."""

    key: Text
    """That came with the slot."""


class LoadAdapter(Body):
    """POST /lora/load."""

    adapter_path: Text
    adapter_name: Text | None = None
    """By default the folder's name."""
    served: bool = True
    """Sample from it at once, if nobody has ever stamped a step here; a trainer stamps what it has proven."""


class UnloadAdapter(Body):
    """POST /lora/unload."""

    adapter_name: Text | None = None
    """By default all, the one written in place included."""
    unless_used: bool = False
    """Leave it loaded while a request is being sampled with it."""


class Adopt(Body):
    """POST /bridge/adopt."""

    trainer: Annotated[str, msgspec.Meta(pattern=r"^\d{1,9}:.{1,200}$")]
    """``pid:start time`` of the process whose death ends the engine, after a while."""


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
    apart: bool = False
    """True if it was started alone, for trainers elsewhere; else it is the engine of the trainer that started it."""


def runs(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of equal steps: ``[3, 3, 4]`` is ``[(3, 2), (4, 1)]``."""
    return [(step, sum(1 for _ in same)) for step, same in groupby(steps)]


def steps(found: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Inverse of ``runs``."""
    return tuple(chain.from_iterable(repeat(step, count) for step, count in found))
