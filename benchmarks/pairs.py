"""Several GPUs: pairs of a rank and an engine beside one card, TRL with FSDP2, a larger model, sharded weights.

    python benchmarks/pairs.py --settings pairs,pairs-half,one,trl --out pairs.jsonl
    python benchmarks/pairs.py --settings seven,sharded,context --out pairs.jsonl
    python benchmarks/pairs.py --cards 4 --settings pairs,sharded                 # ranks of four cards
    python benchmarks/pairs.py --table pairs.jsonl
    python benchmarks/pairs.py --try --python .venv-engine/bin/python             # on a CPU, to see that it works

- ``one``, ``pairs``, ``pairs-half``: the batch of versus_trl.py on one card, as much for each card, and it divided.
- ``trl``: TRL's GRPOTrainer on the same cards, by accelerate with FSDP2, vLLM colocated, as much for each card.
- ``seven``: the larger shape, adamw8bit with float32 masters.
- ``sharded``: ``distributed.shard: weights``, and one engine over all cards.
- ``apart``, ``apart-sharded``, ``apart-lora``, ``apart-seven``: one half of the cards trains, an engine on each of the
  others samples; weights by broadcast, adapters by hotswap.
- ``trl-apart``: TRL's GRPOTrainer the same way, by FSDP2 and ``trl vllm-serve``.
- ``context``: steps without an engine on long sequences, that cards share and that one card has alone.

Medians of steps without the first two. Each result is a line of --out as soon as it is there, and logs are beside it.
Exits 1 if a setting failed or a goal was missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _models import made_apart
from _versus import (
    HERE,
    Card,
    Work,
    add_engine,
    add_work,
    append,
    awaited,
    end_in_order,
    ended,
    engine_options,
    environment,
    judged,
    last,
    read,
    table,
    work_of,
    work_options,
)
from versus_trl import Bench, left_out

from tandem.ports import free_port

FITTING = ("micro_batch_tokens=4608", "checkpointing=selective")
"""What one card of 80 GB has room for beside 16 bytes of states a weight of the 3B shape: two groups of the batch."""
NO_MULTICAST: dict[str, Any] = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}
"""vLLM's own choice on Hopper is a fused all-reduce by NVLink multicast, which a host may have switched off."""
BROADCAST = "sync={kind: broadcast, tolerance: 1.0}"
GOALS = (
    ("as much for each card / one card", "pairs", "one", 1.08),
    ("the same work in all / one card", "pairs-half", "one", 0.62),
    ("pairs / TRL with FSDP2", "pairs", "trl", 0.50),
    ("sharded weights / pairs", "sharded", "pairs", 1.25),
    ("engines apart / TRL with FSDP2 and a server", "apart", "trl-apart", 0.45),
)
TRY: dict[str, Any] = {"groups": 2, "siblings": 2, "tokens": 8, "prompt": 40, "steps": 3, "shape": "tiny"}
TRY |= {"larger": "tiny", "length": 512, "minutes": 60.0, "limit": 1200.0}


@dataclass(frozen=True)
class Setting:
    """One run of Tandem's."""

    options: tuple[str, ...] = ()
    """Of the recipe."""
    on_gpu: tuple[str, ...] = FITTING
    """The same, for real shapes alone."""
    alone: bool = False
    """On one card."""
    share: bool = True
    """Each card has the batch, instead of a part of it."""
    spans: bool = False
    """One engine is over all cards."""
    larger: bool = False
    apart: bool = False
    """Half of the cards sample, and the other half has the batch."""


SETTINGS = {
    "pairs": Setting(),
    "pairs-half": Setting(share=False),
    "one": Setting(alone=True, share=False),
    "seven": Setting(("optimizer.kind=adamw8bit",), ("micro_batch_tokens=4608", "checkpointing=full"), larger=True),
    "sharded": Setting(("distributed.shard=weights",), spans=True),
    "apart": Setting((BROADCAST,), apart=True),
    "apart-sharded": Setting((BROADCAST, "distributed.shard=weights"), apart=True),
    "apart-lora": Setting(("sync={kind: hotswap, tolerance: 1.0}", "trainable={kind: lora, rank: 32}"), apart=True),
    "apart-seven": Setting(
        (BROADCAST, "distributed.shard=weights", "optimizer.kind=adamw8bit"),
        ("micro_batch_tokens=4608", "checkpointing=full"),
        larger=True,
        apart=True,
    ),
}


