"""The memory plan: counted without weights, held against what the machine has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem import machine, memory, resolve
from tandem.config import RunConfig
from tandem.envs.arithmetic import Arithmetic
from tandem.errors import DoesNotFit
from tandem.machine import Machine

LARGE = Machine(name="this machine", free=10**13, total=10**13, is_host=True)
LAYERS, HIDDEN, HEADS, KEYS, FEED, VOCAB, CONTEXT = 2, 64, 4, 2, 128, 500, 256
HEAD = HIDDEN // HEADS


@pytest.fixture(scope="module")
def model_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FEED, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEYS, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip


def config(**options: Any) -> RunConfig:
    return RunConfig(**{"model": "m", "steps": 1, "env": Arithmetic(), "groups_per_step": 2, "group_size": 4} | options)


def lora(rank: int) -> Any:
    return resolve.find("trains", "lora")(rank=rank)


def attention_and_feed_forward() -> list[tuple[int, int]]:
    """Inputs and outputs of each linear layer."""
    attention = [(HIDDEN, HIDDEN), (HIDDEN, KEYS * HEAD), (HIDDEN, KEYS * HEAD), (HIDDEN, HIDDEN)]
    return [*attention, (HIDDEN, FEED), (HIDDEN, FEED), (FEED, HIDDEN)]


PARAMETERS = VOCAB * HIDDEN + HIDDEN + LAYERS * (2 * HIDDEN + sum(a * b for a, b in attention_and_feed_forward()))


def lines(plan: memory.MemoryPlan) -> dict[str, int]:
    return {line.name: line.bytes for line in plan.lines}


def test_parameters_are_counted_once_where_tied_and_without_weights(model_config: Any) -> None:
    assert memory.count(config(), model_config) == (PARAMETERS, PARAMETERS, VOCAB * HIDDEN)


def test_an_adapter_trains_rank_times_in_plus_out_of_each_linear_layer(model_config: Any) -> None:
    adapter = 3 * LAYERS * sum(a + b for a, b in attention_and_feed_forward())
    total, trained, largest = memory.count(config(trains=lora(3)), model_config)
    assert trained == adapter
    assert total == PARAMETERS + adapter
    assert largest == 3 * FEED


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_each_line_is_what_its_reason_says(model_config: Any, dtype: Any, width: int) -> None:
    found = config(dtype=dtype, micro_batch_tokens=512)
    found = replace(found, sampling=replace(found.sampling, max_tokens=40), engine=replace(found.engine, max_rows=16))
    by = lines(memory.plan(found, model_config, LARGE, prompt_tokens=60))
    assert by["weights"] == PARAMETERS * width
    assert by["optimizer"] == found.optimizer.state_bytes(PARAMETERS, width)
    assert by["gradients"] == 2 * VOCAB * HIDDEN * width
    assert by["KV cache"] == 16 * 150 * 2 * LAYERS * KEYS * HEAD * width
    assert by["logits"] == 16 * VOCAB * 12
    assert by["programs"] == memory.LIBRARIES + memory.GRADER
    assert by["activations"] == 512 * memory.activation_bytes(model_config, width, True)


def test_a_sequence_longer_than_the_budget_decides_the_activations(model_config: Any) -> None:
    found = config(micro_batch_tokens=16)
    found = replace(found, sampling=replace(found.sampling, max_tokens=100))
    per_token = memory.activation_bytes(model_config, 2, True)
    assert lines(memory.plan(found, model_config, LARGE, prompt_tokens=50))["activations"] == 150 * per_token
    long = replace(found, sampling=replace(found.sampling, max_tokens=10_000))
    assert lines(memory.plan(long, model_config, LARGE, prompt_tokens=50))["activations"] == CONTEXT * per_token


def test_several_turns_make_longer_sequences(model_config: Any) -> None:
    found = config(env=resolve.find("envs", "calculator")(max_turns=3), micro_batch_tokens=1)
    found = replace(found, sampling=replace(found.sampling, max_tokens=10))
    per_token = memory.activation_bytes(model_config, 2, True)
    assert lines(memory.plan(found, model_config, LARGE, prompt_tokens=50))["activations"] == 80 * per_token


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_formula_for_activations_agrees_with_what_autograd_keeps(model_config: Any, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tandem.policy.attention import NAME, Packed, sequential_positions
    from tandem.policy.policy import Policy

    wide = type(model_config)(
        **{**model_config.to_dict(), "hidden_size": 256, "intermediate_size": 640, "head_dim": 64}
    )
    model = AutoModelForCausalLM.from_config(wide, attn_implementation=NAME, dtype=getattr(torch, dtype))
    policy = Policy(model, None, name="m", compute=None)  # type: ignore[arg-type]
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    plan = Packed(lengths=(32, *(60,) * 8), parents=(None, *(0,) * 8))
    tokens = 32 + 60 * 8
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.hidden(torch.zeros(1, tokens, dtype=torch.long), torch.tensor([sequential_positions(plan)]), plan)
    measured = sum(storage.nbytes() for storage in kept.values()) / tokens
    assert memory.activation_bytes(wide, getattr(torch, dtype).itemsize, True) == pytest.approx(measured, rel=0.12)


def test_sampling_and_training_take_turns_unless_they_overlap(model_config: Any) -> None:
    turns = memory.plan(config(), model_config, LARGE)
    both = memory.plan(config(max_lag=1), model_config, LARGE)
    by = lines(turns)
    always = by["programs"] + by["weights"] + by["optimizer"]
    sampling, training = by["KV cache"] + by["logits"], by["gradients"] + by["activations"]
    assert turns.total == always + max(sampling, training)
    assert both.total == always + sampling + training


def test_an_adapter_needs_less_than_full_training(model_config: Any) -> None:
    full, adapter = (memory.plan(config(trains=trains), model_config, LARGE) for trains in (config().trains, lora(2)))
    assert lines(adapter)["optimizer"] < lines(full)["optimizer"] / 10
    assert adapter.total < full.total


def test_what_does_not_fit_is_refused_with_the_table_and_what_to_change(model_config: Any) -> None:
    wide = type(model_config)(
        **{**model_config.to_dict(), "hidden_size": 4096, "intermediate_size": 8192, "head_dim": 64}
    )
    small = replace(LARGE, free=2 * 10**9, total=4 * 10**9)
    plan = memory.plan(config(), wide, small)
    assert not plan.fits
    with pytest.raises(DoesNotFit) as caught:
        plan.require()
    message = str(caught.value)
    assert "and this machine has 2.00 GB free" in message
    for name in lines(plan):
        assert f"\n  {name} " in message
    assert "to make it fit: train an adapter (trains: lora)" in message
    assert DoesNotFit.exit_code == 11
    memory.plan(config(), wide, LARGE).require()


def test_an_accelerator_holds_no_programs(model_config: Any) -> None:
    by = lines(memory.plan(config(), model_config, replace(LARGE, is_host=False)))
    assert "programs" not in by
    assert by["driver"] == memory.DRIVER
    assert memory.activation_bytes(model_config, 2, False) < memory.activation_bytes(model_config, 2, True)


def test_the_context_is_the_smaller_of_the_models_and_the_recipes(model_config: Any) -> None:
    assert memory.context(config(), model_config) == CONTEXT
    assert memory.context(config(context=100), model_config) == 100
    assert memory.context(config(context=9999), model_config) == CONTEXT


def test_a_checkpoint_holds_what_is_trained_and_the_optimizers_state(model_config: Any) -> None:
    expected = PARAMETERS * 2 + config().optimizer.state_bytes(PARAMETERS, 2)
    assert memory.checkpoint_bytes(config(), model_config) == expected
    assert memory.checkpoint_bytes(config(trains=lora(2)), model_config) < expected / 10


# The machine


def meminfo(folder: Path) -> Path:
    file = folder / "meminfo"
    file.write_text("MemTotal:       8000 kB\nMemFree:  1 kB\nMemAvailable:   6000 kB\nHugePages_Total:       0\n")
    return file


def test_without_a_container_the_machines_own_memory_counts(tmp_path: Path) -> None:
    found = machine.host(meminfo(tmp_path), tmp_path / "none")
    assert (found.free, found.total) == (6000 * 1024, 8000 * 1024)


def test_a_containers_limit_counts_less_what_is_used_but_not_its_page_cache(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("4096000\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 500000\n")
    found = machine.host(meminfo(tmp_path), tmp_path)
    assert (found.free, found.total) == (4096000 - 3000000 + 500000, 4096000)


def test_the_older_containers_files_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("4096000")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("1000000")
    assert machine.host(meminfo(tmp_path), tmp_path).free == 3096000


def test_a_container_without_a_limit_is_no_container(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.host(meminfo(tmp_path), tmp_path).total == 8000 * 1024


def test_this_machine_can_be_asked() -> None:
    here = machine.host()
    assert 0 < here.free <= here.total
    assert machine.cores() >= 1
    assert machine.free_disk(Path("runs/not/there/yet")) > 0


def test_bytes_are_readable() -> None:
    assert [machine.readable(amount) for amount in (1.5e9, 38e6, 4000, 0)] == ["1.50 GB", "38 MB", "4 kB", "0 kB"]
