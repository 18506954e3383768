"""Tandem against its peers on a CPU, side by side in one run; prints ratios.

    bash benchmarks/peers/setup                                    # TRL, in an environment of its own
    .venv/bin/python benchmarks/peers/workload.py .cache/chain_sum.jsonl
    .venv/bin/python benchmarks/laptop.py [--only engine|step|job] [--rounds 2]

Each measurement is a process of its own. Peer and Tandem alternate for ``rounds`` rounds and the best of each counts,
so that a noisy minute on a shared machine hurts both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MODEL, PROMPTS = ".cache/smollm2", ".cache/chain_sum.jsonl"
PEERS = ".venv-peers/bin/python"


def run(*command: str) -> dict[str, Any]:
    """Run a script that prints JSON last."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"  {Path(command[1]).name}: {json.dumps(result)}", flush=True)
    return result


def engine(rounds: int) -> None:
    best: dict[str, float] = {}
    for _ in range(rounds):
        for side, script in (("peer", "peers/generate.py"), ("tandem", "engine.py")):
            result = run(sys.executable, str(HERE / script), MODEL, PROMPTS, "--new-tokens", "48", "--repeat", "2")
            for kind in ("fixed", "mixed"):
                key = f"{side} {kind}"
                best[key] = max(best.get(key, 0.0), result[kind]["tokens_per_second"])
    for kind, goal in (("fixed", 1.0), ("mixed", 1.5)):
        tandem, peer = best[f"tandem {kind}"], best[f"peer {kind}"]
        say(f"engine, {kind} lengths", f"{tandem:.0f} against {peer:.0f} tokens/s", tandem / peer, f">= {goal}")


def step(rounds: int) -> None:
    best: dict[str, float] = {}
    scripts = {
        "peer": ("peers/forward_backward.py", "--rows", "8"),
        "tandem": ("training_step.py",),
        "unshared": ("training_step.py", "--alone"),
    }
    for _ in range(rounds):
        for side, (script, *options) in scripts.items():
            result = run(sys.executable, str(HERE / script), MODEL, "--repeat", "2", *options)
            best[side] = max(best.get(side, 0.0), result["tokens_per_second"])
    for side, name in (("tandem", "training step"), ("unshared", "training step, no prompt shared")):
        say(name, f"{best[side]:.0f} against {best['peer']:.0f} tokens/s", best[side] / best["peer"], ">= 1.3")
    memory(HERE / "training_step.py")


def memory(script: Path) -> None:
    """Peak memory of a step, with few and with many tokens: it must not grow with tokens x vocabulary."""
    few = run(sys.executable, str(script), MODEL, "--repeat", "1", "--high", "32")
    many = run(sys.executable, str(script), MODEL, "--repeat", "1", "--high", "256")
    logits = (many["trained_tokens"] - few["trained_tokens"]) * 49152 * 4 / 1e9
    grown = many["peak_rss_gb"] - few["peak_rss_gb"]
    say("memory for more tokens", f"+{grown:.2f} GB where float32 logits alone are {logits:.2f} GB", grown / logits, "")


def job(rounds: int) -> None:
    seconds: dict[str, float] = {}
    rss: dict[str, float] = {}
    for _ in range(rounds):
        for side, measure in (("tandem", tandem_job), ("trl", trl_job)):
            took, peak = measure()
            seconds[side] = min(seconds.get(side, took), took)
            rss[side] = min(rss.get(side, peak), peak)
    say(
        "TRL's job, time of a step",
        f"{seconds['tandem']:.1f} against {seconds['trl']:.1f} s",
        seconds["tandem"] / seconds["trl"],
        "<= 0.5",
    )
    say(
        "TRL's job, peak memory",
        f"{rss['tandem']:.2f} against {rss['trl']:.2f} GB",
        rss["tandem"] / rss["trl"],
        "<= 0.6",
    )


def trl_job() -> tuple[float, float]:
    """Fastest step after the first, and peak resident memory."""
    result = run(PEERS, str(HERE / "peers/trl_grpo.py"), MODEL, PROMPTS, "--steps", "3")
    return min(result["seconds_per_step"][1:]), result["peak_rss_gb"]


def tandem_job() -> tuple[float, float]:
    """The same of ``tandem train``; its graders are counted by themselves and added."""
    with tempfile.TemporaryDirectory(prefix="laptop-") as folder:
        command = [sys.executable, "-m", "tandem", "train", str(HERE / "laptop.yaml"), f"runs={folder}", "name=job"]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        if status:
            sys.exit(f"{' '.join(command)} failed")
        written = Path(folder, "job/metrics.jsonl").read_text()
    steps = [json.loads(line)["metrics"] for line in written.splitlines()]
    for metrics in steps:
        parts = {name: round(value, 2) for name, value in metrics.items() if name.startswith("seconds/")}
        print(f"  tandem: {parts}, {metrics['tokens/generated']:.0f} tokens sampled", flush=True)
    last = min(steps[1:], key=lambda metrics: metrics["seconds/step"])
    work = sum(last[f"seconds/{part}"] for part in ("wait", "forward_backward", "optimizer"))
    whole = last["seconds/step"]
    say("everything but sampling, gradient, optimizer", f"{whole - work:.2f} s", 1 - work / whole, "<= 0.05")
    return whole, used.ru_maxrss * 1024 / 1e9


def say(name: str, measured: str, ratio: float, goal: str) -> None:
    print(f"{name}: {measured}, ratio {ratio:.2f} {goal and f'(goal {goal})'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("engine", "step", "job"))
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    measurements = {"engine": engine, "step": step, "job": job}
    for name, measurement in measurements.items():
        if args.only in (None, name):
            measurement(args.rounds)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    print(f"largest process: {peak:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
