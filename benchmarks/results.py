"""Runs the table of runs behind docs/design/results.md, several beside each other, and sums each up in one record.

    python benchmarks/results.py --list
    python benchmarks/results.py --set matrix --devices 0,1 --beside 6 --gsm8k data/gsm8k --minutes 9 --out results
    python benchmarks/results.py --set tasks trl --devices 0,1 --beside 6 --minutes 9 --out results
    python benchmarks/results.py --set cards --only pairs weights context --devices 0+1 --out results
    python benchmarks/results.py --set cpu --out results
    python benchmarks/results.py --report results/results.jsonl                        # the tables, in Markdown

Each run is ``python -m tandem train`` in a process of its own, with its own log and CUDA_VISIBLE_DEVICES. Runs that are
done are not run again; when --minutes are over, those under way save and stop, and the same call again goes on with
them. --out gets three files: ``results.jsonl`` with a record of each run, ``metrics.tar.gz`` with the numbers of every
step, and ``failed.tar.gz`` with the ends of the logs of runs that failed. Exits 1 if a run failed, 2 if some are not
done. ``--try`` runs a few steps of each with a small engine for CPUs, to see that everything works.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _results_folder import done, lines, record, resumable, steps
from _results_long import Killer, Memory, digests, engine_of, equal_until, family, lives, same_answers
from _results_report import report
from _results_sets import RECIPE, SETS, TRY, Planned

from tandem.config.loading import load
from tandem.errors import TandemError
from tandem.ports import free_port

HERE = Path(__file__).resolve().parent
TAIL = 60_000
"""Bytes of a failed run's logs that are kept, of each."""
STOPPING = 45.0
"""Seconds in which a run that is told to stop saves itself."""


@dataclass
class Job:
    """A run under way."""

    planned: Planned
    folder: Path
    device: str | None
    process: subprocess.Popen[bytes]
    begun: float
    memory: Memory
    killer: Killer | None
    engine: Served | None


