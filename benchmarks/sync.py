"""What it costs to bring new weights to vLLM, for each way, with requests in flight; random weights of a known shape.

    python benchmarks/sync.py --shape qwen2.5-3b
    python benchmarks/sync.py --shape tiny --python .venv-engine/bin/python      # on a CPU, to see that it works
    python benchmarks/sync.py --shape qwen2.5-3b --ways broadcast --devices 1    # the engine on a second card

One engine is started for each way. Before it is bound, its speed is measured as it is: through vLLM's own route and
through Tandem's. Then weights are published with requests in flight, and the speed is measured again. A change of every
trained weight in place stands for the optimizer and is timed apart.

ways: plain (an engine that nothing is bound to), shared, shared-lora, merged, hotswap, broadcast, broadcast-lora, and
swaps: many hot swaps under load, where for a sample of answers the logprob of every token is compared with the
trainer's policy of the version that the answer carries, and with its neighbours.

Exits 1 if a request failed, a version was wrong, or a way that was asked for did not run.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import asyncio
import contextlib
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _load import Endless, Load, Stopwatch, TimedCompute, by_stock, by_tandem, instrument, memory, rates, spread
from _models import SHAPES, build, scratch, size
from _versus import aligned, append
from torch import Tensor

from tandem.engines.base import EngineRequirements, ExportsWeights
from tandem.engines.vllm.spec import Vllm
from tandem.model.policy import Policy, load_model, load_tokenizer
from tandem.trainable.base import Trainable
from tandem.trainable.full import Full
from tandem.trainable.lora import Lora
from tandem.types import PolicyVersion
from tandem.weight_sync.base import WeightSync
from tandem.weight_sync.broadcast import Broadcast
from tandem.weight_sync.hotswap import Hotswap
from tandem.weight_sync.shared import Shared
from tandem.weight_sync.transaction.session import WeightSyncSession

CUDA = torch.cuda.is_available()
WAYS = ("plain", "shared", "merged", "shared-lora", "hotswap", "broadcast", "broadcast-lora")
PHASES = (
    *("pause", "optimizer", "fold", "save", "move", "sum here", "sum there", "probe there", "probe here"),
    *("stamp", "resume", "in all", "still"),
)
"""Of a publish, in their order; still is the time without sampling beyond the optimizer's own."""
SIZES = (0.5, 1.1, 0.7, 1.3, 0.6, 1.2, 0.8)
"""Of an adapter, by version in turn: neighbours differ so much that an answer tells which of them it is of."""


@dataclass
class Bench:
    """What all ways share."""

    args: argparse.Namespace
    model: Path
    dtype: torch.dtype
    folder: Path

    @property
    def context(self) -> int:
        return 64 + 2 * max(int(self.args.tokens), 64)

    def way(self, name: str) -> tuple[Trainable, WeightSync]:
        """What is trained and how it travels."""
        lora: dict[str, Any] = {"rank": self.args.rank, "alpha": 2 * self.args.rank}
        broadcast: dict[str, Any] = {"backend": self.args.backend, "bucket_mb": self.args.bucket_mb}
        proof: dict[str, Any] = {"tolerance": self.args.tolerance}
        trainable: Trainable = Lora(**lora)
        match name:
            case "plain" | "shared":
                return Full(), Shared(**proof)
            case "merged":
                return Lora(**lora, merged=True), Shared(**proof)
            case "shared-lora":
                return trainable, Shared(**proof)
            case "hotswap" | "swaps":
                return trainable, Hotswap(**proof)
            case "broadcast":
                return Full(), Broadcast(**broadcast, **proof)
            case "broadcast-lora":
                return trainable, Broadcast(**broadcast, **proof)
        raise SystemExit(f"there is no way {name!r}; choose from {', '.join((*WAYS, 'swaps'))}")

    def engine(self) -> Vllm:
        """Options of every engine: the same, so that speeds compare."""
        args = self.args
        return Vllm(
            python=args.python,
            gpu_memory_utilization=args.utilization,
            kv_cache_gb=args.kv_cache_gb if torch.cuda.is_available() else 0.25,
            max_num_seqs=max(args.requests, 8),
            enforce_eager=args.eager,
            tensor_parallel_size=args.tensor_parallel,
            devices=(args.devices,) if args.devices else (),
            linger_seconds=5.0,
        )

    def policy(self, trainable: Trainable, *, lent: bool) -> tuple[Policy, TimedCompute]:
        """The trainer's side; on the host where its weights will be the engine's."""
        device = torch.device("cuda:0" if torch.cuda.is_available() and not lent else "cpu")
        compute = TimedCompute()
        model = load_model(str(self.model), dtype=self.dtype, device=device)
        torch.manual_seed(0)
        return Endless(
            trainable.prepare(model).eval(), load_tokenizer(str(self.model)), name=str(self.model), compute=compute
        ), compute


