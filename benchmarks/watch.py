"""How fast ``tandem watch`` shows many long runs: the list opened and updated, then one run opened and updated.

    .venv/bin/python benchmarks/watch.py                    # 20 runs of 10,000 steps: 400 MB in a temporary folder
    .venv/bin/python benchmarks/watch.py --runs 4

Times are the server's, over HTTP: what a page waits for. An update comes after each run has taken another step.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from tandem.observability import json_lines
from tandem.ports import free_port

SPREAD = ("", "/std", "/min", "/p25", "/p50", "/p75", "/max")
PLAIN = (
    "accuracy", "entropy", "kl_behavior", "grad_norm", "lr", "loss", "ratio", "ratio/max", "clip_fraction", "ess",
    "groups/zero_variance", "env/a/groups", "env/a/zero_variance", "rollouts/truncated", "tokens/generated", "alarms",
    "tokens_per_second", "memory/rss_gb", "seconds/step", "seconds/wait", "seconds/forward_backward", "seconds/sync",
)  # fmt: skip
NAMES = (
    *(f"{name}{part}" for name in ("reward", "length", "length/ended", "lag", "reward/a") for part in SPREAD),
    *PLAIN,
)


def rows(rng: random.Random, step: int) -> tuple[dict[str, object], dict[str, object]]:
    """A step's metrics and its event."""
    level = 1 - math.exp(-step / 3000)
    now = 1.8e9 + 10 * step
    metrics = {name: level + 0.1 * rng.random() for name in NAMES}
    return {"step": step, "time": now, "metrics": metrics}, {
        "time": now,
        "event": "published",
        "step": step,
        "seconds": 1,
    }


def write(folder: Path, rng: random.Random, begin: int, end: int) -> None:
    """Steps of a run."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(f"model: m\nsteps: {2 * end}\nenv: {{kind: a}}\nmax_lag: 1\n")
    with (folder / "metrics.jsonl").open("ab") as metrics, (folder / "events.jsonl").open("ab") as events:
        for step in range(begin, end):
            row, event = rows(rng, step)
            metrics.write(json_lines.encode(row))
            events.write(json_lines.encode(event))


def main() -> None:
    """Write the runs, serve them, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    rng, port = random.Random(1), free_port()
    with tempfile.TemporaryDirectory() as at:
        folders = [Path(at) / f"run-{i:02d}" for i in range(options.runs)]
        for folder in folders:
            write(folder, rng, 1, options.steps + 1)
        size = sum(file.stat().st_size for file in Path(at).rglob("*"))
        print(f"{options.runs} runs of {options.steps:,} steps, {size / 1e6:.0f} MB")
        serve = [sys.executable, "-m", "tandem", "watch", at, "--port", str(port)]
        server = subprocess.Popen(serve, stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()

        def answer(what: str, *paths: str) -> list[bytes]:
            begun = time.perf_counter()
            bodies = [urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}").read() for path in paths]
            cpu = sum(map(int, Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / 100
            size = sum(map(len, bodies)) / 1e6
            print(f"{what:20} {time.perf_counter() - begun:6.2f} s, {size:5.2f} MB; {cpu:5.2f} s of CPU so far")
            return bodies

        try:
            while subprocess.run(
                ["curl", "-sf", f"http://127.0.0.1:{port}/", "-o", "/dev/null"], check=False
            ).returncode:
                time.sleep(0.2)
            answer("the list, opened", "", "runs")
            one = ("run?name=run-00", "part?name=run-00&part=curves", "part?name=run-00&part=events")
            for folder in folders:
                write(folder, rng, options.steps + 1, options.steps + 2)
            answer("the list, updated", "runs")
            answer("a run, opened", *one)
            write(folders[0], rng, options.steps + 2, options.steps + 3)
            answer("a run, updated", *one)
            compared = "&".join(f"compare={folder.name}" for folder in folders[:6])
            comparison = json.loads(answer("six runs compared", f"compare?{compared}")[0])
            assert len(comparison["runs"]) == min(6, options.runs)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
