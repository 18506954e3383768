"""Two GPUs: pairs of a trainer's rank and an engine beside one card, TRL with FSDP2, a larger model, sharded weights.

    python benchmarks/pairs.py --settings pairs,pairs-half,one,trl --out pairs.jsonl
    python benchmarks/pairs.py --settings seven,sharded,context --out sharded.jsonl
    python benchmarks/pairs.py --table pairs.jsonl sharded.jsonl
    python benchmarks/pairs.py --try --python .venv-engine/bin/python             # on a CPU, to see that it works

Settings, each with a time limit of its own:

- ``one``, ``pairs``, ``pairs-half``: the comparison's batch (versus_trl.py) on one card, twice of it on two cards, and
  the same of it on two; float32 masters, ``pairs-fast`` without recomputation. They go on with one another's engines.
- ``trl``: TRL's GRPOTrainer on the same two cards, by accelerate with FSDP2, vLLM colocated, twice the batch.
- ``seven``: the larger shape on two cards. 16 bytes a weight over two cards and 2 for the weights are 76 GB, too many
  beside an engine on a card of 80: adamw8bit with float32 masters has 10 over two cards, 53 GB.
- ``sharded``: ``distributed.shard: weights``, and one engine over both cards.
- ``context``: steps without an engine on long sequences, of two cards that share each, beside one card's.

Steps are measured from beginning to beginning; medians, without the first two. Engines stand still from their pause
until they sample again, less the optimizer's own time where they wait for it, without the gather that follows it. Each
result is a line of --out as soon as it is there, and logs are beside it. Exits 1 if a setting failed or a goal was
missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from _versus import (
    ORDER,
    SKIPPED,
    Card,
    Work,
    add_engine,
    add_work,
    aligned,
    append,
    engine_options,
    judged,
    number,
    read,
    shown,
    work_of,
    work_options,
)
from versus_trl import (
    TAIL,
    Bench,
    awaited,
    end_in_order,
    ended,
    environment,
    last,
    left_out,
    lines_of,
    made_apart,
)

HERE = Path(__file__).resolve().parent
CARDS = 2
SAME_WORK, HALF_WORK, OF_TRL, OF_PAIRS, OF_ONE_CARD = 1.08, 0.62, 0.50, 1.25, 0.9
"""Goals: a step of two cards against one card's, with the same work for each card and with the same work in all;
against TRL's; of sharded weights against pairs; and tokens a second for each card of two that share sequences."""
STILL, STILL_LARGER, TWICE = 35.0, 55.0, 0.01
"""Most milliseconds that engines stand still for a publish, by shape, and GB of weights that are there twice."""
FITTING = ("micro_batch_tokens=4608", "checkpointing=selective")
"""What one card of 80 GB has room for beside 16 bytes of states a weight of the 3B shape: two groups of the batch."""
NO_MULTICAST: dict[str, Any] = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}
"""vLLM's own choice on Hopper is a fused all-reduce by NVLink multicast, which a host may have switched off."""
START = 200.0
"""Seconds more for a setting whose engines are started for it; a slow host was seen to need 150."""
PATIENCE = 5.0
"""Times the limits on a CPU."""
TRY: dict[str, Any] = {"groups": 1, "siblings": 2, "tokens": 8, "prompt": 40, "steps": 3, "shape": "tiny"}
TRY |= {"larger": "tiny", "length": 512, "minutes": 60.0}


@dataclass(frozen=True)
class Setting:
    """One run, and its limits."""

    about: str
    cards: int = CARDS
    shares: int = CARDS
    """Times one card's batch."""
    options: tuple[str, ...] = ()
    """Of the recipe."""
    on_gpu: tuple[str, ...] = FITTING
    """The same, for real shapes alone."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    engines: str = ""
    """Settings that name the same go on with one another's engines, where they follow one another."""
    larger: bool = False
    steps: int | None = None
    limit: float = 240.0
    """Seconds; on a slow host the beginning of a run alone was seen to take 150."""


