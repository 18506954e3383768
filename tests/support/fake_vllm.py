"""What the HTTP process of an engine uses of vLLM, as a fake whose scheduler steps when it is told to."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engines.vllm.speedups import PROBE_TOKENS

LIMIT = 64
"""Context of the fake."""
VOCABULARY = 1000
"""Of its model."""
SEQUENCES = 33
"""Answers that it samples at once."""
BATCHED = PROBE_TOKENS + 20
"""Prompt tokens that it reads in one pass."""


class VLLMClientError(Exception):
    """As newer releases have it: no ValueError."""


class VLLMValidationError(VLLMClientError):
    pass


class EngineGenerateError(Exception):
    pass


@dataclass
class SamplingParams:
    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    include_stop_str_in_output: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    stop: Any = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    output_kind: Any = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise VLLMValidationError(f"temperature must be non-negative, got {self.temperature}.")
        if self.n < 1:
            raise ValueError(f"n must be at least 1, got {self.n}.")


class FlatLogprobs:
    """Lists for all positions together, of which each has from one index to another."""

    def __init__(self, positions: Sequence[dict[int, Any] | None]):
        each = [position or {} for position in positions]
        self.end_indices = list(accumulate(map(len, each)))
        self.start_indices = [end - len(one) for end, one in zip(self.end_indices, each, strict=True)]
        self.token_ids = [token for one in each for token in one]
        self.logprobs = [value.logprob for one in each for value in one.values()]

    def __len__(self) -> int:
        return len(self.start_indices)

    def __iter__(self) -> Iterator[dict[int, Any]]:
        for begin, end in zip(self.start_indices, self.end_indices, strict=True):
            values = [SimpleNamespace(logprob=logprob) for logprob in self.logprobs[begin:end]]
            yield dict(zip(self.token_ids[begin:end], values, strict=True))


@dataclass
class Request:
    """One request in the fake's scheduler."""

    prompt: dict[str, Any]
    params: SamplingParams
    adapter: Any
    outputs: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    made: int = 0
    cached: int = 0
    history: list[int] = field(default_factory=list)


