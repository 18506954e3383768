"""A made-up run folder that looks as training leaves it: a small model learning sums, resumed once."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "steps": 40,
    "env": {"kind": "arithmetic", "terms": 2},
    "groups_per_step": 4,
    "group_size": 8,
    "max_lag": 1,
    "sampling": {"temperature": 1.0, "max_tokens": 48},
    "advantage": {"kind": "dr_grpo"},
    "loss": {"kind": "grpo", "clip_low": 0.2, "clip_high": 0.28},
    "optimizer": {"kind": "adamw", "lr": 3e-5},
    "trainable": {"kind": "full"},
    "engine": {"kind": "embedded"},
    "sync": {"kind": "shared"},
    "dtype": "bfloat16",
    "seed": 1,
}
NAMES = ["Mia", "Omar", "Lena", "Kofi", "Yuki", "Ana", "Noah", "Zoë"]
THINGS = ["apples", "marbles", "stickers", "pencils", "sea shells", "coins"]


def skill(step: int, steps: int) -> float:
    """How often the made-up policy is right."""
    return 0.22 + 0.42 * (1 - math.exp(-3.2 * step / steps))


def spread(name: str, values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    n = len(ordered)
    mean = sum(ordered) / n
    quarters = {
        q: ordered[min(n - 1, round(x * (n - 1)))]
        for q, x in zip(("min", "p25", "p50", "p75", "max"), (0, 0.25, 0.5, 0.75, 1), strict=True)
    }
    std = math.sqrt(sum((v - mean) ** 2 for v in ordered) / n)
    return {name: mean, f"{name}/std": std, **{f"{name}/{q}": v for q, v in quarters.items()}}


def problem(rng: random.Random) -> tuple[str, str, int, int]:
    a, b = rng.randint(3, 19), rng.randint(2, 17)
    who, what = rng.choice(NAMES), rng.choice(THINGS)
    text = f"{who} has {a} {what} and finds {b} more on the way home. How many {what} does {who} have now?"
    return text, what, a, b


def made_answer(rng: random.Random, what: str, a: int, b: int, right: bool, long: bool) -> str:
    total = a + b if right else a + b + rng.choice([-3, -2, -1, 1, 2, 10])
    text = rng.choice(
        [
            f"To find the total, we add {a} and {b}.\n\n{a} + {b} = {total}\n\n#### {total}",
            f"There are {a} {what} at first. Then {b} more are found, so {a} + {b} = {total}.\n#### {total}",
            f"{a} + {b} = {total}\n#### {total}",
        ]
    )
    return (
        text
        if not long
        else f"Let's think about the {what}. First we count them one by one: " + ", ".join(map(str, range(1, 22)))
    )


def tokenised(rng: random.Random, text: str, advantage: float, finished: bool) -> list[dict[str, Any]]:
    pieces = re.findall(r"\n+| ?[A-Za-zë']+| ?\d| ?[^\sA-Za-z\d]|\s", text) + (["<|im_end|>"] if finished else [])
    out = []
    for piece in pieces:
        lp = -(rng.random() ** 7) * (5.0 if piece.strip().isdigit() else 3.0)
        out.append(
            {
                "t": piece,
                "id": sum(map(ord, piece)) % 49152,
                "lp": lp,
                "tp": lp + rng.gauss(0, 0.02) * min(1, -lp),
                "adv": advantage,
                "m": 1,
            }
        )
    return out


def made_rollouts(rng: random.Random, step: int, steps: int, groups: int = 4, size: int = 8) -> list[dict[str, Any]]:
    records = []
    for g in range(groups):
        prompt, what, a, b = problem(rng)
        chance = min(0.95, max(0.05, rng.gauss(skill(step, steps), 0.25)))
        graded = []
        for _ in range(size):
            right, long = rng.random() < chance, rng.random() < 0.12 * (1 - step / steps)
            text = made_answer(rng, what, a, b, right, long)
            graded.append((text, float(right and not long), float(not long), long))
        rewards = [correct + 0.1 * neat for _, correct, neat, _ in graded]
        failed = size - 1 if g == 1 and step % 10 == 3 else None
        mean = sum(rewards) / size
        for i, (text, correct, neat, long) in enumerate(graded):
            advantage = round(rewards[i] - mean, 6)
            messages = [
                {"role": "system", "content": "Solve the problem. End with a line '#### <number>'."},
                {"role": "user", "content": prompt},
            ]
            record: dict[str, Any] = {
                "step": step,
                "group": f"arithmetic/{step * groups + g}@0",
                "rollout": f"arithmetic/{step * groups + g}@0/{i}",
                "env": "arithmetic",
                "task": f"arithmetic/{step * groups + g}",
                "prompt": messages,
                "messages": [*messages, {"role": "assistant", "content": text}],
                "answer": str(a + b),
                "text": text,
                "rewards": {"number": correct, "format": neat},
                "reward": rewards[i],
                "advantage": advantage,
                "status": "ok",
                "error": "",
                "truncated": long,
                "versions": [max(0, step - 2), step - 1],
                "tokens": tokenised(rng, text, advantage, not long),
            }
            if i == failed:
                record |= {
                    "reward": None,
                    "rewards": {},
                    "advantage": None,
                    "status": "error",
                    "error": "reward number ran for more than 10 s and was ended",
                }
            records.append(record)
    return records


def made_metrics(rng: random.Random, step: int, steps: int) -> dict[str, float]:
    p, pace = skill(step, steps), 0.8 + 0.4 * rng.random()
    rewards = [float(rng.random() < p) + 0.1 * (rng.random() < 0.9) for _ in range(32)]
    cut = 0.11 * (1 - step / steps) * rng.random()
    seconds = {"wait": 6.2 * pace, "forward_backward": 3.9 * pace, "optimizer": 0.62, "sync": 0.05, "pack": 0.02}
    if step % 10 == 0:
        seconds |= {"checkpoint": 1.3, "evaluate": 21.0}
    return {
        **spread("reward", rewards),
        "reward/number": sum(r >= 1 for r in rewards) / 32,
        "reward/format": 0.9 + 0.1 * p,
        "accuracy": sum(r >= 1 for r in rewards) / 32,
        "groups/dropped_zero_variance": float(rng.random() < 0.3),
        "groups/dropped_stale": 0.0,
        "groups/dropped_failed": float(step % 17 == 0),
        "rollouts/failed": float(step % 10 == 3),
        "rollouts/truncated": cut,
        **spread("length", [min(48.0, max(6.0, rng.gauss(34 - 10 * p, 7))) for _ in range(32)]),
        **spread("lag", [float(rng.random() < 0.8) for _ in range(32)]),
        "loss": rng.gauss(0, 0.02),
        "kl_behavior": 2e-4 * math.exp(rng.gauss(0, 0.6)),
        "ratio": 1 + rng.gauss(0, 0.001),
        "ratio/max": 1.15 + 0.2 * rng.random(),
        "clip_fraction": 0.004 * rng.random(),
        "grad_norm": 0.35 + 0.1 * rng.random() + 2 * (rng.random() < 0.02),
        "lr": 3e-5 * min(1, step / 5),
        "tokens/generated": 32 * 28.0,
        "tokens/trained": 32 * 26.0,
        "tokens_per_second": 150 / pace,
        **{f"seconds/{part}": value for part, value in seconds.items()},
        "seconds/step": 11.1 * pace,
        "memory/rss_gb": 2.6 + 0.2 * step / steps,
        "probe_gap": 1e-6 * rng.random(),
        "advantage/std": 0.4 - 0.1 * p,
    }


def made_evaluation(rng: random.Random, step: int, steps: int) -> dict[str, Any]:
    p = skill(step, steps) + rng.gauss(0, 0.01)
    tasks = random.Random(7)
    rollouts = []
    for i in range(10):
        prompt, what, a, b = problem(tasks)
        for _ in range(4):
            right = rng.random() < p
            rollouts.append(
                {
                    "task": f"arithmetic/test-{i}",
                    "prompt": prompt,
                    "answer": str(a + b),
                    "text": made_answer(rng, what, a, b, right, False),
                    "reward": float(right),
                }
            )
    return {
        "step": step,
        "time": 1780000000.0 + 12 * step,
        "env": "arithmetic",
        "tasks": 40,
        "samples": 4,
        "mean": p,
        "mean_ci": [p - 0.07, p + 0.07],
        "pass_at": {"1": p, "4": 1 - (1 - p) ** 2.6},
        "pass_ci": [1 - (1 - p) ** 2.6 - 0.12, min(1, 1 - (1 - p) ** 2.6 + 0.1)],
        "truncated": 0.05,
        "tokens": 30.0,
        "rollouts": rollouts,
    }


def make_run(
    folder: Path, *, steps: int = 40, until: int | None = None, rollouts_every: int = 1, done: bool = True
) -> Path:
    """A run folder as training leaves it: resumed once at half time, evaluated every tenth of the way."""
    rng = random.Random(3)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rollouts").mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"steps": steps}, sort_keys=False))
    last, start = until or steps, 1780000000.0
    metrics, events, evaluations = [], [], [made_evaluation(rng, 0, steps)]
    events.append({"time": start, "event": "run_started"})
    for step in range(1, last + 1):
        now = start + 12 * step + (3600 if step > last // 2 else 0)
        if step == last // 2 + 1:
            events.append({"time": now - 5, "event": "resumed", "step": step - 1})
        metrics.append({"step": step, "time": now, "metrics": made_metrics(rng, step, steps)})
        events.append(
            {"time": now, "event": "published", "step": step, "seconds": 0.05, "bytes": 269060552, "probe_gap": 1e-6}
        )
        if step % max(1, steps // 4) == 0:
            evaluations.append(made_evaluation(rng, step, steps))
            events.append({"time": now, "event": "checkpoint_saved", "step": step, "seconds": 1.3})
        if step % rollouts_every == 0 or step in (1, last):
            write(folder / "rollouts" / f"{step:06d}.jsonl", made_rollouts(rng, step, steps))
    if done:
        events.append({"time": start + 12 * last + 3600, "event": "run_done"})
    write(folder / "metrics.jsonl", metrics)
    write(folder / "events.jsonl", events)
    write(folder / "eval.jsonl", evaluations)
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
