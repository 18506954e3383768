"""Useful groups per sampled token, and how good the gradient is that they make: what becomes of flat groups.

    .venv/bin/python benchmarks/useful_groups.py [--tasks 200] [--steps 48] [--runs 32] [--drift 0.02]

Four fifths of the groups are flat: of the tasks two fifths are hopeless, two fifths solved, the others in between. The
buffer, its store and its curriculum are the trainer's own, as are advantage, loss and objective; engine and model are a
policy so small that its true gradient is a formula: answer right with probability sigmoid(w x + b), where x and b are
the task's. The reward is 1 for right, so the expected reward's gradient is the mean of p (1 - p) x over all tasks.

Every way is given the same weights at each step, which move along the true gradient, and is played ``runs`` times with
other random numbers. So bias and noise of its gradient can be told apart, step by step and for the mean of several
steps. All errors are relative to the true gradient's length, after the length that is left free (flat groups that are
dropped make every gradient longer) was taken out.

    useful      groups with signal that were trained, for 1000 sampled tokens; x is that against ``drop``
    fresh       the same without replayed ones
    bias        how far the mean over all runs is from the true gradient, what the noise puts there taken off
    error       root mean square error of one step's gradient: bias and noise
    error of 16 the same for the mean of 16 steps: what is replayed there does not average out
    at equal error   tokens that ``drop`` needs for the same error, against what this way needs; of 1 and of 16 steps
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.algorithms.advantages.base import advantages
from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.curricula.solve_rate import SolveRate
from tandem.algorithms.losses.base import MicroBatch
from tandem.algorithms.losses.grpo import Grpo
from tandem.config.sections import Replay, Reroll
from tandem.rollout.buffer import BufferOptions, RolloutBuffer
from tandem.rollout.data_state import DataState
from tandem.rollout.group_runner import keep_rewards
from tandem.rollout.measure import Solved
from tandem.rollout.task_sampler import EnvRunner
from tandem.trainer.objective import Objective, OldLogprobs
from tandem.types import Completion, Group, Message, Rollout, Sampling, Task, Turn

Floats = NDArray[np.float64]

WIDTH, GROUPS, ANSWERS = 6, 8, 8
"""Of the weights; groups of a step; answers of a group."""
WINDOWS = (1, 2, 4, 8, 16)
"""Steps whose gradients are averaged."""

WAYS: Mapping[str, Mapping[str, Any]] = {
    "drop": {},
    "resample 3": {"max_resample_times": 3},
    "replay, age 2": {"replay": Replay(size=64, max_age=2)},
    "replay, age 8": {"replay": Replay(size=64, max_age=8)},
    "replay, age 32": {"replay": Replay(size=256, max_age=32)},
    "reroll": {"reroll": Reroll(start_fraction=0.25, max_groups=1)},
    "curriculum, sharpness 0": {"curriculum": SolveRate(sharpness=0.0)},
    "curriculum": {"curriculum": SolveRate()},
    "curriculum, resample, reroll": {
        "curriculum": SolveRate(),
        "max_resample_times": 3,
        "reroll": Reroll(start_fraction=0.25, max_groups=1),
    },
    "all, age 2": {
        "curriculum": SolveRate(),
        "max_resample_times": 3,
        "reroll": Reroll(start_fraction=0.25, max_groups=1),
        "replay": Replay(size=64, max_age=2),
    },
}
"""Options of the buffer."""


@dataclass(frozen=True, slots=True)
class World:
    """Tasks, and the weights at every step."""

    x: Floats
    """[tasks, WIDTH]"""
    b: Floats
    """[tasks]"""
    weights: Floats
    """[steps + 1, WIDTH]"""

    @staticmethod
    def made(tasks: int, steps: int, drift: float, seed: int = 0) -> World:
        """A policy that moves by ``drift`` (root mean square, of its log odds) in every step."""
        draw = np.random.default_rng(seed)
        x = draw.normal(size=(tasks, WIDTH))
        x[:, 0] = 1.0  # what all tasks have in common, so that the true gradient is no accident of few
        kind = np.arange(tasks) % 5
        b = np.where(kind < 2, -7.5, np.where(kind < 4, 7.5, 0.0)) + draw.normal(size=tasks) * 0.5
        weights = [draw.normal(size=WIDTH) * 0.2]
        for _ in range(steps):
            ahead = World(x, b, np.array(weights)).gradient(len(weights) - 1)
            step = ahead / np.sqrt(np.mean((x @ ahead) ** 2))
            weights.append(weights[-1] + drift * step)
        return World(x, b, np.array(weights))

    def right(self, step: int, task: int) -> float:
        """Chance of a right answer."""
        return 1.0 / (1.0 + math.exp(-float(self.x[task] @ self.weights[step] + self.b[task])))

    def gradient(self, step: int) -> Floats:
        """Of the expected reward of a task drawn at random."""
        p = 1.0 / (1.0 + np.exp(-(self.x @ self.weights[step] + self.b)))
        reward_gradient: Floats = (p * (1 - p)) @ self.x / len(p)
        return reward_gradient


@dataclass
class Player:
    """A worker of one run."""

    world: World
    seed: int
    step: int = 0
    tokens: int = 0
    played: int = 0
    flat: int = 0

    async def run(self, task: Task, *, id: str, index: int, size: int, sampling: Sampling) -> Group:
        p, draw = self.world.right(self.step, int(task.id)), random.Random(f"{self.seed}/{id}")
        answers = [draw.random() < p for _ in range(size)]
        self.tokens += size
        self.played += 1
        self.flat += len(set(answers)) == 1
        return Group(
            id=id, index=index, env="task", rollouts=tuple(self._rollout(task, f"{id}/{i}", right, p)
                                                           for i, right in enumerate(answers))
        )  # fmt: skip

    def _rollout(self, task: Task, id: str, right: bool, p: float) -> Rollout:
        logprob = math.log(p if right else 1.0 - p)
        completion = Completion(tokens=(int(right),), logprobs=(logprob,), versions=(self.step,), finish="stop")
        turn = Turn(prompt=(0,), completion=completion, temperature=1.0)
        mark = float(right)
        return Rollout(
            id=id, task=task, turns=(turn,), messages=task.prompt, status="ok", rewards={"mark": mark}, reward=mark
        )


@dataclass
class RunResult:
    """What one run came to."""

    gradients: list[Floats] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    useful: int = 0
    fresh: int = 0
    ages: list[int] = field(default_factory=list)
    flat: float = 0.0


def gradient(world: World, step: int, batch: Sequence[Group], objective: Objective) -> Floats:
    """Of the objective at the weights of a step: its negative, since the loss is minimised."""
    each = [
        (int(r.task.id), r.turns[0].completion, a)
        for group, values in zip(batch, advantages(DrGrpo(), batch), strict=True)
        for r, a in zip(group.scored, values, strict=True)
    ]
    weights = torch.tensor(world.weights[step], requires_grad=True)
    tasks = [task for task, _, _ in each]
    logits = torch.tensor(world.x[tasks]) @ weights + torch.tensor(world.b[tasks])
    sign = torch.tensor([1.0 if completion.tokens[0] else -1.0 for _, completion, _ in each], dtype=torch.float64)
    logprobs = torch.nn.functional.logsigmoid(sign * logits)
    micro = MicroBatch(
        behavior_logprobs_N=torch.tensor([completion.logprobs[0] for _, completion, _ in each], dtype=torch.float64),
        advantages_N=torch.tensor([a for _, _, a in each], dtype=torch.float64),
        sample_N=torch.arange(len(each)),
        num_samples=len(each),
    )
    cost, _ = objective(logprobs, micro, OldLogprobs(recomputed_logprobs_N=logprobs.detach(), ref_logprobs_N=None))
    (-cost.sum() / len(each)).backward()
    assert weights.grad is not None
    return weights.grad.numpy()


async def run(world: World, steps: int, seed: int, options: Mapping[str, Any]) -> RunResult:
    """One run: batches as the loop takes them, and what each says of the gradient."""
    player, result, objective = Player(world, seed), RunResult(), Objective(loss=Grpo())
    tasks = [Task(id=str(n), env="task", prompt=(Message(role="user", content="?"),), answer="")
             for n in range(len(world.b))]  # fmt: skip
    runner = EnvRunner(
        name="task",
        label="",
        seed=seed,
        group_runner=player,  # type: ignore[arg-type]
        tasks=tasks,
        solved=Solved(reward="mark", full_marks=1.0),
    )
    buffer = RolloutBuffer(
        runners=[runner],
        options=BufferOptions(
            groups_per_step=GROUPS, group_size=ANSWERS, max_lag=0, drop_zero_variance=True, sampling=Sampling(),
            steps=steps, **options,
        ),
        version=lambda: player.step,
        postprocess_rewards=keep_rewards,
        on_drop=lambda reason, group: None,
    )  # fmt: skip
    async with buffer.open(DataState()) as opened:
        for step in range(steps):
            batch = await opened.take()
            result.gradients.append(gradient(world, step, batch.groups, objective))
            result.tokens.append(player.tokens)
            useful = [group for group in batch if not group.zero_variance]
            result.useful += len(useful)
            result.fresh += sum(not group.replayed for group in useful)
            result.ages += [step - group.version_min for group in batch]
            result.flat = player.flat / player.played
            player.step += 1
            batch.free_slots()
    return result


def errors(world: World, results: Sequence[RunResult], window: int) -> tuple[float, float]:
    """Bias and whole error of the mean of so many steps' gradients, relative to the true one."""
    runs = np.array([one.gradients for one in results])  # [runs, steps, WIDTH]
    count, steps, _ = runs.shape
    bias = noise = 0.0
    starts = range(0, steps - window + 1, window)
    for start in starts:
        each = runs[:, start : start + window].mean(axis=1)
        true = np.mean([world.gradient(step) for step in range(start, start + window)], axis=0)
        mean = each.mean(axis=0)
        length = mean @ true / (true @ true)
        scatter = float(((each - mean) ** 2).sum() / (count - 1)) / length**2 / float(true @ true)
        off = float(((mean / length - true) ** 2).sum()) / float(true @ true)
        bias += off - scatter / count * (WIDTH - 1) / WIDTH  # along the true gradient nothing is off
        noise += scatter
    bias, noise = max(0.0, bias / len(starts)), noise / len(starts)
    return math.sqrt(bias), math.sqrt(bias + noise)


