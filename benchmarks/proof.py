"""Publishes pretrained weights to a real vLLM again and again, all in order, and counts what the proof says of that.

    .venv/bin/python benchmarks/proof.py --publishes 1000 --what full [--model FOLDER] [--engine-python PYTHON]

Every publish changes the weights a little around where they were pretrained, so that each rounds anew. An answer that
is asked about again is a doubt; a refused publish is a false alarm, and the exit status is then 1. The last line is a
JSON record. --record FILE keeps what engine and trainer answered, from which the noise that a test reads was taken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from tandem.engines.base import EngineRequirements, ExportsWeights
from tandem.engines.vllm.spec import Vllm
from tandem.errors import StaleWeights
from tandem.model.policy import Compute, Policy, load_model, load_tokenizer
from tandem.trainable.base import Trainable
from tandem.trainable.full import Full
from tandem.trainable.lora import Lora
from tandem.types import PolicyVersion
from tandem.weight_sync.shared import Shared
from tandem.weight_sync.transaction.session import WeightSyncSession
from tandem.weight_sync.verify.probe import ProbeReading

ROOT = Path(__file__).resolve().parent.parent
CUDA = torch.cuda.is_available()
RANK = 16
WHAT: dict[str, Callable[[], Trainable]] = {
    "full": Full,
    "lora": lambda: Lora(rank=RANK, alpha=2 * RANK),
    "merged": lambda: Lora(rank=RANK, alpha=2 * RANK, merged=True),
}


class Doubts(logging.Handler):
    """Counts how often an engine was asked again."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "asked again" in record.getMessage()


def wobble(policy: Policy, trainable: Trainable) -> Callable[[], None]:
    """Stands for the optimizer: vectors and one matrix are put near where they were at first."""
    device = policy.device
    parameters = [p for _, p in trainable.parameters(policy.model)]
    random = torch.Generator(device).manual_seed(1)
    if not isinstance(trainable, Full):  # an adapter begins as nothing
        with torch.no_grad():
            for p in parameters:
                p.add_(torch.randn(p.shape, generator=random, device=device).to(p), alpha=0.01)
    matrices = [p for p in parameters if p.dim() > 1 and p.numel() < 5_000_000]
    vectors = [p for p in parameters if p.dim() == 1]
    kept = {id(p): p.detach().clone() for p in [*vectors, *matrices]}

    def update() -> None:
        index = int(torch.randint(len(matrices), (1,), generator=random, device=device))
        with torch.no_grad():
            for p in [*vectors, matrices[index]]:
                noise = torch.randn(p.shape, generator=random, device=device).to(p)
                p.copy_(kept[id(p)] * (1 + 0.01 * noise))

    return update


async def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Publish, and tell what was seen."""
    begun = time.monotonic()
    trainable, compute = WHAT[args.what](), Compute(args.threads)
    size = (
        {"gpu_memory_utilization": 0.04, "kv_cache_gb": 1.0}
        if CUDA
        else {"kv_cache_gb": 0.25, "args": {"block_size": 32}}
    )
    spec = Vllm(python=args.engine_python, enforce_eager=args.eager, max_num_seqs=8, **size)
    requirements = EngineRequirements(
        model=str(args.model),
        dtype=args.dtype,
        folder=folder,
        payload=trainable.payload,
        rank=RANK if trainable.payload == "adapter" else 0,
        capability=ExportsWeights,
    )

    def load() -> Any:
        torch.manual_seed(0)
        device = torch.device("cuda" if CUDA else "cpu")
        return trainable.prepare(load_model(str(args.model), dtype=getattr(torch, args.dtype), device=device)).eval()

    policy = Policy(await compute(load), load_tokenizer(str(args.model)), name=str(args.model), compute=compute)
    doubts, readings, alarms, done = Doubts(), list[ProbeReading](), 0, 0
    logging.getLogger("tandem.weight_sync.verify.probe").addHandler(doubts)
    logging.getLogger("tandem.weight_sync.verify.probe").setLevel(logging.INFO)
    seconds, gaps = list[float](), list[float]()
    async with spec.open(policy, context=1024, requirements=requirements) as engine:
        link = WeightSyncSession(sync=Shared(), policy=policy, engine=engine, trainable=trainable, folder=folder)
        await link.bind(fresh=True)
        note(link, readings)
        async with link, link.open(PolicyVersion(step=0, digest="")):
            if args.record:
                record(args.record, args, readings[0])
            update = wobble(policy, trainable)
            while done < args.publishes and time.monotonic() - begun < 60 * args.minutes:
                at = time.monotonic()
                try:
                    async with link.commit(done + 1) as commit:
                        await policy.compute(update)
                except StaleWeights as error:
                    alarms += 1
                    print(f"ALARM at {done + 1}: {error}", flush=True)
                    break
                done += 1
                seconds.append(time.monotonic() - at)
                assert commit.published is not None
                gaps.append(commit.published.probe_gap or 0.0)
                if args.record and done % args.record_every == 0:
                    record(args.record, args, readings[-1])
                del readings[:-1]
                if done % 500 == 0:
                    print(f"{done} publishes, {doubts.count} doubts", flush=True)
    policy.close()
    gaps.sort()
    return {
        "what": args.what,
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name() if CUDA else "CPU",
        "publishes": done,
        "doubts": doubts.count,
        "alarms": alarms,
        "ms_median": round(1000 * sorted(seconds)[len(seconds) // 2], 1) if seconds else None,
        "worst_token_nats": {q: round(gaps[int(float(q) * (len(gaps) - 1))], 3) for q in ("0.5", "0.9", "1.0")}
        if gaps
        else {},
    }


def note(link: WeightSyncSession, readings: list[ProbeReading]) -> None:
    """Keep what the proof reads."""
    behaviour = link._behaviour
    read = behaviour._read

    async def noted(*words: Any, **options: Any) -> ProbeReading:
        readings.append(await read(*words, **options))
        return readings[-1]

    vars(behaviour)["_read"] = noted


def record(file: Path, args: argparse.Namespace, reading: ProbeReading) -> None:
    """One publish: logprobs of the probe, and of tokens sampled after it."""
    row = {"what": args.what, "dtype": args.dtype, "device": "cuda" if CUDA else "cpu"}
    answers = {"scored": reading.scored, **({"sampled": reading.sampled} if reading.sampled else {})}
    for name, answer in answers.items():
        row[name] = [[round(x, 7) for x in answer.engine], [round(x, 7) for x in answer.trainer], answer.temperature]
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    local = ROOT / ".venv-engine" / "bin" / "python"
    parser.add_argument("--publishes", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600.0, help="all of it; what was done by then is told")
    parser.add_argument("--what", choices=sorted(WHAT), default="full")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", type=Path, default=ROOT / ".cache" / "smollm2")
    parser.add_argument("--engine-python", default=None if CUDA or not local.exists() else str(local))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, default=not CUDA)
    parser.add_argument("--record", type=Path, help="append what was answered to this file")
    parser.add_argument("--record-every", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="proof-") as folder:
        summary = asyncio.run(run(args, Path(folder)))
    print(json.dumps(summary))
    return int(summary["alarms"] > 0)


if __name__ == "__main__":
    sys.exit(main())