RANKS = f"ranks={CARDS}"
SETTINGS = {
    "pairs": Setting("two cards, twice the batch", options=(RANKS,), engines="pairs"),
    "pairs-half": Setting("two cards, the batch", shares=1, options=(RANKS,), engines="pairs"),
    "pairs-fast": Setting(
        "two cards, twice the batch, nothing recomputed",
        options=(RANKS,),
        on_gpu=("micro_batch_tokens=6656", "checkpointing=none"),
        engines="pairs",
    ),
    "one": Setting("one card, the batch", cards=1, shares=1, options=("ranks=1",), engines="pairs"),
    "trl": Setting("TRL, FSDP2 by accelerate", limit=250.0),
    "seven": Setting(
        "the larger shape, adamw8bit with masters",
        options=(RANKS, "optimizer.kind=adamw8bit"),
        on_gpu=("micro_batch_tokens=4608", "checkpointing=full"),
        engines="seven",
        larger=True,
        steps=6,
    ),
    "sharded": Setting(
        "sharded weights, an engine over both cards",
        options=(RANKS, "distributed.shard=weights"),
        engine={"tensor_parallel_size": CARDS, "args": NO_MULTICAST},
        engines="sharded",
    ),
    "context": Setting("sequences that two cards share", limit=480.0),
}