class Pairs(Bench):
    """The settings, one after another."""

    cards: Sequence[Card] = ()

    def run(self, names: Sequence[str]) -> None:
        before = [card.now() or 0.0 for card in self.cards]
        for name in names:
            if self.left() < self.args.least:
                left_out(self, "tandem", name)
                continue
            for card in self.cards:
                card.mark()
            {"trl": self._trl, "trl-apart": self._trl_apart, "context": self._context}.get(name, self._ours)(name)
            peaks = [round((card.peak or 0.0) - b, 2) for card, b in zip(self.cards, before, strict=True)]
            append(self.args.out, half="cards", setting=name, gb=peaks)

    def _work(self, *, cards: int) -> list[str]:
        return work_options(replace(self.work, groups=self.work.groups * cards))

    def _ours(self, name: str) -> None:
        setting, cards = SETTINGS[name], self.args.cards
        ranks = 1 if setting.alone else cards // 2 if setting.apart else cards
        engine = engine_options(self.args)
        engine["max_num_seqs"] *= cards  # of any setting
        if setting.apart:
            engine["replicas"] = cards - ranks
            engine["devices"] = [str(card) for card in range(ranks, cards)] if not self.args.tries else []
        if not self.args.tries:
            engine |= {"gpu_memory_utilization": 0.8} if setting.apart else {"kv_cache_gb": self.args.kv_cache_gb}
        if setting.spans:
            engine |= {"tensor_parallel_size": cards, "args": {**engine["args"], **NO_MULTICAST}}
        model = made_apart(self.args.larger if setting.larger else self.args.shape, self.args.folder)
        lines = self.logs / f"tandem-{name}.jsonl"
        command = [sys.executable, str(HERE / "_versus_tandem.py"), str(model), str(lines)]
        command += ["--engine", json.dumps(engine), *self._work(cards=ranks if setting.share else 1)]
        options = [option for option in setting.options if ranks > 1 or not option.startswith("distributed.")]
        options += () if self.args.tries else setting.on_gpu
        overridden = {option.partition("=")[0] for option in self.args.override}
        command += [option for option in options if option.partition("=")[0] not in overridden] + self.args.override
        self.setting("tandem", name, [*command, f"ranks={ranks}"])

    def _trl(self, name: str, cards: int = 0, *chosen: str) -> None:
        config, cards = self.logs / "accelerate.yaml", cards or self.args.cards
        config.write_text(json.dumps(accelerate_config(cards, cpu=self.args.tries)), encoding="utf-8")
        command = [self.args.trl_python or sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        command += [str(config), str(HERE / "_versus_trl.py"), str(made_apart(self.args.shape, self.args.folder))]
        command += [str(self.logs / f"trl-{name}.jsonl"), "--utilization", str(self.args.utilization), *chosen]
        command += [*self._work(cards=cards), *self.args.trl, *(["rows=1", "vllm=false"] if self.args.tries else [])]
        self.setting("trl", name, command)

    def _trl_apart(self, name: str) -> None:
        """TRL's server on the second half of the cards, one engine on each."""
        ranks, port = self.args.cards // 2, free_port("127.0.0.1")
        command = [self.args.trl_python or sys.executable, "-m", "trl.scripts.vllm_serve", "--port", str(port)]
        command += ["--model", str(made_apart(self.args.shape, self.args.folder)), "--max_model_len"]
        command += [str(self.work.context), "--data_parallel_size", str(self.args.cards - ranks)]
        command += ["--gpu_memory_utilization", "0.8"]
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(str(card) for card in range(ranks, self.args.cards))}
        with ended(command, environment() | devices, self.logs / "trl-server.log"):
            self._trl(name, ranks, f"server={port}")

    def _context(self, name: str) -> None:
        """Both cases by ``step_gpu.py``, which notes each length's tokens a second."""
        limit, length = min(self.args.limit, self.left()), self.args.length
        fits = f"checkpointing=full micro_batch_tokens={length} optimizer.kind=adamw optimizer.precision=masters"
        # The recipe of made-up groups says nothing of their lengths, by which a run would choose local sums.
        shared = f"ranks={self.args.cards} distributed.context_parallel={self.args.cards} distributed.gradients=local"
        records, log = self.logs / "context.jsonl", self.logs / "context.log"
        command = [sys.executable, str(HERE / "step_gpu.py"), "scaling", "--out", str(records)]
        command += ["--shape", self.args.shape, *(["--folder", str(self.args.folder)] if self.args.folder else [])]
        command += ["--lengths", str(length), "--equal", str(4 * length)]
        command += ["--minutes", str(limit / 60), "--limit", str(limit / 2)]
        command += work_options(Work(groups=1, siblings=2, tokens=16, prompt=40))
        command += ["--case", f"alone lengths only {fits}", "--case", f"divided lengths only {fits} {shared}"]
        with ended(command, environment(), log) as process:
            code, stopped = awaited(process, limit + 5)
        for record in read(records):
            append(self.args.out, half="context", setting=record.pop("case"), **record)
        if code != 0:
            self.failed += 1
            append(self.args.out, half="context", setting=name, error=last(log))
        if stopped:
            raise stopped


