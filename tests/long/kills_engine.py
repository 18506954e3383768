"""An engine without vLLM: Tandem's own parts of one, over the Llama of transformers, started as vLLM is.

``package`` writes a folder that Python finds as ``vllm``, so ``python -m vllm.entrypoints.openai.api_server`` runs
``main`` here. Routes, frontend and worker extension are the real ones: weights in shared memory, versions, proofs and
probes, which compare its logprobs with the trainer's. Each answer is computed by itself, so its bits do not depend on
what else is sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch
from aiohttp import web
from transformers import DynamicCache, LlamaForCausalLM

from tandem.engines.vllm.worker.parameter_map import ParameterMap, recorded

sys.path.append(str(Path(__file__).parents[1]))  # where a script of this folder, or an engine, is started by itself
from support import fake_vllm  # type: ignore[import-not-found]

os.environ.pop("TANDEM_IN_PLACE", None)  # it speaks of vLLM's own kernels, and there are none here

WITNESS = "TANDEM_WITNESS"
"""Variable that names a file for what is sampled; each token with the sum of the last norm's weights at that moment."""
GONE_SECONDS = 0.05
"""Between two looks whether a client is still there."""
FILES = {
    "__init__.py": "from kills_engine import SamplingParams\n",
    "sampling_params.py": "class RequestOutputKind: DELTA, FINAL_ONLY = 'delta', 'final'\n",
    "entrypoints/__init__.py": "",
    "entrypoints/openai/__init__.py": "",
    "entrypoints/openai/api_server.py": "import sys\nfrom kills_engine import main\nmain(sys.argv[1:])\n",
}
"""Of the folder that is found as ``vllm``."""


def package(folder: Path) -> list[str]:
    """Write the folder; returns what to put on PYTHONPATH."""
    for name, text in FILES.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    here = Path(__file__).parent
    return [str(folder), str(here), str(here.parent)]


@dataclass(kw_only=True)
class SamplingParams(fake_vllm.SamplingParams):  # type: ignore[misc]
    """What Tandem sends; what changes the distribution beyond temperature is refused."""

    def __post_init__(self) -> None:
        plain = (self.n, self.min_tokens, self.top_p, self.top_k, self.min_p, self.repetition_penalty, self.stop)
        if plain != (1, 0, 1.0, 0, 0.0, 1.0, None):
            raise ValueError(f"this stand-in samples from the whole distribution, one answer at a time: {self}")


@dataclass
class Request:
    """One answer in the making."""

    prompt: list[int]
    params: SamplingParams
    generator: torch.Generator
    outputs: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    cache: DynamicCache = field(default_factory=DynamicCache)
    tokens: list[int] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)


def places_of(model: Any) -> ParameterMap:
    """Where each tensor lies: in the parameter of its name."""
    tensors = {name: parameter.detach().to("meta") for name, parameter in model.named_parameters()}

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, whole in weights:
            model.get_parameter(name).data.copy_(whole)

    model.load_weights = load_weights
    return recorded(model, tensors, tensors, world=1)


