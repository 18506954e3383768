"""The memory plan: counted without weights, held against what the machine has."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import config_of
from support.tiny_policy import live_policy

from tandem import machine
from tandem.config import registry as resolve
from tandem.config.loading import RunConfig
from tandem.config.sections import Checkpoint, Distributed
from tandem.envs.arithmetic import Arithmetic
from tandem.errors import DoesNotFit
from tandem.machine import Machine
from tandem.model.attention import Packed, sequential_positions
from tandem.optimizers.adamw8bit import AdamW8bit
from tandem.trainer import memory_plan as memory
from tandem.types import Sampling

HOST = Machine(name="this machine", free=10**13, total=10**13, is_host=True)
CARD = Machine(name="a card", free=9 * 10**10, total=10**11, is_host=False)
LAYERS, HIDDEN, HEADS, KEYS, FEED, VOCAB, CONTEXT = 2, 64, 4, 2, 128, 500, 2048
ATTENTION = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS * HIDDEN // HEADS
PARAMETERS = VOCAB * HIDDEN + HIDDEN + LAYERS * (2 * HIDDEN + ATTENTION + 3 * HIDDEN * FEED)
BOTH = 2 * PARAMETERS
"""Bytes of the weights in bfloat16."""


@pytest.fixture(scope="module")
def model_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FEED, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KEYS, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip


def recipe(**options: Any) -> RunConfig:
    return RunConfig(**{"model": "m", "steps": 1, "env": Arithmetic(), "groups_per_step": 2, "group_size": 4} | options)


def part(category: str, kind: str, **options: Any) -> Any:
    return resolve.find(category, kind)(**options)


def vllm(**options: Any) -> Any:
    return part("engines", "vllm", **options)


def planned(config: RunConfig, model_config: Any, where: Machine = HOST, **how: Any) -> memory.MemoryPlan:
    return memory.Planner(config, model_config, where, HOST, **how).plan(config)


def lines(plan: memory.MemoryPlan) -> dict[str, int]:
    return {line.name: line.bytes for line in plan.lines}


def test_parameters_of_a_memory_plan_are_counted_once_where_tied(model_config: Any) -> None:
    counts = memory.Planner(recipe(), model_config).modelled
    assert (counts.parameters, counts.trainable, counts.head) == (PARAMETERS, PARAMETERS, VOCAB * HIDDEN)
    adapter = memory.Planner(recipe(trainable=part("trainable", "lora", rank=3)), model_config).modelled
    trained = 3 * LAYERS * (4 * HIDDEN + 2 * (HIDDEN + KEYS * HIDDEN // HEADS) + 3 * (HIDDEN + FEED))
    assert (adapter.trainable, adapter.parameters, adapter.base) == (trained, PARAMETERS + trained, PARAMETERS)


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_each_line_of_a_memory_plan_is_what_its_reason_says(model_config: Any, dtype: Any, width: int) -> None:
    config = recipe(dtype=dtype, engine=part("engines", "embedded", max_rows=16), sampling=Sampling(max_tokens=40))
    by = lines(planned(config, model_config, prompt_tokens=60))
    assert by["weights"] == PARAMETERS * width
    assert by["optimizer"] == config.optimizer.state_bytes(PARAMETERS, width)
    assert by["KV cache"] == 16 * (150 * 2 * LAYERS * KEYS * HIDDEN // HEADS * width + VOCAB * 12)
    assert by["slack"] == int(memory.SLACK * (by["activations"] + by["logprobs"] + by["gradients"]))


@pytest.mark.slow
def test_what_a_meta_pass_keeps_is_what_a_real_one_keeps(tiny_model: Path) -> None:
    """But for scores of attention, which that device keeps: within a tenth."""
    from tandem.model.policy import load_config

    with live_policy(tiny_model) as policy:
        plan = Packed(lengths=(16, 16, 16), parents=(None, 0, 0))
        weights = {t.untyped_storage()._cdata for t in (*policy.model.parameters(), *policy.model.buffers())}
        saved: dict[int, Any] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        positions_T = torch.as_tensor(sequential_positions(plan))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy.hidden(torch.zeros_like(positions_T)[None], positions_T[None], plan)
        real = sum(storage.nbytes() for key, storage in saved.items() if key not in weights) / 48
    config = recipe(dtype="float32")
    counted = memory.Planner(config, load_config(str(tiny_model)), HOST).modelled.token_bytes
    assert 0.9 * real <= counted <= 1.25 * real


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_are_planned_for(name: str) -> None:
    experts = ("experts.gate_up_proj", "experts.down_proj")
    plain, merged = (
        lines(
            planned(recipe(trainable=part("trainable", "lora", merged=it, target_parameters=experts)), config_of(name))
        )
        for it in (False, True)
    )
    assert merged["frozen base"] > plain.get("frozen base", 0)
    assert min(plain["activations"], merged["activations"]) > 0


def test_checkpointing_keeps_less_and_leaves_holes_instead(model_config: Any) -> None:
    deep = type(model_config)(**{**model_config.to_dict(), "num_hidden_layers": 8})
    none, selective, full = (lines(planned(recipe(checkpointing=how), deep)) for how in ("none", "selective", "full"))
    assert none["activations"] > selective["activations"] > full["activations"]
    assert none["slack"] < selective["slack"] < full["slack"]
    sums = [by["activations"] + by["slack"] for by in (none, selective, full)]
    assert sums == sorted(sums, reverse=True)


def test_sampling_and_training_take_turns_unless_they_overlap(model_config: Any) -> None:
    turns, both = planned(recipe(), model_config), planned(recipe(max_lag=1), model_config)
    sampling, training = (sum(x.bytes for x in turns.lines if x.when == when) for when in ("sampling", "training"))
    rest = sum(line.bytes for line in turns.lines) - sampling - training
    assert turns.total == rest + max(sampling, training)
    assert both.total == rest + lines(both)["KV cache"] + training


def test_what_does_not_fit_is_refused_with_its_largest_lines_and_what_to_change(model_config: Any) -> None:
    wide = type(model_config)(
        **{**model_config.to_dict(), "hidden_size": 4096, "intermediate_size": 8192, "head_dim": 64}
    )
    plan = planned(recipe(), wide, replace(HOST, free=2 * 10**9))
    with pytest.raises(DoesNotFit) as caught:
        plan.require()
    text = str(caught.value)
    assert "2.00 GB free on this machine" in text
    assert "optimizer" in text
    assert "trainable: lora" in text
    assert str(plan.at_peak()[0]).startswith("optimizer 3.")
    assert DoesNotFit.exit_code == 11
    planned(recipe(), wide).require()


@pytest.mark.parametrize(("kind", "beside"), [("adamw", False), ("adamw_cpu", True)])
def test_states_on_the_host_are_held_against_the_hosts_memory(model_config: Any, kind: str, beside: bool) -> None:
    optimizer = part("optimizers", kind)
    config = recipe(optimizer=optimizer, checkpoint=Checkpoint(asynchronous=False))
    plan = planned(config, model_config, CARD)
    (line,) = [line for line in plan.lines if line.name == "optimizer"]
    assert (line.beside, line.bytes) == (beside, optimizer.state_bytes(PARAMETERS, 2))
    programs = lines(plan)["programs"]
    small = replace(plan, beside=replace(HOST, name="the host", free=programs + line.bytes // 2))
    assert small.within() is not beside


def test_copies_of_a_checkpoint_are_on_the_host_where_training_goes_on(model_config: Any) -> None:
    pinned = int(memory.PINNED * 14 * PARAMETERS)  # weights of bfloat16, float32 masters and two moments
    cases: list[tuple[dict[str, Any], int | None, int | None]] = [
        ({}, pinned, None),
        ({"asynchronous": True}, pinned, 14 * PARAMETERS),
        ({"asynchronous": False}, None, None),
        ({"save": "none"}, None, None),
    ]
    for options, on_a_card, on_a_host in cases:
        config = recipe(checkpoint=Checkpoint(**options))
        by_place = [lines(planned(config, model_config, where)).get("checkpoint") for where in (CARD, HOST)]
        assert by_place == [on_a_card, on_a_host], options


# Engines in processes of their own


def test_an_engine_of_its_own_takes_its_share_and_what_it_lends_is_in_it(model_config: Any) -> None:
    shared = recipe(engine=vllm(gpu_memory_utilization=0.4), sync=part("sync", "shared"))
    by = lines(planned(shared, model_config, CARD))
    assert by["engine"] == 4 * 10**10
    assert by["loading"] == BOTH
    assert by["driver"] == 2 * memory.DRIVER
    assert not {"KV cache", "weights", "engine's copy"} & set(by)
    sent = lines(planned(recipe(engine=vllm(), sync=part("sync", "broadcast")), model_config, CARD))
    assert (sent["weights"], sent["engine"]) == (BOTH, 5 * 10**10)
    on_a_host = lines(planned(shared, model_config))
    assert (on_a_host["weights"], on_a_host["engine"], on_a_host["loading"]) == (BOTH, 10**9, 2 * BOTH)


def test_two_engines_that_share_have_a_copy_each_and_one_is_the_trainers(model_config: Any) -> None:
    two = recipe(engine=vllm(replicas=2, kv_cache_gb=3.0), sync=part("sync", "shared"))
    by = lines(planned(two, model_config, CARD))
    assert (by["weights"], by["engine"], by["driver"]) == (2 * BOTH, 6 * 10**9, 3 * memory.DRIVER)
    assert "engine's copy" not in by


def test_replicas_on_other_cards_take_none_of_ours(model_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    sent = recipe(engine=vllm(replicas=2, devices=("1", "2,3")), sync=part("sync", "broadcast"))
    assert "engine" not in lines(planned(sent, model_config, CARD))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert lines(planned(sent, model_config, CARD))["engine"] == 5 * 10**10


def test_an_engine_that_sleeps_and_the_training_pass_take_turns(model_config: Any) -> None:
    awake, asleep = (
        planned(recipe(engine=vllm(sleep=depth), sync=part("sync", "broadcast")), model_config, CARD)
        for depth in (0, 2)
    )
    training = sum(line.bytes for line in asleep.lines if line.when == "training" and not line.beside)
    assert awake.total - asleep.total == training


def test_an_engine_that_runs_already_is_not_taken_from_what_is_free(model_config: Any, tmp_path: Path) -> None:
    from tandem.engines.vllm.client.process import EngineRecord
    from tandem.processes import identity

    shared = recipe(engine=vllm(), sync=part("sync", "shared"))
    assert "engine" not in lines(planned(replace(shared, engine=vllm(urls=("http://h:9",))), model_config, CARD))
    me = identity(os.getpid())
    assert me is not None
    for started, is_there in (("another", True), (me.started, False)):
        record = EngineRecord(pid=me.pid, started=started, url="", key="", log="")
        record.write(tmp_path / "engine-0.json")
        assert ("engine" in lines(planned(shared, model_config, CARD, resumed=tmp_path))) is is_there


# Several ranks


def test_a_ranks_card_holds_whole_weights_and_its_part_of_the_states(model_config: Any) -> None:
    alone, four = (lines(planned(recipe(ranks=ranks), model_config, CARD)) for ranks in (1, 4))
    assert four["optimizer"] == alone["optimizer"] // 4
    assert {**four, "optimizer": 0, "programs": 0} == {
        **alone, "optimizer": 0, "programs": 0, "gradient sums": four["gradient sums"],
    }  # fmt: skip
    on_a_host = lines(planned(recipe(ranks=2), model_config))
    assert on_a_host["weights"] == 2 * alone["weights"]
    assert on_a_host["optimizer"] == alone["optimizer"] // 2 * 2
    lora = part("trainable", "lora", rank=3)
    one, two = (lines(planned(recipe(ranks=n, trainable=lora), model_config, CARD)) for n in (1, 2))
    assert one["optimizer"] == two["optimizer"], "every rank has all of an adapter's states"


def test_a_ranks_card_holds_its_part_of_weights_that_are_cut(model_config: Any) -> None:
    cut: dict[str, Any] = {"ranks": 4, "distributed": Distributed(shard="weights"), "sync": part("sync", "shared")}
    by = lines(planned(recipe(engine=vllm(tensor_parallel_size=4, kv_cache_gb=0.5), **cut), model_config, CARD))
    assert (by["weights"], by["engine"], by["loading"]) == (BOTH // 4, 500_000_000, BOTH)
    assert by["optimizer"] == recipe().optimizer.state_bytes(PARAMETERS, 2) // 4
    assert by["gathered layers"] <= BOTH + 2 * VOCAB * HIDDEN
    near = {"engine": vllm(tensor_parallel_size=4), "reference": part("references", "start")}
    by = lines(planned(recipe(**near, **cut), model_config, CARD))
    assert by["reference"] == 4 * PARAMETERS // 4
    assert "weights" not in lines(planned(recipe(engine=vllm(tensor_parallel_size=4), **cut), model_config, CARD))


def test_gradients_are_summed_once_a_pass_where_there_is_room_and_several_rounds(model_config: Any) -> None:
    def chosen(free: int, **options: Any) -> str:
        config = recipe(**{"ranks": 2, "sampling": Sampling(max_tokens=400), **options})
        run = memory.Planner(config, model_config, replace(CARD, free=free), HOST)
        return memory.with_gradients(run, config).distributed.gradients

    few = {"micro_batch_tokens": 64}
    assert chosen(CARD.free, **few) == "local"
    assert chosen(CARD.free, micro_batch_tokens=1 << 20) == "scattered", "one micro-batch for each rank"
    assert chosen(10**6, **few) == "scattered"
    assert chosen(CARD.free, **few, ranks=None) == "auto", "nothing is summed"


# What else is asked of it


def test_the_context_is_the_smaller_of_the_models_and_the_recipes(model_config: Any) -> None:
    assert memory.context(recipe(), model_config) == CONTEXT
    assert memory.context(recipe(context=100), model_config) == 100
    assert memory.context(recipe(context=9999), model_config) == CONTEXT


def test_a_checkpoint_holds_what_is_trained_and_the_optimizers_state(model_config: Any) -> None:
    config = recipe()
    expected = PARAMETERS * 2 + config.optimizer.state_bytes(PARAMETERS, 2)
    assert memory.Planner(config, model_config).checkpoint_bytes(config) == expected
    cut = recipe(ranks=2, distributed=Distributed(shard="weights"), optimizer=AdamW8bit())
    grown = memory.Planner(cut, model_config).checkpoint_bytes(cut) - cut.optimizer.state_bytes(PARAMETERS, 2)
    assert grown == PARAMETERS * (2 + 6), "moments of cut weights are written as float32"


# The machine


def meminfo(folder: Path) -> Path:
    file = folder / "meminfo"
    file.write_text("MemTotal:       8000 kB\nMemFree:  1 kB\nMemAvailable:   6000 kB\nHugePages_Total:       0\n")
    return file


def test_without_a_container_the_machines_own_memory_counts(tmp_path: Path) -> None:
    limits = machine.host(meminfo(tmp_path), tmp_path / "none")
    assert (limits.free, limits.total) == (6000 * 1024, 8000 * 1024)


def test_a_containers_limit_counts_less_what_is_used_but_not_its_page_cache(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("4096000\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 500000\n")
    limits = machine.host(meminfo(tmp_path), tmp_path)
    assert (limits.free, limits.total) == (4096000 - 3000000 + 500000, 4096000)


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