def accelerate_config(cards: int, *, cpu: bool) -> dict[str, Any]:
    """TRL's own for FSDP2 (trl/accelerate_configs/fsdp2.yaml); on a CPU accelerate has no FSDP."""
    fsdp = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }
    kind: dict[str, Any] = {"distributed_type": "MULTI_CPU", "use_cpu": True}
    if not cpu:
        kind = {"distributed_type": "FSDP", "use_cpu": False, "fsdp_config": fsdp}
    same = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16", "num_machines": 1, "machine_rank": 0}
    return {**kind, **same, "num_processes": cards, "main_training_function": "main", "rdzv_backend": "static"}


def report(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Print where milliseconds go, what cards hold, and every figure beside its goal; whether all were reached."""
    runs = {line["setting"]: line for line in lines if line.get("half") in ("tandem", "trl")}
    print("\n" + table(list(runs.values())))
    for line in lines:
        if line.get("half") == "cards":
            still = runs.get(line["setting"], {}).get("still", 0.0)
            print(
                f"{line['setting']}: GB of each card {line['gb']}, engines stand still {1000 * still:.1f} ms a publish"
            )
        elif line.get("half") == "context":
            print(f"context {line['setting']}: {line.get('error') or round(line['tokens_per_second'])} tokens/s")
    goals = [
        judged(what, runs[name]["seconds"] / runs[base]["seconds"], goal)
        for what, name, base, goal in GOALS
        if runs.get(name, {}).get("seconds") and runs.get(base, {}).get("seconds")
    ]
    print("\n".join(text for text, _ in goals))
    return all(reached for _, reached in goals) and not any(line.get("error") for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*SETTINGS, "trl", "trl-apart", "context"]
    parser.add_argument("--settings", default="pairs,pairs-half,one,trl", help="comma-separated, in this order")
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument("--try", dest="tries", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--shape", default="qwen2.5-3b", help="of the model")
    parser.add_argument("--larger", default="qwen2.5-7b", help="the shape of the setting seven")
    parser.add_argument(
        "--override", action="append", default=[], help="of every recipe of Tandem's, in place of a setting's own"
    )
    parser.add_argument("--trl", action="append", default=[], help="a setting of _versus_trl.py's: key=value")
    parser.add_argument("--trl-python", help="interpreter that has TRL; by default this one")
    add_engine(parser)
    parser.add_argument("--kv-cache-gb", type=float, default=3.0, help="keys and values of each of Tandem's engines")
    parser.add_argument("--length", type=int, default=16384, help="tokens of a sequence of the setting context")
    parser.add_argument("--minutes", type=float, default=20.0, help="all of it")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds of one setting, with its engine's start")
    parser.add_argument("--least", type=float, default=30.0, help="no setting begins with fewer seconds left")
    parser.add_argument("--folder", type=Path, help="for the models")
    parser.add_argument("--out", type=Path, default=Path("pairs.jsonl"), help="results are appended")
    parser.add_argument("--table", type=Path, nargs="+", help="show what these files hold together, and do nothing")
    add_work(parser)
    parser.set_defaults(model=None, **(TRY if "--try" in sys.argv[1:] else {}))
    args = parser.parse_args()
    if args.table:
        return int(not report([line for file in args.table for line in read(file)]))
    chosen = args.settings.split(",")
    if unknown := set(chosen) - set(names):
        raise SystemExit(f"there is no setting {min(unknown)!r}; choose from {', '.join(names)}")
    end_in_order()
    args.out = args.out.absolute()
    logs = args.out.with_suffix(".logs")
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    earlier = len(read(args.out))
    with contextlib.ExitStack() as stack:
        cards = [stack.enter_context(Card(index=index)) for index in range(args.cards)]
        bench = Pairs(args, work_of(args), cards[0], logs)
        bench.cards = cards
        bench.run(chosen)
    return int(not report(read(args.out)[earlier:]) or bool(bench.failed))


if __name__ == "__main__":
    raise SystemExit(main())
