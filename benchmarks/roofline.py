"""Share of the roofline of a finished run: what its sampling and its matrix products alone would take, over its steps.

    python benchmarks/roofline.py runs/NAME                                        # on the GPU that the run had
    python benchmarks/roofline.py runs/NAME --places 512 --first 5 --last 20

For each step the answers that were sampled for it, dropped ones too, are sampled by vLLM alone (``LLM.generate``, no
logprobs, ``--places`` sequences at once), with lengths drawn from those of the step's trained answers and prompts of
their groups' length. To that comes 6 N T, N weights and T computed tokens, at the rate of a bfloat16 matrix product
measured here. Prints a line a step, and the means and their ratio last: steps may be long and short in turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import yaml


def matrix_rate(size: int = 8192, times: int = 20) -> float:
    """Multiplications and additions a second of bfloat16 products."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        left @ right
    torch.cuda.synchronize()
    return 2 * size**3 * times / (time.perf_counter() - begin)


def steps_of(folder: Path, first: int, last: int) -> list[tuple[dict[str, float], list[dict[str, Any]]]]:
    """Metrics of each step from ``first`` to ``last``, and its rollouts."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = {row["step"]: folder / "rollouts" / f"{row['step']:06d}.jsonl" for row in rows}
    return [
        (row["metrics"], [json.loads(line) for line in files[row["step"]].read_text().splitlines()])
        for row in rows
        if first <= row["step"] <= last
    ]


def alone(llm: Any, metrics: dict[str, float], rollouts: list[dict[str, Any]], draw: random.Random) -> float:
    """Seconds that vLLM takes for the answers of a step."""
    from vllm import SamplingParams

    lengths = [length for rollout in rollouts for length in rollout["turns"]]
    prompt = round(statistics.mean(len(rollout["prompts"][0][1]) for rollout in rollouts))
    answers = round(metrics["tokens/generated"] / statistics.mean(lengths))
    sampled = draw.choices(lengths, k=answers)
    prompts = [{"prompt_token_ids": draw.choices(range(100, 10_000), k=prompt)} for _ in range(-(-answers // 8))]
    params = [SamplingParams(max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False) for n in sampled]
    begin = time.perf_counter()
    llm.generate([prompts[i // 8] for i in range(answers)], params, use_tqdm=False)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--places", type=int, default=512, help="sequences that vLLM samples at once")
    parser.add_argument("--first", type=int, default=5, help="step, after what is compiled")
    parser.add_argument("--last", type=int, default=25)
    args = parser.parse_args()
    from transformers import AutoConfig, AutoModelForCausalLM
    from vllm import LLM

    config = yaml.safe_load((args.run / "config.yaml").read_text())
    steps, rate = steps_of(args.run, args.first, args.last), matrix_rate()
    llm = LLM(config["model"], dtype="bfloat16", max_num_seqs=args.places, gpu_memory_utilization=0.7)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config["model"]))
    weights = sum(parameter.numel() for parameter in model.parameters())
    draw, times = random.Random(0), []
    alone(llm, *steps[0], draw)  # warms up
    for metrics, rollouts in steps:
        sampling, products = alone(llm, metrics, rollouts, draw), 6 * weights * metrics["tokens/computed"] / rate
        times.append((sampling, products, metrics["seconds/step"]))
        print(json.dumps({"sampling": sampling, "products": products, "step": metrics["seconds/step"]}), flush=True)
    sampling, products, step = (statistics.mean(column) for column in zip(*times, strict=True))
    print(f"vLLM alone {sampling:.2f} s, products {products:.2f} s ({rate / 1e12:.0f} TFLOP/s), step {step:.2f} s")
    print(f"share of the roofline {(sampling + products) / step:.2f}")


if __name__ == "__main__":
    main()
