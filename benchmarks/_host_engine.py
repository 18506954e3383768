"""A stand-in for vLLM behind Tandem's own HTTP routes, in a process of its own: nothing is computed.

    python benchmarks/_host_engine.py PORT ANSWERS.json TOKENS SECONDS

Routes, frontend and wire are those of a real engine; what is sampled comes from ANSWERS.json, lists of token ids that
are cut or repeated to TOKENS. Each answer is there within so many seconds, at a random time, and with 0 all are at
once. So what it costs is the HTTP process' share of a rollout, less vLLM's own.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tandem.engines.vllm.server.routes import Routes


class Flat:
    """As vLLM's FlatLogprobs: of each position the first is what was sampled."""

    def __init__(self, logprobs: list[float]):
        self.logprobs = logprobs
        self.start_indices = range(len(logprobs))


class Client:
    """vLLM's AsyncLLM, which has sampled every answer already."""

    errored = False

    def __init__(self, answers: list[list[int]], tokens: int, seconds: float):
        self._seconds = seconds
        whole = [list(itertools.islice(itertools.cycle(answer), tokens)) for answer in answers]
        self._draw = draw = random.Random(0)
        self._answers = itertools.cycle([(one, Flat([-draw.random() for _ in one])) for one in whole])
        self.output_processor = SimpleNamespace(request_states={})
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model="stand-in",
                max_model_len=8192,
                logprobs_mode="processed_logprobs",
                get_vocab_size=lambda: 1 << 20,
            ),
            lora_config=None,
            parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
            cache_config=SimpleNamespace(block_size=16, enable_prefix_caching=True),
            scheduler_config=SimpleNamespace(max_num_seqs=4096, max_num_batched_tokens=1 << 20),
        )

    def get_tokenizer(self) -> None:
        return

    async def check_health(self) -> None:
        return

    async def generate(self, prompt: Any, params: Any, key: str, *, lora_request: Any = None) -> AsyncIterator[Any]:
        await asyncio.sleep(self._seconds * self._draw.random())
        outputs = []
        for index in range(params.n):
            tokens, logprobs = next(self._answers)
            outputs.append(
                SimpleNamespace(index=index, token_ids=tokens, logprobs=logprobs, text="", finish_reason="length")
            )
        yield SimpleNamespace(finished=True, num_cached_tokens=0, prompt_logprobs=None, outputs=outputs)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        return

    async def resume_generation(self) -> None:
        return

    async def collective_rpc(self, method: str, args: Any) -> list[Any]:
        worker = {"rank": 0, "pid": 0, "device": "cpu"}
        return [worker if method == "tandem_info" else {}]


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """Behind the routes there is no server."""


def main() -> None:
    port, file, tokens, seconds = sys.argv[1:]
    client = Client(json.loads(Path(file).read_text(encoding="utf-8")), int(tokens), float(seconds))
    routes, state = Routes(nothing), SimpleNamespace(state=SimpleNamespace(engine_client=client))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await routes({**scope, "app": state}, receive, send)

    # vLLM brings it.
    importlib.import_module("uvicorn").run(app, port=int(port), log_level="warning", access_log=False, lifespan="off")


if __name__ == "__main__":
    main()