class Change:
    """What stands for the optimizer: every version has weights of its own, each written in place.

    An adapter is a function of the version, so that an older one can be made again; whole weights drift to and fro.
    """

    def __init__(self, trainable: Trainable, policy: Policy):
        self._trainable, self._policy = trainable, policy
        self._first: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """Give an adapter values: it starts as zero, which would change nothing."""
        if self._trainable.folder_name == "adapter":
            generator = torch.Generator("cpu").manual_seed(7)
            for name, parameter in self._trainable.parameters(self._policy.model):
                if "lora_B" in name:
                    values = torch.randn(parameter.shape, generator=generator).to(parameter) * 0.05
                    self._first.append((parameter.detach(), values))
            self.write(0)

    @torch.no_grad()
    def write(self, version: int) -> None:
        """Bring the trained weights to ``version``."""
        if self._first:
            factor = SIZES[version % len(SIZES)]
            for parameter, values in self._first:
                torch.mul(values, factor, out=parameter)
        else:
            for _, parameter in self._trainable.parameters(self._policy.model):
                # The last bit of every weight, there and back: random weights that drift soon give wild logits.
                bits = torch.int16 if parameter.element_size() == 2 else torch.int32
                parameter.detach().view(bits).bitwise_xor_(1)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


@dataclass
class Live:
    """One way, bound."""

    link: WeightSyncSession
    engine: Any
    load: Load
    watch: Stopwatch
    change: Change
    result: dict[str, Any]
    worker: int


@contextlib.asynccontextmanager
async def opened(bench: Bench, name: str) -> AsyncIterator[Live]:
    """Start an engine, measure it as it is, bind it and publish version 0."""
    args, begin = bench.args, time.monotonic()
    trainable, sync = bench.way(name)
    result: dict[str, Any] = {"shape": args.shape, "requests": args.requests, "memory": {}}
    folder = Path(tempfile.mkdtemp(prefix=f"sync-{name}-", dir=bench.folder))
    result["memory"]["before"] = memory(None)
    policy, compute = bench.policy(trainable, lent=sync.capability is ExportsWeights)
    result["weights GB"] = round(sum(p.nbytes for p in trainable.base_names(policy.model).values()) / 1e9, 3)
    versions = args.versions
    requirements = EngineRequirements(
        model=str(bench.model),
        dtype=str(bench.dtype).removeprefix("torch."),
        folder=folder,
        payload=trainable.payload,
        rank=getattr(trainable, "rank", 0),
        capability=sync.capability if name != "plain" else None,
        versions=versions,
    )
    try:
        async with bench.engine().open(policy, context=bench.context, requirements=requirements) as started:
            engine: Any = started
            result["start seconds"] = round(time.monotonic() - begin, 1)
            worker = (await engine.servers[0].info()).workers[0].pid
            result["memory"]["engine started"] = memory(worker)
            await speeds(bench, engine, result, "unbound", stock=True)
            watch = compute.watch = Stopwatch()
            change = Change(trainable, policy)
            load = Load(engine, args.requests, args.tokens, single=sync.pause == "never")
            link = WeightSyncSession(
                sync=sync, policy=policy, engine=engine, trainable=trainable, folder=folder, versions=versions
            )
            live = Live(link, engine, load, watch, change, result, worker)
            if name == "plain":
                yield live
                return
            await link.bind(fresh=True)
            result["memory"]["bound"] = memory(worker)
            await policy.compute(change.begin)
            instrument(watch, engine, sync)
            async with link, link.open(PolicyVersion(step=0, digest="")):
                watch.lap()
                yield live
    except BaseException:
        for log in sorted((folder / "logs").glob("*.log")):
            lines = [line for line in log.read_text(errors="replace").splitlines() if "leaked" not in line]
            print(f"--- {log.name} ends:", *lines[-60:], "---", sep="\n", flush=True)
        raise
    finally:
        policy.close()
        shutil.rmtree(folder, ignore_errors=True)


