"""What a pass takes, counted without memory, against the same pass on real tensors and against a real training step."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import long_but
from tiny import live_policy

from tandem.config import registry as resolve
from tandem.config.loading import RunConfig
from tandem.config.sections import Distributed
from tandem.envs.arithmetic import Arithmetic
from tandem.model import layers
from tandem.model.attention import NAME
from tandem.trainer.assemble import objective, packer
from tandem.trainer.memory_plan.live import LiveTensors
from tandem.trainer.memory_plan.passes import FakeModel, Layout, run
from tandem.trainer.memory_plan.plan import update_bytes
from tandem.trainer.work import LocalWork
from tandem.types import Completion, Group, Message, Rollout, Sampling, Task, Turn

pytestmark = pytest.mark.slow

LAYOUT = Layout.of(tokens=300, prompt=20, answer=33, siblings=4)


def shape(**options: Any) -> Any:
    from transformers import Qwen2Config

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "vocab_size": 3000,
    }
    return Qwen2Config(**(sizes | {"num_key_value_heads": 2, "tie_word_embeddings": True} | options))


def recipe(**options: Any) -> RunConfig:
    return RunConfig(**({"model": "m", "steps": 1, "env": Arithmetic()} | options))


def trainable(kind: str, **options: Any) -> Any:
    return resolve.find("trainable", kind)(**options)


def real(config: RunConfig, model_config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, config.dtype)
    model = AutoModelForCausalLM.from_config(model_config, attn_implementation=NAME, dtype=dtype)
    model = config.trainable.prepare(model).eval()
    layers.tune(model, compile=False, checkpointing=config.checkpointing)
    return model


RECIPES: dict[str, dict[str, Any]] = {
    "full": {},
    "float32": {"dtype": "float32"},
    "lora": {"trainable": trainable("lora", rank=4)},
    "merged": {"trainable": trainable("lora", rank=4, merged=True)},
    "some layers": {"trainable": trainable("full", layers=(1, 4))},
    "selective": {"checkpointing": "selective"},
    "recomputed": {"checkpointing": "full"},
    "nucleus": {"sampling": Sampling(top_p=0.9, top_k=20)},
    "penalties": {"sampling": Sampling(repetition_penalty=1.1, frequency_penalty=0.1, min_tokens=2, top_k=20)},
    "recomputed lora": {"checkpointing": "full", "trainable": trainable("lora", rank=4)},
}


@pytest.mark.parametrize("name", long_but(RECIPES, "float32", "selective", "penalties", "recomputed lora"))
def test_fake_tensors_take_what_real_ones_take_to_the_byte(name: str) -> None:
    config, model_config = recipe(**RECIPES[name]), shape(tie_word_embeddings=name != "float32")
    counted = FakeModel(config, model_config, on_host=True).run(config, LAYOUT)
    assert counted == run(real(config, model_config), config, LAYOUT)


def test_layers_that_differ_are_counted_as_what_they_are() -> None:
    options = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}
    config, model_config = recipe(), shape(num_hidden_layers=8, **options)
    counted = FakeModel(config, model_config, on_host=True).run(config, LAYOUT)
    assert counted == run(real(config, model_config), config, LAYOUT)


def group(index: int, prompt: int, answer: int) -> Group:
    task = Task(id=str(index), env="e", prompt=(Message(role="user", content=""),), answer="")
    sampled = {"logprobs": (-5.0,) * answer, "versions": (0,) * answer, "finish": "length"}

    def rollout(i: int) -> Rollout:
        completion = Completion(tokens=tuple((i + j) % 50 for j in range(answer)), **sampled)  # type: ignore[arg-type]
        turn = Turn(prompt=tuple((index + j) % 50 for j in range(prompt)), completion=completion, temperature=1.0)
        whole = {"task": task, "turns": (turn,), "messages": task.prompt, "status": "ok"}
        return Rollout(id=f"{index}/{i}", reward=float(i % 2), **whole)  # type: ignore[arg-type]

    return Group(id=str(index), index=index, env="e", rollouts=tuple(rollout(i) for i in range(4)))


# Of a vocabulary this small a nucleus sorts all, in float64; of a real one a few hundred tokens of each row.
@pytest.mark.parametrize(
    ("kind", "sampling", "within"),
    [
        ("full", {}, 0.01),
        ("lora", {}, 0.01),
        ("full", {"top_p": 0.9}, 0.3),
        ("full", {"repetition_penalty": 1.1}, 0.01),
    ],
)
def test_a_real_training_step_takes_what_the_pass_is_counted_to(
    tiny_model: Path, kind: str, sampling: Any, within: float
) -> None:
    limits = Sampling(**sampling)
    config = recipe(dtype="float32", trainable=trainable(kind), micro_batch_tokens=20 + 4 * 32, sampling=limits)
    with live_policy(tiny_model, trainable=config.trainable) as policy:
        stepper = config.optimizer.bind(config.trainable.parameters(policy.model))
        step = LocalWork(policy=policy, objective=objective(config), stepper=stepper, sampling=config.sampling)
        batch = packer(config, policy)([group(0, 20, 33), group(1, 20, 33)], version=0)
        first, second = batch.micro
        step.hook()
        step.micro(first, None)  # makes the buffers that gradients are added to
        read = [getattr(second, name) for name in ("tokens_T", "positions_T", "predict_N", "targets_N")]
        read += [second.temperature_N, second.weights_N, *vars_of(second.batch)]
        if second.history is not None:
            read += [*second.history.seen, *second.history.output, second.history.age_N1]
        live = LiveTensors([*policy.model.parameters(), *policy.model.buffers(), *kept(stepper), *read])
        with live:
            step.micro(second, None)
        (peak,) = live.peaks.values()
        layout = Layout(lengths=second.plan.lengths, parents=second.plan.parents, trained=len(second.targets_N))
        counted = FakeModel(config, policy.causal.config, on_host=True).run(config, layout)
    assert counted.total == pytest.approx(sum(peak.values()), rel=within)


def vars_of(batch: Any) -> list[torch.Tensor]:
    return [value for f in fields(batch) if isinstance(value := getattr(batch, f.name), torch.Tensor)]


def kept(stepper: Any) -> list[torch.Tensor]:
    buffers = [weight.buffer for weight in stepper.weights if weight.buffer is not None]
    return [*stepper.state_dict().values(), *buffers]


def test_a_layout_holds_whole_answers_and_at_least_one() -> None:
    layout = Layout.of(tokens=100, prompt=20, answer=31, siblings=2)
    assert (layout.lengths, layout.parents, layout.trained) == ((20, 30, 30), (None, 0, 0), 62)
    assert Layout.of(tokens=1, prompt=20, answer=31, siblings=2).lengths == (20, 30)
    again = Layout.of(tokens=130, prompt=20, answer=31, siblings=2)
    assert (again.lengths, again.parents) == ((20, 30, 30, 20, 30), (None, 0, 0, None, 3))
    assert Layout.of(tokens=50, prompt=20, answer=1, siblings=2).lengths == (20, 20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", ["masters", "stochastic"])
@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "adafactor", "adamw_cpu"])
def test_an_update_takes_what_is_told(kind: str, precision: str, dtype: torch.dtype) -> None:
    if kind == "adamw_cpu" and precision != "masters":
        return
    optimizer = resolve.find("optimizers", kind)(**({} if kind == "adamw_cpu" else {"precision": precision}))
    weight = torch.nn.Parameter(torch.ones(64, 512, dtype=dtype))
    stepper = optimizer.bind([("w", weight)])
    for _ in range(2):  # the first makes tables that stay
        weight.grad = torch.full_like(weight, 1e-3)
        stepper.accumulate(weight)
        live = LiveTensors([weight, *kept(stepper)])
        with live:
            stepper.step(1e-3, 1.0)
    (peak,) = live.peaks.values()
    assert update_bytes(optimizer, weight.numel(), dtype.itemsize) == pytest.approx(
        sum(peak.values()), rel=0.1, abs=4096
    )


def test_ranks_that_share_sequences_have_as_many_tokens_each_as_one_that_does_not(tiny_model: Path) -> None:
    config = recipe(dtype="float32", micro_batch_tokens=20 + 4 * 32)
    shared = replace(config, ranks=2, distributed=Distributed(context_parallel=2))
    groups = [group(0, 20, 33), group(1, 20, 33)]
    with live_policy(tiny_model) as policy:
        assert len(packer(config, policy)(groups, version=0).micro) == 2
        assert len(packer(shared, policy, ranks=2)(groups, version=0).micro) == 1