@dataclass
class Served:
    """An engine that serves one run after another: its start takes as long as dozens of steps."""

    url: str
    device: str | None
    process: subprocess.Popen[bytes]
    free: bool = True

    def end(self) -> None:
        """Stop it, and what it started."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOPPING)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Driver:
    """Runs what is planned."""

    def __init__(self, args: argparse.Namespace, planned: Sequence[Planned]):
        self.args = args
        self.runs: Path = args.runs.absolute()
        self.logs = self.runs / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.planned = planned
        self.failed: dict[str, str] = {}
        self.jobs: list[Job] = []
        self.engines: list[Served] = []
        self.deadline = time.monotonic() + 60 * args.minutes - STOPPING
        self.devices: list[str | None] = args.devices.split(",") if args.devices else [None]

    def run(self) -> None:
        """All of it, or as much as there is time for."""
        waiting = [p for p in self.planned if not done(self.runs / p.name)]
        last_report = time.monotonic()
        try:
            while (waiting or self.jobs) and time.monotonic() < self.deadline:
                while waiting and (device := self._free()) != "none":
                    self.jobs.append(self._start(waiting.pop(0), device))
                for job in tuple(self.jobs):
                    self._look(job)
                if time.monotonic() - last_report > 30:
                    last_report = time.monotonic()
                    self._tell(len(waiting))
                time.sleep(0.5)
        finally:
            self._stop()

    def _free(self) -> str | None:
        """The device with the fewest runs, or the word none if each has as many as it may have."""
        count = {device: sum(job.device == device for job in self.jobs) for device in self.devices}
        device = min(self.devices, key=lambda name: count[name])
        return device if count[device] < self.args.beside else "none"

    def _start(self, planned: Planned, device: str | None) -> Job:
        folder = self.runs / planned.name
        if folder.exists() and not resumable(folder):
            shutil.rmtree(folder)
        beside = {kind: self.logs / f"{planned.name}.{kind}.jsonl" for kind in ("memory", "kills")}
        if not folder.exists():
            for path in beside.values():
                path.unlink(missing_ok=True)
        killer = Killer(folder, beside["kills"], planned.steps) if planned.kills else None
        engine = self._engine(device) if self.args.served and shares(planned) else None
        process = self._launch(planned, folder, device, engine)
        print(f"-- {planned.name} on {device or 'this machine'}{' by ' + engine.url if engine else ''}", flush=True)
        memory = Memory(folder, beside["memory"], device)
        return Job(planned, folder, device, process, time.monotonic(), memory, killer, engine)

    def _launch(
        self, planned: Planned, folder: Path, device: str | None, engine: Served | None
    ) -> subprocess.Popen[bytes]:
        command = self.command(planned, folder, engine)
        with (self.logs / f"{planned.name}.log").open("ab") as log:
            env = environment(device)
            if planned.system == "trl":  # its process group listens at 29500 otherwise, each run's
                env["MASTER_PORT"] = str(free_port("127.0.0.1"))
            return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def _engine(self, device: str | None) -> Served:
        """One that is free, or a new one, which the run waits for."""
        for engine in self.engines:
            if engine.free and engine.device == device and engine.process.poll() is None:
                engine.free = False
                return engine
        port, name = free_port("127.0.0.1"), f"engine-{len(self.engines)}"
        model = [f"model={self.args.model}"] if self.args.model else []
        command = [sys.executable, "-m", "tandem", "serve", "engine", str(RECIPE)]
        tried = TRY if self.args.tried else ()
        command += [*tried, *model, *self.args.override, f"engine.port={port}", f"runs={self.runs}"]
        env = environment(device) | {"LOGDIR": str(self.runs / name)}
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self.engines.append(Served(f"http://127.0.0.1:{port}", device, process, free=False))
        return self.engines[-1]

    def _release(self, engine: Served | None, sound: bool) -> None:
        """Give an engine back; one whose run failed is ended."""
        if engine is not None and sound:
            engine.free = True
        elif engine is not None:
            engine.end()

    def command(self, planned: Planned, folder: Path, engine: Served | None = None) -> list[str]:
        """What begins a run, or goes on with it."""
        at = [f"engine={json.dumps({'kind': 'vllm', 'urls': [engine.url]})}"] if engine else []
        if planned.system == "trl":
            own = [str(HERE / "_results_trl.py"), str(planned.recipe), str(folder)]
        elif resumable(folder):
            urls = [f"engine.urls=[{engine.url}]"] if engine else []
            return [sys.executable, "-m", "tandem", "train", str(folder), *urls]
        else:
            own = ["-m", "tandem", "train", str(planned.recipe), f"runs={self.runs}", f"name={planned.name}"]
        model = [f"model={self.args.model}"] if self.args.model else []
        return [sys.executable, *own, *planned.words(*model, *self.args.override, *at)]

    def _look(self, job: Job) -> None:
        """Whether it is over; if not, how much memory it has, and whether to kill something of it."""
        code = job.process.poll()
        if code is None:
            job.memory.look(job.process.pid)
            if job.killer:
                job.killer.look(job.process.pid)
            return
        if job.killer and job.killer.expected:
            job.killer.expected = False
            job.process = self._launch(job.planned, job.folder, job.device, job.engine)
            return
        self.jobs.remove(job)
        self._release(job.engine, sound=not code)
        name, seconds = job.planned.name, time.monotonic() - job.begun
        if code or not done(job.folder):
            self.failed[name] = last(self.logs / f"{name}.log")
            print(f"   FAILED {name} after {seconds:.0f} s: {self.failed[name]}", flush=True)
        else:
            print(f"   done {name}, {seconds:.0f} s", flush=True)
        self._keep(job.planned, seconds)

    def _keep(self, planned: Planned, seconds: float) -> None:
        """Write its record down; checkpoints of a run that is over go, for a dozen fill a disk."""
        folder = self.runs / planned.name
        about: dict[str, Any] = {
            "name": planned.name,
            "set": planned.set,
            "task": planned.task,
            "trained": planned.trained,
        }
        about |= {"way": planned.way, "system": planned.system, "seed": planned.seed, "steps": planned.steps}
        about |= {"killed": planned.kills, "command": shown(self.command(planned, Path("missing")))}
        run_record = {**about, "driver_seconds": round(seconds, 1), "beside": self.args.beside, **record(folder)}
        run_record |= {"error": self.failed.get(planned.name), "constant": self._constant(planned)}
        if planned.set == "long":
            run_record["processes"] = lives(self.logs / f"{planned.name}.memory.jsonl", planned.steps)
            run_record["kills"] = lines(self.logs / f"{planned.name}.kills.jsonl")
        (self.logs / f"{planned.name}.record.json").write_text(json.dumps(run_record))
        if run_record["done"] and not self.args.keep:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def _constant(self, planned: Planned) -> float | None:
        """Share of held-out tasks whose answer is the commonest one; None if they cannot be read."""
        try:
            config = load(planned.recipe, planned.words(*self.args.override)).config
            answers = [
                task.answer for s in config.sources.values() for task in s.env.tasks("test")[: config.evaluate.tasks]
            ]
        except TandemError:
            return None
        return Counter(answers).most_common(1)[0][1] / len(answers)

    def _tell(self, waiting: int) -> None:
        at = ", ".join(f"{job.planned.name} {steps(job.folder)}/{job.planned.steps}" for job in self.jobs)
        print(f"   {waiting} wait; {at}", flush=True)

    def _stop(self) -> None:
        """Let what runs save itself, and end what does not."""
        for job in self.jobs:
            with contextlib.suppress(ProcessLookupError):
                job.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + STOPPING
        for job in self.jobs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(max(0.1, until - time.monotonic()))
            engine = engine_of(job.folder)
            for pid in family([job.process.pid, *([engine] if engine else [])]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._keep(job.planned, time.monotonic() - job.begun)
        for served in self.engines:
            served.end()

    def failure_files(self, name: str) -> list[Path]:
        """What is known of a run that failed."""
        kept = [path for kind in ("logs/*.log", "proofs/*.json") for path in sorted((self.runs / name).glob(kind))]
        return [self.logs / f"{name}.log", *kept]

    def results(self) -> list[dict[str, Any]]:
        """Records of all runs there are here, of earlier calls too."""
        records = [json.loads(path.read_text()) for path in sorted(self.logs.glob("*.record.json"))]
        return records + differences(self.runs, records)


def differences(runs: Path, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each two runs of the same things, long ones, how far they had the same weights."""
    comparisons = []
    alike = [r for r in records if r["set"] == "long" and r["done"]]
    for i, one in enumerate(alike):
        for other in alike[i + 1 :]:
            a, b = (runs / r["name"] for r in (one, other))
            same = {"of": [one["name"], other["name"]], "weights": equal_until(digests(a), digests(b))}
            same |= {"answers": same_answers(a, b), "last": min(steps(a), steps(b))}
            comparisons.append({"set": "equal", "name": f"equal-{one['name']}-{other['name']}", **same})
    return comparisons