class FakeClient:
    """vLLM's AsyncLLM: each step gives each request one token, whose id is the number of the weights held."""

    def __init__(self, *, adapters: bool = False, counts: bool = False):
        self.weights = 0
        self.paused = False
        self.asleep: list[int | None] = []
        self.dead = False
        self.requests: list[Request] = []
        self.seen: list[Request] = []
        self.aborted = 0
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Any] = {
            "tandem_info": [],
            "tandem_connection": [{"state": "idle", "reason": ""}],
            "tandem_map": ['{"w": []}'],
            "tandem_export_weights": ['{"lent": {"tensors": {}}, "map": {}}'],
            "tandem_export_adapter": ['{"key": "k"}'],
        }
        self.cache: set[str] = set()
        self.removed: list[int] = []
        if counts:  # as vLLM does, for whoever wants an answer whole
            self.output_processor = SimpleNamespace(request_states={})
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model="tiny",
                max_model_len=LIMIT,
                logprobs_mode="processed_logprobs",
                enable_sleep_mode=True,
                get_vocab_size=lambda: VOCABULARY,
            ),
            lora_config=object() if adapters else None,
            parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
            cache_config=SimpleNamespace(block_size=1, enable_prefix_caching=True),
            scheduler_config=SimpleNamespace(max_num_seqs=SEQUENCES, max_num_batched_tokens=BATCHED),
        )

    @property
    def errored(self) -> bool:
        return self.dead

    @property
    def dead_error(self) -> Exception:
        error: Exception = type("EngineDeadError", (Exception,), {})("EngineCore encountered an issue")
        return error

    async def check_health(self) -> None:
        if self.dead:
            raise self.dead_error

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(
            encode=lambda text: list(text.encode()), decode=lambda ids: bytes(ids).decode(errors="replace")
        )

    async def generate(
        self, prompt: dict[str, Any], params: SamplingParams, key: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        if len(prompt["prompt_token_ids"]) > LIMIT:
            raise VLLMValidationError(f"The prompt is longer than the maximum model length of {LIMIT}")
        if max(prompt["prompt_token_ids"]) > 999:
            raise EngineGenerateError from ValueError("Token id out of vocabulary")
        request = Request(prompt, params, lora_request)
        self.requests.append(request)
        self.seen.append(request)
        states = self.output_processor.request_states if hasattr(self, "output_processor") else {}
        parent = SimpleNamespace(external_req_id=key) if params.n > 1 else None
        for i in range(params.n):
            states[f"{i}_{key}"] = SimpleNamespace(
                external_req_id=key if parent is None else f"{i}_{key}",
                parent_req=parent,
                request_index=i,
                detokenizer=SimpleNamespace(num_output_tokens=lambda: request.made),
            )
        try:
            while True:
                output = await request.outputs.get()
                yield output
                if output.finished:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise
        finally:
            if request in self.requests:
                self.requests.remove(request)
            for i in range(params.n):
                states.pop(f"{i}_{key}", None)

    async def step(self, times: int = 1) -> None:
        """Forward passes, as many as the scheduler is not kept from; whoever gets tokens has them afterwards."""
        await settle()
        for _ in range(times):
            if not self.paused:
                for request in list(self.requests):
                    output = self._output(request)
                    if output.finished or request.params.output_kind == "delta":
                        request.outputs.put_nowait(output)
            await settle()

    def _output(self, request: Request) -> Any:
        request.made += 1
        request.history.append(self.weights)
        finished = request.made == request.params.max_tokens
        salt, prompt = request.prompt["cache_salt"], request.prompt["prompt_token_ids"]
        if request.made == 1:
            request.cached = len(prompt) if salt in self.cache and request.params.prompt_logprobs is None else 0
            self.cache.add(salt)
        logprob = SimpleNamespace(logprob=-float(self.weights))
        tokens = [self.weights] if request.params.output_kind == "delta" else list(request.history)
        kind = FlatLogprobs if request.params.flat_logprobs else list
        logprobs = kind([{token: SimpleNamespace(logprob=-float(token))} for token in tokens])
        part = SimpleNamespace(
            token_ids=tokens,
            logprobs=None if request.params.logprobs is None else logprobs,
            text="".join(f"<{token}>" for token in tokens),
            finish_reason="length" if finished else None,
        )
        return SimpleNamespace(
            finished=finished,
            num_cached_tokens=request.cached,
            prompt_logprobs=None
            if request.params.prompt_logprobs is None
            else kind([None, *({token: logprob} for token in prompt[1:])]),
            outputs=[SimpleNamespace(index=i, **vars(part)) for i in range(request.params.n)],
        )

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def sleep(self, level: int) -> None:
        assert self.paused
        self.asleep.append(level)

    async def wake_up(self) -> None:
        self.asleep.append(None)
        self.paused = False  # as releases do whose scheduler goes on once all memory is there

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> Any:
        self.calls.append((method, args))
        answer = self.answers.get(method, [None])
        if isinstance(answer, Exception):
            raise answer
        return await answer if isinstance(answer, asyncio.Future) else answer

    async def remove_lora(self, number: int) -> None:
        self.removed.append(number)


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class LoadLoRAAdapterRequest:
    lora_name: str
    lora_path: str


class Models:
    """vLLM's list of models."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, LoRARequest] = {}

    async def load_lora_adapter(self, request: LoadLoRAAdapterRequest) -> Any:
        if "broken" in request.lora_path:
            return SimpleNamespace(error=SimpleNamespace(message="no weights in it"))
        number = len(self.lora_requests) + 1
        self.lora_requests[request.lora_name] = LoRARequest(request.lora_name, number, request.lora_path)
        return "Success"


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(60):
        await asyncio.sleep(0)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``import vllm`` find the little that is imported of it."""
    kinds = types.ModuleType("vllm.sampling_params")
    kinds.RequestOutputKind = SimpleNamespace(DELTA="delta", FINAL_ONLY="final")  # type: ignore[attr-defined]
    lora = types.ModuleType("vllm.lora.request")
    lora.LoRARequest = LoRARequest  # type: ignore[attr-defined]
    protocol = types.ModuleType("vllm.entrypoints.serve.lora.protocol")
    protocol.LoadLoRAAdapterRequest = LoadLoRAAdapterRequest  # type: ignore[attr-defined]
    root = types.ModuleType("vllm")
    root.SamplingParams = SamplingParams  # type: ignore[attr-defined]
    for module in (root, kinds, lora, protocol):
        parts = module.__name__.split(".")
        for depth in range(1, len(parts)):
            name = ".".join(parts[:depth])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
