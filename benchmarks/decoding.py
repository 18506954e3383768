"""What logprobs cost while vLLM decodes: none, one with each token, in pieces, and these flat, as Tandem asks for them.

    PYTHONPATH=src .venv-engine/bin/python benchmarks/decoding.py --shape tiny --requests 128 --tokens 128   # on a CPU
    PYTHONPATH=src python benchmarks/decoding.py --shape qwen2.5-3b                                          # on a GPU

By an interpreter that has vLLM, since this process takes the place of the engine's HTTP process. Waves of equal
requests, answers of exactly so many tokens; the ways take turns, --repeat times. ``ms a token`` is the time of a
wave over the tokens of an answer (median, and the best). The rest are microseconds of a processor for each token of
each request: of this process, and of the threads of the engine's process that have most to do (the first launches
forward passes, the next sends). ``--engine-args '{"distributed_executor_backend": "mp"}'`` gives the model a process of
its own. The first line says which process is the engine's, for a profiler of one's own choice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _models
import torch

from tandem.engines.vllm.speedups import PIECES_KEY

PROMPT = 96
SIBLINGS = 8
WAYS: dict[str, dict[str, Any]] = {
    "none": {"logprobs": None},
    "each": {"logprobs": 0},
    "pieces": {"logprobs": 0, "extra_args": {PIECES_KEY: True}},
    "flat": {"logprobs": 0, "extra_args": {PIECES_KEY: True}, "flat_logprobs": True},
}
THREADS = 2
"""Threads of the engine's process that are told of."""


@dataclass(frozen=True)
class Wave:
    """What one took."""

    seconds: float
    here: float
    """Of a processor, this process."""
    threads: tuple[float, ...]
    """Of a processor, each of the engine's busiest threads."""


def spent(pid: int) -> dict[int, float]:
    """Seconds of a processor that each thread of a process has had."""
    tick = os.sysconf("SC_CLK_TCK")
    seconds_by_thread = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        fields = (thread / "stat").read_text().rpartition(")")[2].split()
        seconds_by_thread[int(thread.name)] = (int(fields[11]) + int(fields[12])) / tick
    return seconds_by_thread


class Bench:
    """An engine, and waves of requests to it."""

    def __init__(self, client: Any, tokens: int, ways: Sequence[str]):
        self.client, self.tokens, self.ways, self.waves = client, tokens, ways, 0
        self.core = next(
            child.pid for child in multiprocessing.active_children() if child.pid and "EngineCore" in child.name
        )

    async def wave(self, requests: int, way: str) -> Wave:
        """Send so many at once and wait for the last."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.waves += 1
        params = SamplingParams(
            max_tokens=self.tokens,
            temperature=1.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **WAYS[way],
        )

        async def one(i: int) -> None:
            prompt = [1 + i // SIBLINGS, *(5 + k % 50 for k in range(PROMPT - 1))]
            token_prompt = {"type": "token", "prompt_token_ids": prompt, "cache_salt": str(self.waves)}
            async for output in self.client.generate(token_prompt, params, f"{self.waves}-{i}"):
                (part,) = output.outputs
                assert len(part.token_ids) == params.max_tokens
                assert way == "none" or len(part.logprobs) == params.max_tokens

        there, here, begin = spent(self.core), time.process_time(), time.perf_counter()
        await asyncio.gather(*map(one, range(requests)))
        took, here, now = time.perf_counter() - begin, time.process_time() - here, spent(self.core)
        busiest = sorted((now[thread] - there.get(thread, 0.0) for thread in now), reverse=True)
        return Wave(took, here, tuple(busiest[:THREADS]))

    async def case(self, requests: int, repeat: int) -> dict[str, Any]:
        """All ways with so many requests at once, taking turns."""
        for way in self.ways:
            await self.wave(requests, way)
        waves = defaultdict(list)
        for turn in range(repeat):
            order = list(self.ways)
            for way in order[turn % len(order) :] + order[: turn % len(order)]:
                waves[way].append(await self.wave(requests, way))
        return {way: self.summary(requests, of_way) for way, of_way in waves.items()}

    def summary(self, requests: int, waves: list[Wave]) -> dict[str, Any]:
        each = 1e6 / (requests * self.tokens * len(waves))
        seconds = [wave.seconds for wave in waves]
        return {
            "ms a token": round(1e3 * statistics.median(seconds) / self.tokens, 3),
            "best": round(1e3 * min(seconds) / self.tokens, 3),
            "this process": round(each * sum(wave.here for wave in waves), 1),
            "engine's threads": [round(each * sum(wave.threads[i] for wave in waves), 1) for i in range(THREADS)],
        }


async def measure(args: argparse.Namespace, folder: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    cuda = torch.cuda.is_available()
    here: dict[str, Any] = (
        {"gpu_memory_utilization": 0.3} if cuda else {"kv_cache_memory_bytes": 500_000_000, "enforce_eager": True}
    )
    if not cuda:
        here["distributed_executor_backend"] = "uni"  # the model runs where the scheduler does, as on a GPU
    client = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(_models.made_apart(args.shape, folder)),
            max_num_seqs=max(args.requests),
            max_model_len=PROMPT + args.tokens,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            scheduler_cls="tandem.engines.vllm.speedups.scheduler",
            worker_extension_cls="tandem.engines.vllm.worker.extension.WorkerExtension",
            **here | args.engine_args,
        )
    )
    try:
        bench = Bench(client, args.tokens, args.ways)
        print(json.dumps({"engine": bench.core}), flush=True)
        for requests in args.requests:
            for way, figures in (await bench.case(requests, args.repeat)).items():
                print(json.dumps({"requests": requests, "logprobs": way, **figures}), flush=True)
    finally:
        client.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-3b", choices=list(_models.SHAPES))
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--engine-args", type=json.loads, default={}, help="options of vLLM, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(args, Path(folder)))


if __name__ == "__main__":
    main()