def shares(planned: Planned) -> bool:
    """Whether a run can use an engine that served another run before: same options, weights in the engine's memory."""
    return planned.system == "tandem" and planned.set in ("tasks", "trl") and planned.trained == "full"


def environment(device: str | None) -> dict[str, str]:
    """Of every run: Tandem can be imported, and nothing asks the network."""
    path = os.pathsep.join(filter(None, (str(HERE.parent / "src"), os.environ.get("PYTHONPATH", ""))))
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    chosen = {} if device is None else {"CUDA_VISIBLE_DEVICES": device.replace("+", ",")}
    return {"OMP_NUM_THREADS": "2", **os.environ, **quiet, **chosen, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def shown(command: Sequence[str]) -> str:
    """A command line as a person would write it at the project's root."""
    root = f"{HERE.parent}{os.sep}"
    words = [word.removeprefix(root) for word in command[1:] if not word.startswith(("runs=", "name="))]
    return " ".join(["python", *(f"'{word}'" if set(word) & set(' {}[]*"') else word for word in words)])


def last(log: Path) -> str:
    """A log's last words."""
    text = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return next((line.strip()[:400] for line in reversed(text) if line.strip()), "it said nothing")


def packed(out: Path, files: Sequence[tuple[str, bytes]]) -> None:
    """A tar of them; none, if there is nothing."""
    if files:
        with tarfile.open(out, "w:gz") as tar:
            for name, content in files:
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def write(driver: Driver) -> None:
    """What comes back."""
    out: Path = driver.args.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in driver.results()))
    kept = [p for name in ("metrics", "events", "eval") for p in sorted(driver.runs.glob(f"*/{name}.jsonl"))]
    packed(out / "metrics.tar.gz", [(f"{path.parent.name}/{path.name}", path.read_bytes()) for path in kept])
    logs = [path for name in driver.failed for path in driver.failure_files(name)]
    packed(out / "failed.tar.gz", [(f"{p.parent.parent.name}/{p.name}", p.read_bytes()[-TAIL:]) for p in logs])


