"""Tokens a second of Tandem's forward and backward on the work of ``peers/forward_backward.py``, bfloat16, CPU.

    python benchmarks/training_step.py MODEL [--vocabulary N] [--low 8] [--high 128]

The same sequences: siblings share a prompt and differ in length. Every token of every sequence counts, as it does for
the peer, although a shared prompt is computed once. Prints JSON; the rate is of the fastest repetition.
``--alone`` gives every sequence a prompt of its own, so that nothing is shared and only packing differs.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import asyncio
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tandem.algorithms.advantages.dr_grpo import DrGrpo
from tandem.algorithms.losses.grpo import Grpo
from tandem.model.policy import Compute, Policy, load_model, load_tokenizer
from tandem.optimizers.adamw import AdamW
from tandem.trainer.pack import Packer
from tandem.trainer.step import LocalWork, Objective, Step
from tandem.types import Completion, Group, Message, Rollout, Sampling, Task, Turn

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import workload


def groups(sequences: list[dict[str, Any]], alone: bool) -> list[Group]:
    """The peer's sequences as rollouts, rewarded alternately."""
    by_group: dict[int, list[Rollout]] = {}
    for i, sequence in enumerate(sequences):
        prompt, answer = sequence["tokens"][: sequence["prompt_len"]], sequence["tokens"][sequence["prompt_len"] :]
        completion = Completion(
            tokens=tuple(answer), logprobs=(-10.0,) * len(answer), versions=(0,) * len(answer), finish="stop"
        )
        task = Task(id=str(sequence["group"]), env="benchmark", prompt=(Message(role="user", content=""),), answer="")
        if alone:
            prompt = [i, *prompt[1:]]  # no two prompts alike: nothing is shared
        rollout = Rollout(
            id=str(i),
            task=task,
            turns=(Turn(prompt=tuple(prompt), completion=completion, temperature=1.0),),
            messages=task.prompt,
            status="ok",
            reward=float(i % 2),
        )
        by_group.setdefault(sequence["group"], []).append(rollout)
    return [Group(id=str(k), index=k, env="benchmark", rollouts=tuple(v)) for k, v in by_group.items()]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    model = load_model(str(args.model), dtype=torch.bfloat16, device=torch.device("cpu"))
    policy = Policy(model, load_tokenizer(str(args.model)), name="benchmark", compute=Compute(args.threads))
    vocabulary = args.vocabulary or model.config.vocab_size
    sequences = workload.token_groups(args.groups, 8, vocabulary=vocabulary, seed=0, low=args.low, high=args.high)
    packer = Packer(
        advantage=DrGrpo(),
        reduction="token",
        max_tokens=args.high,
        budget=args.micro_batch_tokens,
        mask_truncated=False,
        device=policy.device,
    )
    made, begin = groups(sequences, args.alone), time.process_time()
    batch = packer(made, version=0)
    packed = time.process_time() - begin
    optimizer = AdamW(lr=1e-6)
    named = list(model.named_parameters())
    stepper = await policy.compute(optimizer.bind, named)
    work = LocalWork(policy=policy, objective=Objective(loss=Grpo()), stepper=stepper, sampling=Sampling())
    step = Step(work=work, optimizer=optimizer, steps=1)
    took: list[float] = []
    for _ in range(args.repeat + 1):
        begin = time.perf_counter()
        stats = await step.forward_backward(batch)
        took.append(time.perf_counter() - begin)
        await step.apply(1, batch, stats)
    policy.close()
    tokens = sum(len(s["tokens"]) for s in sequences)
    return {
        "tokens": tokens,
        "trained_tokens": batch.num_loss_tokens,
        "computed_tokens": sum(len(m.tokens_T) for m in batch.micro),
        "seconds": [round(s, 3) for s in took[1:]],
        "tokens_per_second": round(tokens / min(took[1:]), 1),
        "packing_ms": round(packed * 1e3, 2),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3),
        "threads": policy.compute.threads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--vocabulary", type=int, default=0, help="token ids are drawn below this; 0: the model's")
    parser.add_argument("--low", type=int, default=8, help="fewest tokens of a completion")
    parser.add_argument("--high", type=int, default=128, help="most tokens of a completion")
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--groups", type=int, default=4, help="of 8 completions each")
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core")
    parser.add_argument("--alone", action="store_true", help="share no prompt")
    parser.add_argument("--repeat", type=int, default=3)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