def compare(world: World, steps: int, runs: int) -> None:
    print(f"{'':30}{'flat':>6}{'useful':>8}{'x':>6}{'fresh':>7}{'age':>6}{'bias':>7}{'error':>7}{'of 16':>7}"
          f"{'at equal error: 1':>19}{'16':>6}")  # fmt: skip
    base: dict[int, tuple[float, float]] = {}
    curves = []
    plain = 0.0
    for name, options in WAYS.items():
        results = [asyncio.run(run(world, steps, seed, options)) for seed in range(runs)]
        spent = float(np.mean([one.tokens[-1] for one in results]))
        useful = 1000 * float(np.mean([one.useful for one in results])) / spent
        plain = plain or useful
        errors_by_window = {window: errors(world, results, window) for window in WINDOWS}
        here = {window: (window * spent / steps, errors_by_window[window][1]) for window in WINDOWS}
        base = base or here
        equal = {w: base[w][0] / here[w][0] * (base[w][1] / here[w][1]) ** 2 for w in WINDOWS}
        curves.append((name, here))
        print(
            f"{name:30}{np.mean([one.flat for one in results]):6.2f}{useful:8.2f}{useful / plain:6.2f}"
            f"{1000 * np.mean([one.fresh for one in results]) / spent:7.2f}"
            f"{np.mean([age for one in results for age in one.ages]):6.2f}"
            f"{errors_by_window[1][0]:7.3f}{errors_by_window[1][1]:7.3f}{errors_by_window[16][1]:7.3f}"
            f"{equal[1]:19.2f}{equal[16]:6.2f}",
            flush=True,
        )
    print("\nthe curve: sampled tokens, and the error of the gradient averaged over the steps they were sampled in")
    for name, here in curves:
        print(f"{name:30}" + "".join(f"{tokens:9.0f}:{error:6.3f}" for tokens, error in here.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--runs", type=int, default=32)
    parser.add_argument("--drift", type=float, default=0.02, help="of the log odds, in every step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.tasks} tasks, {args.steps} steps of {GROUPS} groups of {ANSWERS}, {args.runs} runs of each way, "
          f"drift {args.drift}\n")  # fmt: skip
    since = time.process_time()
    compare(World.made(args.tasks, args.steps, args.drift), args.steps, args.runs)
    print(f"\n{time.process_time() - since:.0f} s of one core")


if __name__ == "__main__":
    main()