def chosen(args: argparse.Namespace) -> list[Planned]:
    """The runs that are asked for."""
    sets = args.set or (tuple(SETS) if args.list else ())
    planned = [run for name in sets for run in SETS[name](args)]
    planned = [run for run in planned if not args.only or any(word in run.name for word in args.only)]
    if args.tried:
        planned = [
            replace(run, steps=min(run.steps, args.steps or 4), overrides=(*run.overrides, *TRY)) for run in planned
        ]
    elif args.steps:
        planned = [replace(run, steps=args.steps) for run in planned]
    return planned


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="+", choices=tuple(SETS), default=[], help="in this order")
    parser.add_argument("--only", nargs="+", help="runs in whose names one of these stands")
    parser.add_argument(
        "--list", action="store_true", help="show the runs, of all sets where none is named, and do nothing"
    )
    parser.add_argument("--report", type=Path, nargs="+", help="print the tables of these files and do nothing")
    parser.add_argument("--devices", default="", help="cards of runs, such as 0,1; 0+1 has a run on both")
    parser.add_argument("--beside", type=int, default=1, help="runs at a time on each device")
    parser.add_argument("--served", action="store_true", help="share engines among runs of full fine-tuning")
    parser.add_argument("--minutes", type=float, default=600.0, help="all of it")
    parser.add_argument("--model", type=Path, help="instead of the recipes' own")
    parser.add_argument("--gsm8k", type=Path, help="folder with train.jsonl and test.jsonl; else the hub")
    parser.add_argument("--steps", type=int, help="of every run, instead of its own")
    parser.add_argument("--override", action="append", default=[], help="laid over every recipe")
    parser.add_argument("--runs", type=Path, default=Path("runs/results"), help="folder of the runs themselves")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for what comes of them")
    parser.add_argument("--keep", action="store_true", help="checkpoints too")
    parser.add_argument("--try", action="store_true", dest="tried", help="a few steps, with an engine for CPUs")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.report:
        print(report([line for file in args.report for line in lines(file)]))
        return 0
    args.gsm8k = args.gsm8k.absolute() if args.gsm8k else None
    driver = Driver(args, chosen(args))
    if args.list or not args.set:
        for planned in driver.planned:
            print(f"{planned.name}\n    {shown(driver.command(planned, Path('missing')))}")
        return 0

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what follows is to be done whatever comes
        raise SystemExit("ended by a signal; runs that were under way can be gone on with")

    signal.signal(signal.SIGTERM, end)
    try:
        driver.run()
    finally:
        write(driver)
    print(report(driver.results()))
    unfinished = [p.name for p in driver.planned if not done(driver.runs / p.name)]
    print(f"{len(driver.failed)} failed, {len(unfinished)} not done: {', '.join(unfinished)}")
    return 1 if driver.failed else 2 if unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