async def speeds(bench: Bench, engine: Any, result: dict[str, Any], when: str, *, stock: bool = False) -> None:
    """Tokens a second through Tandem's route, and through vLLM's own."""
    args = bench.args
    work = {"requests": args.requests, "tokens": args.tokens, "waves": args.waves, "repeat": args.repeat}
    asks = {"tandem": by_tandem(engine)} | ({"stock": by_stock(engine, str(bench.model))} if stock else {})
    for route, each in (await rates(asks, **work)).items():
        result[f"tokens/s {when}, {route}"] = round(statistics.median(each), 1)
        result[f"tokens/s {when}, {route}, each"] = [round(r, 1) for r in each]


async def publish(live: Live, step: int) -> None:
    """One publish of the next version; its phases go to the stopwatch."""
    live.load.latest = step
    took = 0.0
    async with live.link.commit(step) as commit:
        begin = time.perf_counter()
        await live.link.policy.compute(live.change.write, step)
        took = time.perf_counter() - begin
    assert commit.published is not None
    live.load.served = step
    done, row = commit.published, live.watch.lap()
    row["move"] = row.get("move", 0.0) - row.get("save", 0.0)
    row["optimizer"], row["in all"] = took, done.seconds
    row["still"] = done.paused - (took if live.link.sync.pause == "step" else 0.0)
    row["bytes"], row["gap"] = done.bytes, done.probe_gap or 0.0
    live.watch.rows[-1] = row


