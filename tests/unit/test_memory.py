"""The memory plan: counted without weights, held against what the machine has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem import machine
from tandem.config import registry as resolve
from tandem.config.loading import RunConfig
from tandem.config.sections import Checkpoint, Distributed, GradingOptions, LagControlOptions
from tandem.envs.arithmetic import Arithmetic
from tandem.errors import DoesNotFit
from tandem.machine import Machine
from tandem.trainer import memory_plan as memory
from tandem.trainer.memory_plan import plan as plan_module
from tandem.trainer.memory_plan import with_gradients
from tandem.trainer.memory_plan.fitting import ROOM

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
    return resolve.find("trainable", "lora")(rank=rank)


def attention_and_feed_forward() -> list[tuple[int, int]]:
    """Inputs and outputs of each linear layer."""
    attention = [(HIDDEN, HIDDEN), (HIDDEN, KEYS * HEAD), (HIDDEN, KEYS * HEAD), (HIDDEN, HIDDEN)]
    return [*attention, (HIDDEN, FEED), (HIDDEN, FEED), (FEED, HIDDEN)]


PARAMETERS = VOCAB * HIDDEN + HIDDEN + LAYERS * (2 * HIDDEN + sum(a * b for a, b in attention_and_feed_forward()))


GRADERS = memory.GRADER * GradingOptions().processes(RunConfig.groups_per_step)
"""Of one environment."""
TRAINING = ("activations", "logprobs", "gradients", "slack")


def planned(recipe: RunConfig, model_config: Any, *where: Any, **how: Any) -> memory.MemoryPlan:
    return memory.planner(recipe, model_config, *where, **how).plan(recipe)


def lines(plan: memory.MemoryPlan) -> dict[str, int]:
    return {line.name: line.bytes for line in plan.lines}


def test_parameters_are_counted_once_where_tied_and_without_weights(model_config: Any) -> None:
    counts = memory.planner(config(), model_config).modelled.counts
    assert (counts.parameters, counts.trainable, counts.largest) == (PARAMETERS, PARAMETERS, VOCAB * HIDDEN)


def test_an_adapter_trains_rank_times_in_plus_out_of_each_linear_layer(model_config: Any) -> None:
    adapter = 3 * LAYERS * sum(a + b for a, b in attention_and_feed_forward())
    counts = memory.planner(config(trainable=lora(3)), model_config).modelled.counts
    assert counts.trainable == adapter
    assert counts.parameters == PARAMETERS + adapter
    assert counts.largest == 3 * FEED


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_each_line_is_what_its_reason_says(model_config: Any, dtype: Any, width: int) -> None:
    recipe = config(dtype=dtype, micro_batch_tokens=512)
    recipe = replace(
        recipe, sampling=replace(recipe.sampling, max_tokens=40), engine=replace(recipe.engine, max_rows=16)
    )
    by = lines(planned(recipe, model_config, LARGE, prompt_tokens=60))
    assert by["weights"] == PARAMETERS * width
    assert by["optimizer"] == recipe.optimizer.state_bytes(PARAMETERS, width)
    assert by["KV cache"] == 16 * 150 * 2 * LAYERS * KEYS * HEAD * width
    assert by["logits"] == 16 * VOCAB * 12
    assert by["programs"] == memory.LIBRARIES + GRADERS
    assert by["slack"] == int(memory.plan.SLACK * (by["activations"] + by["logprobs"] + by["gradients"]))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["selective", "full"])
def test_what_is_made_again_leaves_holes_too(model_config: Any, how: Any) -> None:
    kept, less = (lines(planned(config(checkpointing=each), model_config, LARGE)) for each in ("none", how))
    held, holds = (sum(by[name] for name in TRAINING[:-1]) for by in (kept, less))
    assert holds < held
    assert less["slack"] == int(memory.plan.SLACK * holds + memory.plan.REMADE * (held - holds)) > kept["slack"]
    assert holds + less["slack"] < held + kept["slack"]


@pytest.mark.slow
def test_sampling_and_training_take_turns_unless_they_overlap(model_config: Any) -> None:
    turns = planned(config(), model_config, LARGE)
    auto = config(max_lag="auto", lag_control=LagControlOptions(max_lag=1))
    assert planned(auto, model_config, LARGE) == planned(config(max_lag=1), model_config, LARGE)
    both = planned(config(max_lag=1), model_config, LARGE)
    by = lines(turns)
    always = by["programs"] + by["weights"] + by["optimizer"]
    sampling, training = by["KV cache"] + by["logits"], sum(by[name] for name in TRAINING)
    assert turns.total == always + max(sampling, training)
    assert both.total == always + sampling + training


@pytest.mark.slow
def test_an_adapter_needs_less_than_full_training(model_config: Any) -> None:
    full, adapter = (
        planned(config(trainable=trainable), model_config, LARGE) for trainable in (config().trainable, lora(2))
    )
    assert lines(adapter)["optimizer"] < lines(full)["optimizer"] / 10
    assert adapter.total < full.total


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_table_and_what_to_change(model_config: Any) -> None:
    wide = type(model_config)(
        **{**model_config.to_dict(), "hidden_size": 4096, "intermediate_size": 8192, "head_dim": 64}
    )
    small = replace(LARGE, free=2 * 10**9, total=4 * 10**9)
    plan = planned(config(), wide, small)
    assert not plan.fits
    with pytest.raises(DoesNotFit) as caught:
        plan.require()
    message = str(caught.value)
    assert "and this machine has 2.00 GB free" in message
    for name in lines(plan):
        assert f"\n  {name} " in message
    assert "to make it fit: train an adapter (trainable: lora)" in message
    assert DoesNotFit.exit_code == 11
    planned(config(), wide, LARGE).require()


@pytest.mark.slow
def test_an_accelerator_holds_no_programs(model_config: Any) -> None:
    card = replace(LARGE, is_host=False)
    plan = planned(config(), model_config, card, LARGE)
    by = lines(plan)
    assert by["driver"] == memory.DRIVER
    assert [line.name for line in plan.lines if line.beside] == ["programs", "checkpoint"]
    assert by["programs"] == memory.LIBRARIES + GRADERS
    assert plan.total_beside == by["programs"] + by["checkpoint"]
    assert plan.total == sum(by[name] for name in ("driver", "weights", "optimizer")) + max(
        by["KV cache"] + by["logits"], sum(by[name] for name in TRAINING[:-1])
    )
    assert "slack" not in by


# Engines in processes of their own


CARD = Machine(name="a card", free=9 * 10**10, total=10**11, is_host=False)
BOTH = 2 * PARAMETERS  # bytes of the weights in bfloat16


def vllm(**options: Any) -> Any:
    return resolve.find("engines", "vllm")(**options)


def sync(kind: str, **options: Any) -> Any:
    return resolve.find("sync", kind)(**options)


def apart(kind: str, engine: Any = None, **options: Any) -> RunConfig:
    return config(engine=engine or vllm(), sync=sync(kind), **options)


def test_an_engine_of_its_own_takes_its_share_of_a_card_and_what_it_lends_is_in_it(model_config: Any) -> None:
    plan = planned(apart("shared", vllm(gpu_memory_utilization=0.4)), model_config, CARD, LARGE)
    by = lines(plan)
    assert by["engine"] == 4 * 10**10
    assert by["weights"] == 0
    assert by["driver"] == 2 * memory.DRIVER
    assert by["programs"] == memory.LIBRARIES + GRADERS + memory.ENGINE
    assert not {"KV cache", "logits", "engine's copy", "adapter"} & set(by)
    assert plan.total == by["driver"] + by["engine"] + by["optimizer"] + sum(by[name] for name in TRAINING[:-1])
    assert {line.name: line.bytes for line in plan.lines if line.beside} == {
        "programs": by["programs"],
        "loading": BOTH,  # until the trainer takes the engine's instead
        "checkpoint": by["checkpoint"],
    }


@pytest.mark.parametrize(
    ("options", "on_a_card", "on_a_host"),
    [
        ({}, int(memory.PINNED * 14 * PARAMETERS), None),
        ({"asynchronous": True}, int(memory.PINNED * 14 * PARAMETERS), 14 * PARAMETERS),
        ({"save": "weights"}, int(memory.PINNED * 2 * PARAMETERS), None),
        ({"asynchronous": False}, None, None),
        ({"save": "none"}, None, None),
    ],
)
def test_the_copy_of_what_is_saved_is_on_the_host(
    model_config: Any, options: dict[str, Any], on_a_card: int | None, on_a_host: int | None
) -> None:
    """Weights of bfloat16, float32 masters and two moments."""
    saving = config(checkpoint=Checkpoint(**options))
    assert lines(planned(saving, model_config, CARD, LARGE)).get("checkpoint") == on_a_card
    assert lines(planned(saving, model_config, LARGE)).get("checkpoint") == on_a_host


@pytest.mark.slow
def test_of_a_share_the_trainers_own_copy_is_no_part(model_config: Any) -> None:
    by = lines(planned(apart("broadcast"), model_config, CARD, LARGE))
    assert by["weights"] == BOTH
    assert by["engine"] == 5 * 10**10
    assert by["buckets"] == 2 * 2 * BOTH  # of so small a model all of it, twice at each end
    gloo = planned(config(engine=vllm(), sync=sync("broadcast", backend="gloo")), model_config, CARD, LARGE)
    assert [line.name for line in gloo.lines if line.beside] == ["programs", "buckets", "checkpoint"]
    assert "loading" not in by


@pytest.mark.slow
def test_a_lent_adapter_is_the_trainers(model_config: Any) -> None:
    recipe = apart("shared", trainable=lora(2))
    trained = memory.planner(recipe, model_config).modelled.counts.trainable
    by = lines(planned(recipe, model_config, CARD, LARGE))
    assert by["weights"] == 0
    assert by["adapter"] == 2 * trained


@pytest.mark.slow
@pytest.mark.parametrize(("base_on", "beside"), [("device", False), ("host", True)])
def test_what_merged_keeps_is_counted_where_it_is(model_config: Any, base_on: str, beside: bool) -> None:
    trainable = resolve.find("trainable", "lora")(rank=2, merged=True, base_on=base_on)
    plan = planned(apart("shared", trainable=trainable), model_config, CARD, LARGE)
    (kept,) = [line for line in plan.lines if line.name == "frozen base"]
    assert kept.bytes == 2 * LAYERS * sum(a * b for a, b in attention_and_feed_forward())
    assert kept.beside is beside
    on_a_host = planned(apart("shared", trainable=trainable), model_config, LARGE)
    assert [line.beside for line in on_a_host.lines if line.name == "frozen base"] == [False]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "adamw_cpu"])
def test_states_on_the_host_are_held_against_the_hosts_memory(model_config: Any, kind: str) -> None:
    optimizer, waits = resolve.find("optimizers", kind)(), Checkpoint(asynchronous=False)
    plan = planned(config(optimizer=optimizer, checkpoint=waits), model_config, CARD, LARGE)
    states = optimizer.state_bytes(PARAMETERS, 2)
    assert [line.bytes for line in plan.lines if line.name == "optimizer" and line.beside] == (
        [states] if kind == "adamw_cpu" else []
    )
    little = replace(LARGE, name="the host", free=lines(plan)["programs"] + states // 2)
    small = planned(config(optimizer=optimizer, checkpoint=waits), model_config, CARD, little)
    assert small.fits is (kind == "adamw")
    if not small.fits:
        with pytest.raises(DoesNotFit, match="and the host has"):
            small.require()


@pytest.mark.slow
def test_on_a_host_lent_weights_are_there_once_but_for_the_start(model_config: Any) -> None:
    plan = planned(apart("shared"), model_config, LARGE)
    by = lines(plan)
    assert by["weights"] == BOTH
    assert by["engine"] == 10**9
    assert by["loading"] == 2 * BOTH
    always = by["programs"] + by["weights"] + by["engine"]
    assert plan.total == always + max(by["loading"], by["optimizer"] + sum(by[name] for name in TRAINING))
    assert plan.beside is None
    heavy = replace(plan, lines=(*plan.lines, memory.MemoryLine(name="more", bytes=10**9, why="", when="starting")))
    assert heavy.total == always + by["loading"] + 10**9


@pytest.mark.slow
def test_each_replica_has_a_copy_and_each_slice_a_cache(model_config: Any) -> None:
    engine = vllm(replicas=2, tensor_parallel_size=3, kv_cache_gb=0.5)
    by = lines(planned(apart("broadcast", engine), model_config, LARGE))
    assert by["engine's copy"] == 2 * BOTH
    assert by["engine"] == 6 * 5 * 10**8
    assert by["programs"] == memory.LIBRARIES + GRADERS + 2 * memory.ENGINE
    assert by["buckets"] == 2 * 7 * BOTH
    on_a_card = lines(planned(apart("broadcast", engine), model_config, CARD, LARGE))
    assert on_a_card["engine"] == 2 * 5 * 10**8
    assert on_a_card["engine's copy"] == 2 * (BOTH // 3)


@pytest.mark.slow
def test_replicas_on_other_cards_take_none_of_ours(model_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    engine = vllm(replicas=2, devices=("1", "2,3"))
    plan = planned(apart("broadcast", engine), model_config, CARD, LARGE)
    assert (lines(plan)["engine"], lines(plan)["driver"]) == (0, memory.DRIVER)
    assert lines(plan)["programs"] == memory.LIBRARIES + GRADERS + 2 * memory.ENGINE
    lends = vllm(devices=("1",))  # the trainer's weights are then on that card too
    assert lines(planned(apart("shared", lends), model_config, CARD, LARGE))["engine"] == 5 * 10**10
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert lines(planned(apart("broadcast", engine), model_config, CARD, LARGE))["engine"] == 5 * 10**10


@pytest.mark.slow
@pytest.mark.parametrize("cache", [0.0, 7.0])
def test_an_engine_that_sleeps_and_the_training_pass_take_turns_on_a_card(model_config: Any, cache: float) -> None:
    awake, light, deep = (
        planned(apart("broadcast", vllm(sleep=depth, kv_cache_gb=cache)), model_config, CARD, LARGE)
        for depth in (0, 1, 2)
    )
    theirs = sum(bytes for name, bytes in lines(awake).items() if name.startswith("engine"))
    parts = ("training", "updating")
    step = max(sum(x.bytes for x in deep.lines if x.when == when and not x.beside) for when in parts)
    assert awake.total - deep.total == min(theirs, step)
    assert light.total == deep.total
    assert lines(light)["engine asleep"] == BOTH
    assert light.total_beside == deep.total_beside + BOTH


@pytest.mark.slow
def test_an_engine_that_runs_already_is_not_taken_from_what_is_free(model_config: Any, tmp_path: Path) -> None:
    import os

    from tandem.engines.vllm.client.process import EngineRecord
    from tandem.processes import identity

    here = apart("shared", vllm(urls=("http://127.0.0.1:9",)))
    assert lines(planned(here, model_config, CARD, LARGE))["engine"] == 0
    me = identity(os.getpid())
    assert me is not None
    record = EngineRecord(pid=me.pid, started="another", url="", key="", log="")
    record.write(tmp_path / "engine-0.json")
    assert lines(planned(apart("shared"), model_config, CARD, LARGE, resumed=tmp_path))["engine"] == 5 * 10**10
    replace(record, started=me.started).write(tmp_path / "engine-0.json")
    by = lines(planned(apart("shared"), model_config, CARD, LARGE, resumed=tmp_path))
    assert (by["engine"], by["weights"], by["driver"]) == (0, 0, memory.DRIVER)
    assert by["programs"] == memory.LIBRARIES + GRADERS


@pytest.mark.slow
def test_a_share_that_leaves_too_little_is_refused_with_what_to_lower(model_config: Any) -> None:
    with pytest.raises(DoesNotFit) as caught:
        planned(apart("shared", vllm(gpu_memory_utilization=0.95)), model_config, CARD, LARGE).require()
    assert "to make it fit: lower engine.gpu_memory_utilization" in str(caught.value)
    assert "and a card has 90.00 GB free" in str(caught.value)


# What else is asked of it


def test_the_context_is_the_smaller_of_the_models_and_the_recipes(model_config: Any) -> None:
    assert memory.context(config(), model_config) == CONTEXT
    assert memory.context(config(context=100), model_config) == 100
    assert memory.context(config(context=9999), model_config) == CONTEXT


def test_a_checkpoint_holds_what_is_trained_and_the_optimizers_state(model_config: Any) -> None:
    expected = PARAMETERS * 2 + config().optimizer.state_bytes(PARAMETERS, 2)
    recipe, adapter = config(), config(trainable=lora(2))
    assert memory.planner(recipe, model_config).checkpoint_bytes(recipe) == expected
    assert memory.planner(adapter, model_config).checkpoint_bytes(adapter) < expected / 10


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


# Several ranks


@pytest.mark.slow
def test_a_ranks_card_holds_whole_weights_and_its_part_of_the_states(model_config: Any) -> None:
    card, host = replace(LARGE, is_host=False), LARGE
    alone, four = (lines(planned(config(ranks=ranks), model_config, card, host)) for ranks in (1, 4))
    assert four["weights"] == alone["weights"]
    assert four["optimizer"] == alone["optimizer"] // 4
    assert four.pop("gradient buckets") == 2 * 2 * (1 << 24) * 4
    assert {**four, "optimizer": 0} == {**alone, "optimizer": 0}
    summed = config(ranks=4, distributed=Distributed(gradients="local"))
    local = lines(planned(summed, model_config, card, host))
    assert local.pop("gradient sums") == 4 * (PARAMETERS + 2 * VOCAB * HIDDEN)
    assert local == four


@pytest.mark.slow
def test_gradients_are_summed_once_a_pass_where_there_is_room_and_several_rounds(
    model_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(free: int, **options: Any) -> str:
        card = replace(LARGE, is_host=False, free=free)
        monkeypatch.setattr(plan_module, "accelerator", lambda: card)
        own = config(**{"ranks": 2, **options})
        return with_gradients(memory.planner(own, model_config), own).distributed.gradients

    few = {"micro_batch_tokens": 64}
    assert chosen(LARGE.free, **few) == "local"
    assert chosen(LARGE.free, micro_batch_tokens=1 << 20) == "scattered", "one micro-batch for each rank"
    assert chosen(1_000_000, **few) == "scattered"
    assert chosen(LARGE.free, **few, distributed=Distributed(gradients="scattered")) == "scattered"
    assert chosen(LARGE.free, **few, ranks=None) == "auto", "nothing is summed"
    cut = {**few, "distributed": Distributed(shard="weights")}
    assert chosen(LARGE.free, **cut) == "local"
    assert chosen(LARGE.free, **{**cut, "micro_batch_tokens": 1 << 20}) == "scattered"
    assert chosen(1_000_000, **cut) == "scattered"
    scattered = Distributed(shard="weights", gradients="scattered")
    assert chosen(LARGE.free, **few, distributed=scattered) == "scattered"


@pytest.mark.slow
def test_cut_weights_have_local_sums_where_there_is_room_for_whole_float32_gradients(
    model_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(free: int, gradients: str) -> Any:
        card = replace(LARGE, is_host=False, free=free)
        monkeypatch.setattr(plan_module, "accelerator", lambda: card)
        divided = Distributed(shard="weights", gradients=gradients)  # type: ignore[arg-type]
        engine = vllm(tensor_parallel_size=2, kv_cache_gb=0.5)
        own = apart("shared", engine, ranks=2, micro_batch_tokens=64, distributed=divided)
        planner = memory.planner(own, model_config)
        return planner.plan(own), with_gradients(planner, own).distributed.gradients

    (local, _), (scattered, _) = plan(LARGE.free, "local"), plan(LARGE.free, "scattered")
    assert lines(local) == {**lines(scattered), "gradient sums": 4 * PARAMETERS}
    assert scattered.total < local.total <= scattered.total + 4 * PARAMETERS
    assert plan(int(local.total / ROOM) - 1000, "auto")[1] == "scattered"
    assert plan(int(local.total / ROOM) + 1000, "auto")[1] == "local"


@pytest.mark.slow
def test_a_ranks_card_holds_its_part_of_weights_that_are_cut(model_config: Any) -> None:
    """With an engine of as many workers no card holds whole weights; the host does, at the start and for a save."""
    card = replace(LARGE, is_host=False)
    workers = vllm(tensor_parallel_size=4, kv_cache_gb=0.5)
    cut = {"ranks": 4, "distributed": Distributed(shard="weights"), "dtype": "bfloat16"}
    plan = planned(apart("shared", workers, **cut), model_config, card, LARGE)
    by, alone = lines(plan), lines(planned(config(dtype="bfloat16"), model_config, card, LARGE))
    assert by["weights"] == 2 * PARAMETERS // 4
    assert by["engine"] == 500_000_000
    assert by["optimizer"] == alone["optimizer"] // 4
    outside = VOCAB * HIDDEN + HIDDEN
    layer = (PARAMETERS - outside) // LAYERS
    assert by["gathered layers"] == 2 * (2 * layer + outside) + 4 * (layer + outside)
    summed = {**cut, "distributed": Distributed(shard="weights", gradients="local")}
    local = lines(planned(apart("shared", workers, **summed), model_config, card, LARGE))
    assert local["gathered layers"] == 2 * PARAMETERS + 4 * (layer + outside), "a pass gathers all weights once"
    assert local["gradient sums"] == 4 * PARAMETERS
    assert by["loading"] == 2 * PARAMETERS
    assert by["saving"] == 2 * PARAMETERS
    assert not by.keys() & {"shards", "gradient buckets"}
    assert {line.name for line in plan.lines if line.beside} >= {"loading", "saving"}
    embedded = lines(planned(config(**cut), model_config, card, LARGE))
    assert embedded["weights"] == alone["weights"], "the lead's, for its engine"
    float32 = lines(planned(apart("shared", workers, **{**cut, "dtype": "float32"}), model_config, card, LARGE))
    assert float32["shards"] == float32["weights"] == 4 * PARAMETERS // 4
    shared = lines(planned(apart("shared", vllm(tensor_parallel_size=4), **cut), model_config, card, LARGE))
    assert shared["weights"] == 0, "part of the share that the engine fills"


@pytest.mark.slow
def test_ranks_that_share_several_engines_divide_states_by_the_ranks_of_a_replica(model_config: Any) -> None:
    """Four ranks with two engines of two workers: a card has what one of two ranks has, a host all four ranks'.

    So it is with two replicas; with one the states are cut among all four.
    """
    card = replace(LARGE, is_host=False)
    cut: dict[str, Any] = {"distributed": Distributed(shard="weights"), "dtype": "bfloat16"}
    workers = vllm(tensor_parallel_size=2, kv_cache_gb=0.5)
    one, two = (lines(planned(apart("shared", workers, ranks=n, **cut), model_config, card, LARGE)) for n in (2, 4))
    assert one["weights"] == two["weights"] == 2 * PARAMETERS // 2
    assert one["optimizer"] == 2 * two["optimizer"]
    cut["distributed"] = Distributed(shard="weights", replicas=2)
    replicas = {2: {**cut, "distributed": Distributed(shard="weights")}, 4: cut}
    two, four = (planned(apart("shared", workers, ranks=n, **replicas[n]), model_config, card, LARGE) for n in (2, 4))
    on_card = [{line.name: line.bytes for line in plan.lines if not line.beside} for plan in (two, four)]
    assert on_card[0] == on_card[1]
    assert on_card[1]["weights"] == 2 * PARAMETERS // 2
    two, four = (planned(apart("shared", workers, ranks=n, **replicas[n]), model_config, LARGE) for n in (2, 4))
    one, both = lines(two), lines(four)
    assert both["weights"] == 2 * one["weights"] == 2 * (2 * PARAMETERS)
    assert both["optimizer"] == 2 * one["optimizer"]
    assert both["engine"] == 2 * one["engine"] == 4 * 500_000_000
    assert (one["loading"], both["loading"]) == (2 * 2 * PARAMETERS, 3 * 2 * PARAMETERS)
    assert both["programs"] > one["programs"]


@pytest.mark.slow
def test_ranks_that_share_a_gpu_are_all_counted_on_it(model_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    card = replace(LARGE, is_host=False)
    apart, together = (
        lines(planned(config(ranks=2, distributed=Distributed(share_gpus=shares)), model_config, card, LARGE))
        for shares in (False, True)
    )
    doubled = {"weights", "optimizer", "activations", "logprobs", "gradients", "update", "driver", "gradient buckets"}
    for name, amount in apart.items():
        assert together[name] == amount * (2 if name in doubled else 1), name
    assert doubled - {"update"} <= apart.keys()


@pytest.mark.slow
def test_ranks_of_one_host_share_its_memory(model_config: Any) -> None:
    alone, two = (lines(planned(config(ranks=ranks), model_config, LARGE)) for ranks in (1, 2))
    assert two["weights"] == 2 * alone["weights"]
    assert two["activations"] == 2 * alone["activations"]
    assert two["optimizer"] == alone["optimizer"] // 2 * 2
    assert two["KV cache"] == alone["KV cache"]  # the lead alone samples


@pytest.mark.slow
def test_every_rank_has_all_of_an_adapters_states(model_config: Any) -> None:
    card = replace(LARGE, is_host=False)
    alone, two = (lines(planned(config(ranks=ranks, trainable=lora(3)), model_config, card, LARGE)) for ranks in (1, 2))
    assert two["optimizer"] == alone["optimizer"]
