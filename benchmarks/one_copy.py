"""Full fine-tuning with one copy of the weights for trainer and engine, on one accelerator: where the memory goes.

    python benchmarks/one_copy.py --shape qwen2.5-14b --kv-cache-gb 4 --utilization 0.3
    python benchmarks/one_copy.py --shape tiny --python .venv-engine/bin/python

The engine lends its weights. Answers are sampled with it, trained on by the trainer's own step (loss, backward,
gradients in float32, optimizer) and published, a few times over; meanwhile the engine goes on sampling. Rewards are
made up: the share of even bytes in an answer, which has a gradient.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch
from _load import memory, prompt, show
from _options import completed, options
from _tables import report
from sync import Bench, Live, opened, prepared, publish

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.losses.grpo import Grpo
from tandem.optimizers.adafactor import Adafactor
from tandem.optimizers.adamw import AdamW
from tandem.optimizers.adamw8bit import AdamW8bit
from tandem.optimizers.base import Optimizer
from tandem.trainer.objective import Objective
from tandem.trainer.pack import Packer
from tandem.trainer.step import Step
from tandem.trainer.work import LocalWork
from tandem.types import Group, Rollout, Sampling, Task, Turn

OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": AdamW(lr=1e-5),
    "adamw8bit": AdamW8bit(lr=1e-5, precision="stochastic"),
    "adafactor": Adafactor(precision="stochastic"),
}


async def sampled(live: Live, index: int, siblings: int) -> Group:
    """One group of answers to one prompt."""
    ids = prompt(10**6 + index)
    sampling = Sampling(max_tokens=live.load.tokens)
    task = Task(id=f"made-up-{index}", env="made up", prompt=(), answer="")

    async def one(sibling: int) -> Rollout:
        completion = await live.engine.generate(ids, sampling, index * siblings + sibling)
        reward = sum(token % 2 == 0 for token in completion.tokens) / len(completion.tokens)
        turn = Turn(prompt=tuple(ids), completion=completion, temperature=1.0)
        return Rollout(
            id=f"{index}/{sibling}",
            task=task,
            turns=(turn,),
            messages=(),
            status="ok",
            rewards={"even": reward},
            reward=reward,
        )

    rollouts = await asyncio.gather(*(one(i) for i in range(siblings)))
    return Group(id=f"{task.id}@{index}", index=index, env=task.env, rollouts=tuple(rollouts))


class Trained:
    """The optimizer's own step, in the place of the change that stands for it elsewhere."""

    def __init__(self, step: Step):
        self._step = step
        self.norm = 0.0

    def write(self, version: int) -> None:
        """On the compute thread."""
        self.norm = float(self._step.work.stepper.step(self._step.optimizer.rate(version, 100), 1.0))
        if torch.cuda.is_available():
            torch.cuda.synchronize()


async def train(bench: Bench, args: Any) -> dict[str, Any]:
    """A few steps; what each took, and memory all along."""
    async with opened(bench, "shared") as live:
        result, policy = live.result, live.link.policy
        result["optimizer"] = args.optimizer
        optimizer, loss = OPTIMIZERS[args.optimizer], Grpo()
        stepper = await policy.compute(optimizer.bind, live.link.trainable.parameters(policy.model))
        work = LocalWork(policy=policy, objective=Objective(loss=loss), stepper=stepper, sampling=Sampling())
        step = Step(work=work, optimizer=optimizer, steps=100)
        pack = Packer(
            advantage=DrGrpo(),
            reduction=loss.reduction,
            max_tokens=args.tokens,
            budget=args.micro_batch_tokens,
            mask_truncated=False,
            device=policy.device,
        )
        live.change = trained = Trained(step)  # type: ignore[assignment]
        result["memory"]["optimizer bound"] = memory(live.worker)
        steps: list[dict[str, float]] = []
        async with live.load.running():
            for number in range(1, args.steps + 1):
                begin = time.perf_counter()
                groups = await asyncio.gather(
                    *(sampled(live, number * 100 + i, args.siblings) for i in range(args.groups))
                )
                batch = pack(groups, version=number - 1)
                sampled_at = time.perf_counter()
                stats = await step.forward_backward(batch)
                trained_at = time.perf_counter()
                result["memory"][f"gradients {number}"] = memory(live.worker)
                await publish(live, number)
                row = live.watch.rows[-1]
                gaps = [
                    abs(a - b)
                    for group in groups
                    for rollout in group.rollouts
                    for a, b in zip(stats.logprobs[rollout.id], rollout.turns[0].completion.logprobs, strict=True)
                ]
                steps.append(
                    {
                        "sample s": round(sampled_at - begin, 2),
                        "forward and backward s": round(trained_at - sampled_at, 2),
                        "optimizer s": round(row["optimizer"], 3),
                        "still beyond it ms": round(1000 * row["still"], 1),
                        "grad norm": round(trained.norm, 5),
                        "probe gap": round(row["gap"], 5),
                        "mean |logprob difference|": round(sum(gaps) / len(gaps), 6),
                    }
                )
                print(f"   step {number}: {steps[-1]}", flush=True)
            result["memory"]["afterwards"] = memory(live.worker)
        result["steps"] = steps
        result["failed"], result["failures"] = len(live.load.failures), live.load.failures[:5]
        return result


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw8bit")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    args = completed(parser.parse_args())
    args.repeat = 1
    bench = prepared(args)
    result = asyncio.run(train(bench, args))
    steps = result.pop("steps")
    report("one copy", result)
    for number, step in enumerate(steps, 1):
        print(f"   step {number}: {step}")
    show("one copy", {**result, "steps": steps}, args.json)
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