async def measured(bench: Bench, name: str) -> dict[str, Any]:
    """Everything about one way."""
    args = bench.args
    async with opened(bench, name) as live:
        result = live.result
        if name == "plain":
            return result
        await speeds(bench, live.engine, result, "bound")
        live.watch.rows.clear()
        async with live.load.running() as load:
            await asyncio.sleep(args.settle)
            made, begin = load.tokens_made, time.perf_counter()
            # A swap waits until requests in flight need no more adapters than there is room for: seconds each.
            publishes = args.publishes if live.link.sync.pause != "never" else max(3, args.publishes // 4)
            for step in range(1, publishes + 1):
                if live.link.sync.pause == "never":
                    await load.no_older_than(step - args.versions + 1)
                await publish(live, step)
                await asyncio.sleep(args.between)
            seconds = time.perf_counter() - begin
            result["memory"]["publishing"] = memory(live.worker)
            result["publishes"], result["a publish every s"] = publishes, round(seconds / publishes, 3)
            result["tokens/s while publishing"] = round((load.tokens_made - made) / seconds, 1)
        summarise(live, result)
        return result


def phases(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Spread of each phase of these publishes, in milliseconds."""
    return {
        phase: [round(1000 * value, 2) for value in spread([row[phase] for row in rows if phase in row])]
        for phase in PHASES
        if any(phase in row for row in rows)
    }


def summarise(live: Live, result: dict[str, Any]) -> None:
    """Phases in milliseconds, bytes, and what the answers said."""
    rows, load = live.watch.rows, live.load
    result["ms"] = phases(rows)
    result["bytes"] = max(row["bytes"] for row in rows)
    moved = result["ms"]["move"][0]
    if result["bytes"] and moved:
        result["move GB/s"] = round(result["bytes"] / moved / 1e6, 2)
    result["probe gap, nats"] = round(max(row["gap"] for row in rows), 6)
    result["answers"], result["of several versions"] = load.answered, load.spans
    result["failures"] = load.failures[:5]
    result["failed"] = len(load.failures)


async def swaps(bench: Bench) -> dict[str, Any]:
    """Many hot swaps under load, and whether answers are of the version they carry."""
    args = bench.args
    async with opened(bench, "swaps") as live:
        result, deadline = live.result, time.monotonic() + args.swap_seconds
        live.watch.rows.clear()
        live.load.keep = 1
        done = 0
        async with live.load.running() as load:
            while done < args.swaps and time.monotonic() < deadline:
                done += 1
                await load.no_older_than(done - args.versions + 1)
                await publish(live, done)
                if done % 100 == 0:
                    medians = {k: v[0] for k, v in phases(live.watch.rows[-100:]).items() if v[0]}
                    print(
                        f"  {done} swaps, {load.answered} answers, {len(load.failures)} failures; ms {medians}",
                        flush=True,
                    )
        result["swaps"] = done
        summarise(live, result)
        await live.link.policy.compute(_right_policy, live, done, args.samples, result)
        if done < args.swaps:
            result["failed"] += 1
            result["failures"].append(f"only {done} of {args.swaps} swaps in {args.swap_seconds:g} s")
        return result


def _right_policy(live: Live, last: int, samples: int, result: dict[str, Any]) -> None:
    """Score a sample of answers by the trainer's policy of their version, and of the versions beside it."""
    answers = live.load.answers
    chosen = answers[:: max(1, len(answers) // samples)]
    gaps: dict[str, list[float]] = {"right": [], "neighbour": [], "largest": []}
    for ids, answer in chosen:
        version = answer.versions[0]
        by_version = {}
        for candidate in {version, max(version - 1, 0), min(version + 1, last)}:
            live.change.write(candidate)
            ours = live.link.policy.score([*ids, *answer.tokens])[len(ids) - 1 :]
            by_version[candidate] = [abs(a - b) for a, b in zip(ours, answer.logprobs, strict=True)]
        means = {v: statistics.fmean(gap) for v, gap in by_version.items()}
        gaps["right"].append(means[version])
        gaps["largest"].append(max(by_version[version]))
        gaps["neighbour"].append(min(mean for v, mean in means.items() if v != version))
        if min(means, key=lambda v: means[v]) != version:
            live.load.failures.append(f"an answer of version {version} fits another one better: {means}")
    allowed = 1e-3 if live.link.policy.dtype.itemsize == 4 else 0.3
    wrong = sum(gap > allowed for gap in gaps["largest"])
    result["failed"], result["failures"] = len(live.load.failures) + wrong, live.load.failures[:5]
    if wrong:
        result["failures"].append(f"{wrong} answers differ by more than {allowed} nats from their version's policy")
    result["answers compared"] = len(chosen)
    result["nats off, mean over tokens, right version"] = round(statistics.fmean(gaps["right"]), 6)
    result["nats off, largest, right version"] = round(max(gaps["largest"]), 6)
    result["nats off, mean over tokens, next version"] = round(statistics.fmean(gaps["neighbour"]), 6)


def report(name: str, result: Mapping[str, Any]) -> None:
    """One way's table."""
    print(f"\n== {name}, {result['shape']}, {result['requests']} requests in flight")
    phases = [[phase, *(f"{ms:.2f}" for ms in each)] for phase, each in result.get("ms", {}).items()]
    print(aligned([["phase, ms", "median", "p99", "largest"], *phases]))
    for moment, value in result["memory"].items():
        print(f"   memory, {moment}: {value}")
    for key, value in result.items():
        if key not in ("ms", "memory") and not key.endswith(", each"):
            print(f"   {key:<44} {value}", flush=True)


def compare(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Speeds side by side."""
    base = results.get("plain", {}).get("tokens/s unbound, tandem")
    rows = [["way", "stock route", "unbound", "bound", "bound/plain", "still, ms", "failed"]]
    for name, result in results.items():
        keys = ("tokens/s unbound, stock", "tokens/s unbound, tandem", "tokens/s bound, tandem")
        stock, unbound, bound = (result.get(key) for key in keys)
        share = f"{bound / base:.3f}" if bound and base else ""
        still = result.get("ms", {}).get("still", [""])[0]
        rows.append([name, *(str(cell or "") for cell in (stock, unbound, bound, share, still, result.get("failed")))])
    print("\n" + aligned(rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--shape", choices=tuple(SHAPES), default="qwen2.5-3b")
    option("--ways", default=",".join(WAYS), help="comma-separated")
    option("--python", help="interpreter that has vLLM; by default this one")
    option("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if CUDA else "float32")
    option("--requests", type=int, default=128 if CUDA else 8, help="kept in flight")
    option("--tokens", type=int, default=256 if CUDA else 32, help="of each request")
    option("--publishes", type=int, default=100 if CUDA else 5)
    option("--between", type=float, default=0.1, help="seconds between two publishes")
    option("--settle", type=float, default=1.0, help="seconds of load before the first")
    option("--waves", type=int, default=1, help="requests one after another in a measurement of speed")
    option("--repeat", type=int, default=3, help="measurements of speed")
    option("--rank", type=int, default=32)
    option("--versions", type=int, default=4, help="adapters that requests in flight may need at once")
    option("--swaps", type=int, default=1000 if CUDA else 20, help="of the way swaps")
    option("--swap-seconds", type=float, default=420.0, help="the most that swaps may take")
    option("--samples", type=int, default=64, help="answers of swaps that are compared")
    option("--tolerance", type=float, default=0.0, help="nats of a probe; random deep models are noisy")
    option("--utilization", type=float, default=0.4, help="gpu_memory_utilization")
    option("--kv-cache-gb", type=float, default=0.0, help="instead of what utilization leaves")
    option("--eager", action=argparse.BooleanOptionalAction, default=not CUDA, help="no CUDA graphs")
    option("--devices", default="", help="CUDA_VISIBLE_DEVICES of the engine")
    option("--tensor-parallel", type=int, default=1)
    option("--backend", choices=("auto", "nccl", "gloo"), default="auto", help="of a broadcast")
    option("--bucket-mb", type=int, default=256)
    option("--folder", type=Path, help="for the model and what travels through files")
    option("--json", type=Path, help="append results here")
    args = parser.parse_args()
    if args.backend == "auto" and torch.cuda.device_count() == 1:
        args.backend = "gloo"  # NCCL refuses two ranks on one card
    return args


def main() -> int:
    args = arguments()
    dtype = getattr(torch, args.dtype)
    folder = args.folder or scratch(size(args.shape, dtype)) / "tandem-bench"
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(args, build(args.shape, dtype, folder), dtype, folder)
    if CUDA:
        torch.cuda.empty_cache()  # what making the model took
    results, bad = {}, 0
    for name in args.ways.split(","):
        begin = time.monotonic()
        try:
            result = asyncio.run(swaps(bench) if name == "swaps" else measured(bench, name))
        except Exception as error:  # the other ways are still worth measuring
            traceback.print_exc()
            print(f"\n== {name}: FAILED after {time.monotonic() - begin:.0f} s: {error}", flush=True)
            result = {"error": str(error)}
            results[name], bad = {"failed": "error"}, bad + 1
        else:
            result["seconds"] = round(time.monotonic() - begin, 1)
            results[name], bad = result, bad + (1 if result.get("failed") else 0)
            report(name, result)
        if args.json:
            append(args.json, way=name, **result)
    compare(results)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