class Pairs(Bench):
    """The settings, one after another."""

    def __init__(self, args: argparse.Namespace, cards: Sequence[Card], logs: Path):
        super().__init__(args, work_of(args), cards[0], logs)
        self.cards = cards
        self.before_each = [card.now() or 0.0 for card in cards]
        self._models: dict[str, Path] = {}
        self._runs, self._engines = logs / "runs-0", ""

    def model_of(self, setting: Setting) -> Path:
        """Folder of a setting's random model."""
        shape = self.args.larger if setting.larger else self.args.shape
        if shape not in self._models:
            self._models[shape] = made_apart(shape, self.args.folder)
        return self._models[shape]

    def work_of(self, setting: Setting) -> Work:
        """A setting's share of work."""
        return replace(self.work, groups=self.work.groups * setting.shares, steps=setting.steps or self.work.steps)

    def run(self, names: Sequence[str]) -> None:
        """Every setting, for as long as there is time."""
        for name, following in zip(names, [*names[1:], ""], strict=True):
            setting = SETTINGS[name]
            if self.left() < self.args.least:
                left_out(self, "pairs", name)
                continue
            if name == "context":
                self._context(setting)
            elif name == "trl":
                self._trl(name, setting)
            else:
                after = SETTINGS.get(following)
                self._ours(name, setting, keep=after is not None and after.engines == setting.engines)

    def _ours(self, name: str, setting: Setting, *, keep: bool) -> None:
        goes_on = self._engines == setting.engines
        lines = self.logs / f"pairs-{name}.jsonl"
        own = engine_options(self.args)
        engine = {**own, **setting.engine, "args": {**own["args"], **setting.engine.get("args", {})}}
        engine["max_num_seqs"] *= CARDS  # of any setting
        if not self.args.tries:
            engine["kv_cache_gb"] = self.args.kv_cache_gb
        command = [sys.executable, str(HERE / "_pairs_run.py"), str(self.model_of(setting)), str(lines)]
        command += ["--runs", str(self._runs), "--engine", json.dumps(engine)]
        gpu_options = () if self.args.tries else setting.on_gpu
        command += [*work_options(self.work_of(setting)), *gpu_options, *setting.options, *self.args.override]
        self._mark()
        well = self.setting("pairs", name, command, limit=self._limit(setting, goes_on=goes_on))
        append(self.args.out, half="publish", setting=name, **publishes(read(lines)), cards_gb=self._peaks())
        if not well:
            logs = sorted(self._runs.glob("*/logs/*.log"))
            print("".join(f"   {log.name}: {line[:200]}\n" for log in logs for line in lines_of(log)[-TAIL // 2 :]))
        self._engines = setting.engines if well and keep else ""
        if not self._engines:
            end_engines(self._runs)
            self._runs = self.logs / f"runs-{int(self._runs.name.removeprefix('runs-')) + 1}"

    def _limit(self, setting: Setting, *, goes_on: bool = False) -> float:
        seconds = setting.limit + (0.0 if goes_on else START)
        return PATIENCE * seconds if self.args.tries else seconds

    def _mark(self) -> None:
        for card in self.cards:
            card.mark()

    def _peaks(self) -> list[float]:
        """GB that each card had at most since the last mark, less what it had before all."""
        pairs = zip(self.cards, self.before_each, strict=True)
        return [round(card.peak - before, 2) for card, before in pairs if card.peak is not None]

    def _trl(self, name: str, setting: Setting) -> None:
        lines, config = self.logs / "trl-trl.jsonl", self.logs / "accelerate.yaml"
        config.write_text(json.dumps(accelerate_config(cpu=self.args.tries)), encoding="utf-8")  # JSON is YAML
        command = [self.args.trl_python or sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", str(config), str(HERE / "_versus_trl.py"), str(self.model_of(setting)), str(lines)]
        command += ["--utilization", str(self.args.utilization), *work_options(self.work_of(setting)), *self.args.trl]
        command += ["rows=1", "vllm=false"] if self.args.tries else []
        self._mark()
        self.setting("trl", name, command, limit=self._limit(setting, goes_on=True))
        rollouts = self.work_of(setting).groups * self.work.siblings
        append(self.args.out, half="publish", setting=name, rollouts=rollouts, cards_gb=self._peaks())

    def _context(self, setting: Setting) -> None:
        """Both cases by ``step_gpu.py``, which notes each length's tokens a second."""
        limit, length = min(self._limit(setting, goes_on=True), self.left()), self.args.length
        records, log = self.logs / "context.jsonl", self.logs / "context.log"
        records.unlink(missing_ok=True)
        # A card computes one sequence's worth at once, and has the optimizer of the other settings.
        masters = "optimizer.kind=adamw optimizer.precision=masters"
        fits = f"checkpointing=full micro_batch_tokens={length} {masters}"
        # The recipe of made-up groups says nothing of their lengths, by which a run would choose local sums.
        divided = f"{RANKS} distributed.context_parallel={CARDS} distributed.gradients=local"
        cases = [f"alone lengths only {fits}", f"divided lengths only {fits} {divided}"]
        command = [sys.executable, str(HERE / "step_gpu.py"), "scaling", "--out", str(records)]
        command += ["--shape", self.args.shape, *(["--folder", str(self.args.folder)] if self.args.folder else [])]
        command += ["--lengths", str(length), "--equal", str(length * self.args.sequences), "--least", "20"]
        command += ["--minutes", str(limit / 60), "--limit", str(limit / len(cases))]
        command += work_options(Work(groups=1, siblings=2, tokens=16, prompt=40))
        command += [word for case in cases for word in ("--case", case)]
        print(f"-- context: {length:,} tokens a sequence (at most {limit:.0f} s)", flush=True)
        begin = time.monotonic()
        with ended(command, environment(), log) as process:
            code, stopped = awaited(process, limit + 5)
        for record in read(records):
            append(self.args.out, half="context", setting=record.pop("case"), **record)
        if code != 0:
            self.failed += 1
            print("\n".join(f"   {line[:200]}" for line in lines_of(log)[-TAIL:]), flush=True)
            append(self.args.out, half="context", setting="context", error=last(log))
        print(f"   {time.monotonic() - begin:.0f} s in all", flush=True)
        if stopped:
            raise stopped


def accelerate_config(*, cpu: bool) -> dict[str, Any]:
    """TRL's own for FSDP2 (trl/accelerate_configs/fsdp2.yaml), for as many processes as there are cards.

    On a CPU accelerate has no FSDP: processes there have whole models.
    """
    fsdp = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_offload_params": False,
        "fsdp_activation_checkpointing": False,
    }
    kind: dict[str, Any] = {"distributed_type": "MULTI_CPU", "use_cpu": True}
    if not cpu:
        kind = {"distributed_type": "FSDP", "use_cpu": False, "fsdp_config": fsdp}
    return {
        **kind,
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": CARDS,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
    }


def publishes(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of a setting's publishes, milliseconds: how long engines stood still beyond the optimizer, and of it."""
    steps = [line for line in lines if line["kind"] == "step" and "paused" in line][SKIPPED:]
    if not steps:
        return {}
    still = [step["paused"] - (step["update"] - step["gather"] if step["held"] else 0.0) for step in steps]
    medians = {"still": statistics.median(still), "still_most": max(still)}
    medians |= {key: statistics.median(step[key] for step in steps) for key in ("publish", "update", "gather")}
    calls = {name: statistics.median(step["calls"].get(name, 0.0) for step in steps) for name in steps[-1]["calls"]}
    return {
        **{f"{name}_ms": round(1000 * value, 2) for name, value in medians.items()},
        "calls_ms": {name: round(1000 * value, 2) for name, value in calls.items()},
    }


def end_engines(runs: Path) -> None:
    """End what engines runs have left behind, by their records."""
    from tandem.engines.vllm.client.process import EngineProcess, EngineRecord

    for file in runs.glob("*/engine-*.json"):
        record = EngineRecord.read(file)
        process = None if record is None else EngineProcess.reattach(record)
        if process is not None:
            asyncio.run(process.stop())
        file.unlink(missing_ok=True)


def report(lines: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Where steps' milliseconds go, what cards hold, and every figure beside its goal; False if one was missed."""
    by_setting: dict[str, dict[str, Any]] = {}
    for line in lines:  # a later one of the same setting stands for the earlier
        if line.get("half") in ("pairs", "trl"):
            by_setting[line["setting"]] = dict(line)
        elif line.get("half") == "publish":
            by_setting.setdefault(line["setting"], {}).update(line)
    long = {
        line["setting"]: line
        for line in lines
        if line.get("half") == "context" and str(line.get("batch", "")).startswith("length ")
    }
    text = [_times(by_setting), _calls(by_setting), _memory(by_setting), *_lengths(long)]
    goals = _goals(by_setting, long)
    text.append("\n".join(line for line, _ in goals))
    errors = [line for line in lines if line.get("error")]
    text += [f"FAILED {line.get('setting', line.get('case'))}: {line['error']}" for line in errors]
    fine = not errors and bool(by_setting or long) and all(reached for _, reached in goals)
    return "\n\n".join(part for part in text if part), fine


def _times(by_setting: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [["ms of a step", "rollouts", "step", *ORDER, "still", "gather"]]
    for name, of in by_setting.items():
        if of.get("seconds"):
            parts = (f"{1000 * of['parts'].get(part, 0.0):.0f}" for part in ORDER)
            still = (number(of.get(key), 1) for key in ("still_ms", "gather_ms"))
            rows.append([name, str(of.get("rollouts", "-")), f"{1000 * of['seconds']:.0f}", *parts, *still])
    return aligned(rows) if rows[1:] else "nothing was measured"


def _calls(by_setting: Mapping[str, Mapping[str, Any]]) -> str:
    """What publishes wait for; some of it at the same time, and sums that are taken early before the pause."""
    publishes = {name: of for name, of in by_setting.items() if of.get("calls_ms")}
    calls = list(dict.fromkeys(call for of in publishes.values() for call in of["calls_ms"]))
    rows = [["ms of a publish", "all", *calls]]
    for name, of in publishes.items():
        rows.append([name, number(of["publish_ms"], 1), *(number(of["calls_ms"].get(call), 1) for call in calls)])
    return aligned(rows) if rows[1:] else ""


def _memory(by_setting: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [["GB of a card", "engine", "trainer", "tensors", "weights twice", "card 0", "card 1"]]
    for name, of in by_setting.items():
        if of.get("seconds"):
            engine = max(of.get("engines_gb", [0.0])) or None
            both = of.get("all_tensors_gb")  # TRL's, whose engine is in the trainer's process
            trainer = None if both else of.get("tensors_gb")
            if engine and trainer:
                both = engine + trainer
            cards = [*of.get("cards_gb", []), None, None][:CARDS]
            twice = number(of.get("own_gb"), 3)
            rows.append([name, *(number(v, 1) for v in (engine, trainer, both)), twice, *(number(v, 1) for v in cards)])
    return aligned(rows) if rows[1:] else ""


def _lengths(long: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [["long sequences", "batch", "forward+backward ms", "optimizer ms", "tokens/s a card", "peak GB"]]
    for name, of in long.items():
        ms = (f"{1000 * of[key]:.0f}" for key in ("seconds", "optimizer_seconds"))
        rows.append([name, str(of["batch"]), *ms, f"{_speed(name, of):.0f}", number(of["peak_gb"], 1)])
    return [aligned(rows)] if long else []


def _speed(name: str, of: Mapping[str, Any]) -> float:
    """Tokens a second of each card, the optimizer included."""
    speed: float = of["tokens"] / (of["seconds"] + of["optimizer_seconds"])
    return speed if name == "alone" else speed / CARDS


def _goals(
    by_setting: Mapping[str, Mapping[str, Any]], long: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, bool]]:
    """Every goal of which both sides were measured."""
    goals = []
    ratios = [
        ("twice the work on two cards / one card", "pairs", "one", SAME_WORK),
        ("the same work on two cards / one card", "pairs-half", "one", HALF_WORK),
        ("pairs / TRL with FSDP2", "pairs", "trl", OF_TRL),
        ("pairs without recomputation / TRL with FSDP2", "pairs-fast", "trl", OF_TRL),
        ("sharded weights / pairs", "sharded", "pairs", OF_PAIRS),
    ]
    for what, name, base, goal in ratios:
        if by_setting.get(name, {}).get("seconds") and by_setting.get(base, {}).get("seconds"):
            goals.append(judged(what, by_setting[name]["seconds"] / by_setting[base]["seconds"], goal))
    for name, still in (("pairs", STILL), ("seven", STILL_LARGER)):
        of = by_setting.get(name, {})
        if "still_ms" in of:
            goals.append(judged(f"{name}: engines stand still", of["still_ms"], still, " ms"))
        if of.get("own_gb") is not None:
            goals.append(judged(f"{name}: weights that are there twice", of["own_gb"], TWICE, " GB"))
    if "publish_ms" in by_setting.get("sharded", {}):
        goals.append((f"sharded: a publish takes {by_setting['sharded']['publish_ms']:.1f} ms", True))
    if long.keys() >= {"alone", "divided"}:
        share = _speed("divided", long["divided"]) / _speed("alone", long["alone"])
        goals.append(judged("tokens/s a card, two that share sequences / one", share, OF_ONE_CARD, least=True))
    return goals


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--settings", default="pairs,pairs-half,one,trl,seven,sharded,context", help="comma-separated, in this order"
    )
    parser.add_argument("--try", dest="tries", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--shape", default="qwen2.5-3b", help="of the model")
    parser.add_argument("--larger", default="qwen2.5-7b", help="the shape of the setting seven")
    parser.add_argument("--override", action="append", default=[], help="an override of every recipe of Tandem's")
    parser.add_argument("--trl", action="append", default=[], help="a setting of _versus_trl.py's: key=value")
    parser.add_argument("--trl-python", help="interpreter that has TRL; by default this one")
    add_engine(parser)
    parser.add_argument("--kv-cache-gb", type=float, default=3.0, help="keys and values of each of Tandem's engines")
    parser.add_argument("--length", type=int, default=16384, help="tokens of a sequence of the setting context")
    parser.add_argument("--sequences", type=int, default=4, help="of a step of it")
    parser.add_argument("--minutes", type=float, default=9.0, help="all of it")
    parser.add_argument("--least", type=float, default=30.0, help="no setting begins with fewer seconds left")
    parser.add_argument("--folder", type=Path, help="for the models")
    parser.add_argument("--out", type=Path, default=Path("pairs.jsonl"), help="results are appended")
    parser.add_argument("--table", type=Path, nargs="+", help="show what these files hold together, and do nothing")
    add_work(parser)
    parser.set_defaults(model=None)
    if "--try" in sys.argv[1:]:
        parser.set_defaults(**TRY)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.table:
        return shown(args.table, report)
    names = args.settings.split(",")
    if unknown := set(names) - set(SETTINGS):
        raise SystemExit(f"there is no setting {min(unknown)!r}; choose from {', '.join(SETTINGS)}")
    end_in_order()
    args.out = args.out.absolute()
    logs = args.out.with_suffix(".logs")
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    earlier = len(read(args.out))
    with contextlib.ExitStack() as stack:
        cards = [stack.enter_context(Card(index=index)) for index in range(CARDS)]
        bench = Pairs(args, cards, logs)
        try:
            bench.run(names)
        finally:
            for runs in logs.glob("runs-*"):
                end_engines(runs)
        text, fine = report(read(args.out)[earlier:])
        print("\n" + text)
    return int(not fine)


if __name__ == "__main__":
    raise SystemExit(main())