class Client:
    """What Tandem uses of vLLM's ``AsyncLLM``: one token for every request in each turn, while nobody pauses it."""

    def __init__(self, model: Any, options: argparse.Namespace):
        parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model=options.served_model_name or options.model,
                max_model_len=options.max_model_len,
                logprobs_mode="processed_logprobs",
                get_vocab_size=lambda: len(model.model.embed_tokens.weight),
            ),
            lora_config=None,
            parallel_config=parallel,
            cache_config=SimpleNamespace(block_size=16),
            scheduler_config=SimpleNamespace(max_num_seqs=256),
        )
        self._model = model
        self._worker = resolve_name(options.worker_extension_cls)()
        self._worker.rank = 0
        self._worker.model_runner = SimpleNamespace(model=model, vllm_config=self.vllm_config, kv_caches=[])
        self._worker._tandem_recorded = places_of(model)
        self._requests: list[Request] = []
        self._there = asyncio.Event()
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._work = asyncio.create_task(self._steps(), name="scheduler")

    @property
    def errored(self) -> bool:
        """Whether the scheduler has ended."""
        return self._work.done()

    @property
    def dead_error(self) -> BaseException:
        """Why."""
        return self._work.exception() or RuntimeError("the scheduler ended")

    async def check_health(self) -> None:
        """Raise if the scheduler has ended."""
        if self._work.done():
            self._work.result()

    def get_tokenizer(self) -> Any:
        """Bytes are tokens."""
        return SimpleNamespace(encode=lambda text: list(text.encode()), decode=lambda ids: "")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Between two turns."""
        self._goes_on.clear()

    async def resume_generation(self) -> None:
        """Go on."""
        self._goes_on.set()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Of the one worker."""
        return [getattr(self._worker, method)(*args)]

    async def generate(
        self, prompt: Mapping[str, Any], params: SamplingParams, key: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        """Tokens as they are sampled."""
        assert lora_request is None
        generator = torch.Generator()
        if params.seed is None:
            generator.seed()
        else:
            generator.manual_seed(params.seed)
        request = Request(list(prompt["prompt_token_ids"]), params, generator)
        self._requests.append(request)
        self._there.set()
        try:
            while True:
                output = await request.outputs.get()
                yield output
                if output.finished:
                    return
        finally:
            self._requests.remove(request)

    async def _steps(self) -> None:
        while True:
            await self._goes_on.wait()
            waiting = [r for r in self._requests if not _done(r)]
            if not waiting:
                self._there.clear()
                await self._there.wait()
            for request in waiting:
                if not self._goes_on.is_set():
                    break
                request.outputs.put_nowait(self._step(request))
                await asyncio.sleep(0)

    @torch.inference_mode()
    def _step(self, request: Request) -> Any:
        """One forward pass and one token."""
        params, first = request.params, not request.tokens
        ids = request.prompt if first else request.tokens[-1:]
        logits = self._model(torch.tensor([ids]), past_key_values=request.cache).logits[0]
        scored = _scored(logits, request.prompt) if first and params.prompt_logprobs is not None else None
        logprobs = (logits[-1] / (params.temperature or 1.0)).log_softmax(-1)
        if params.temperature:
            # Something, as vLLM does, where weights are no numbers.
            token = int(torch.multinomial(logprobs.exp().nan_to_num(1.0), 1, generator=request.generator))
        else:
            token = int(logprobs.argmax())
        request.tokens.append(token)
        request.sums.append(weight_sum(self._model.model.norm.weight))
        if WITNESS in os.environ and _done(request):
            with open(os.environ[WITNESS], "a") as file:
                file.write(json.dumps([request.prompt, request.tokens, request.sums]) + "\n")
        part = SimpleNamespace(
            index=0,
            token_ids=[token],
            logprobs=None if params.logprobs is None else _flat([{token: float(logprobs[token])}]),
            text="",
            finish_reason=_finish(request),
        )
        return SimpleNamespace(
            finished=part.finish_reason is not None, num_cached_tokens=0, prompt_logprobs=scored, outputs=[part]
        )


def _finish(request: Request) -> str | None:
    if not request.params.ignore_eos and request.tokens[-1] in (request.params.stop_token_ids or ()):
        return "stop"
    return "length" if len(request.tokens) >= request.params.max_tokens else None


def _done(request: Request) -> bool:
    return bool(request.tokens) and _finish(request) is not None


def weight_sum(weight: torch.Tensor) -> float:
    """A number that tells versions of a weight apart."""
    return float(weight.double().sum())


def _flat(positions: Sequence[Mapping[int, float]]) -> Any:
    kept = [{token: SimpleNamespace(logprob=value) for token, value in each.items()} for each in positions]
    return fake_vllm.FlatLogprobs(kept)


def _scored(logits: torch.Tensor, prompt: Sequence[int]) -> Any:
    rows = logits[:-1].log_softmax(-1)
    return _flat([{}, *({t: float(row[t])} for row, t in zip(rows, prompt[1:], strict=True))])


async def serve(options: argparse.Namespace) -> None:
    """Answer HTTP until the end of the process."""
    torch.set_num_threads(1)
    model: Any = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    state = SimpleNamespace(engine_client=Client(model.eval().requires_grad_(False), options))
    app = SimpleNamespace(state=state)
    routes = resolve_name(options.middleware)(_nothing_else)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return await _answered(routes, app, request)

    runner = web.ServerRunner(web.Server(handle, access_log=None), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port, reuse_address=True).start()
    await asyncio.Event().wait()


async def _nothing_else(scope: Any, receive: Any, send: Any) -> None:
    """Where vLLM's own routes would be."""
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def _answered(routes: Any, app: Any, request: web.BaseRequest) -> web.Response:
    """ASGI, as far as the routes use it."""
    body: list[bytes] = [await request.read()]
    headers = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
    scope = {"type": "http", "path": request.path, "method": request.method, "headers": headers, "app": app}
    status, parts = 500, []

    async def receive() -> dict[str, Any]:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(GONE_SECONDS)
        return {"type": "http.disconnect"}

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await routes(scope, receive, send)
    return web.Response(status=status, body=b"".join(parts), content_type="application/json")


def main(arguments: Sequence[str]) -> None:
    """Serve as the command line says; options of vLLM that mean nothing here are ignored."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--worker-extension-cls", default="tandem.engines.vllm.worker.extension.WorkerExtension")
    parser.add_argument("--middleware", default="tandem.engines.vllm.server.routes.Routes")
    options, _ = parser.parse_known_args(arguments)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(options))


if __name__ == "__main__":
    main(sys.argv[1:])
