"""What several ranks cannot do is refused by name before anything is loaded; what a rank has, and when it replies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_policy import live_policy

from tandem.api.targets import resumed
from tandem.config.loading import digest, dump, load
from tandem.config.sections import Distributed
from tandem.distributed.placement import Placement
from tandem.engines.base import EngineRequirements
from tandem.engines.vllm.spec import Vllm
from tandem.errors import ConfigError, TornWeights, UnsupportedPair
from tandem.trainable.full import Full
from tandem.trainer.pairs import RankCounts, check_pairs, engine_devices, engines_of, ranks_of_engine
from tandem.trainer.ranks import work as rank_work
from tandem.trainer.ranks.layout import check_gpus, check_ranks
from tandem.trainer.ranks.lead import ManyRanks
from tandem.trainer.ranks.parts import RankParts
from tandem.trainer.ranks.work import RankWork
from tandem.weight_sync.broadcast import Broadcast

WEIGHTS = "distributed.shard=weights"


def refused(folder: Path, world: int, *options: str) -> str:
    recipe = folder / "recipe.yaml"
    recipe.write_text("model: m\nsteps: 3\nenv: arithmetic\n")
    config = load(recipe, [f"ranks={world}", *options]).config
    with pytest.raises(UnsupportedPair) as caught:
        check_ranks(config, world)
    return str(caught.value)


@pytest.mark.parametrize(("options", "message"), [
    ((WEIGHTS, "reference={kind: average, every: 1}"), "a reference that moves.*choose reference: start"),
    ((WEIGHTS, "optimizer=adamw_cpu"), "shard: weights and this optimizer.*choose adamw or adamw8bit"),
    ((WEIGHTS, "optimizer.precision=stochastic"), "optimizer.precision"),
    (("optimizer=adafactor",), "it updates whole tensors"),
    (("distributed.context_parallel=2", "sampling.presence_penalty=0.5"), "context_parallel and penalties"),
    (("distributed.replicas=2",), "replicas: 2 without distributed.shard: weights.*leave it out"),
    ((WEIGHTS, "distributed.replicas=3"), "replicas: 3: as many ranks have each replica.*set it to 1 or 2$"),
    (("distributed.context_parallel=3",), "3 ranks cannot share each sequence where there are 2"),
])  # fmt: skip
def test_what_ranks_cannot_do_is_refused_by_name(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    assert re.search(message, refused(tmp_path, 2, *options))


CUT = (WEIGHTS, "engine=vllm", "engine.tensor_parallel_size=2")


@pytest.mark.parametrize(("world", "options", "message"), [
    (6, (*CUT[:2], "engine.tensor_parallel_size=4"), "_size: 4: each rank writes.*_size to 1 or 2 or 3 or 6"),
    (4, (*CUT, "distributed.replicas=4"), "replicas: 4 and engine.tensor_parallel_size: 2: each replica is cut"),
    (2, (*CUT, "engine.replicas=2"), "engine.replicas or engine.devices"),
    (2, (*CUT, "trainable=lora"), "an adapter and engine.tensor_parallel_size: 2.*to 1, or choose sync: broadcast"),
])  # fmt: skip
def test_ranks_and_workers_that_cannot_share_slices_are_refused_by_name(
    tmp_path: Path, world: int, options: tuple[str, ...], message: str
) -> None:
    assert re.search(message, refused(tmp_path, world, *options))


def test_cut_weights_are_updated_with_moments_of_bytes(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\nsteps: 3\nenv: arithmetic\n")
    check_ranks(load(recipe, ["ranks=2", WEIGHTS, "optimizer=adamw8bit"]).config, 2)


def test_ranks_share_the_slices_of_engines_that_are_each_on_one_host(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\nsteps: 3\nenv: arithmetic\n")
    config = load(recipe, ["ranks=2", *CUT]).config
    check_pairs(config)
    check_ranks(config, 2)
    check_ranks(load(recipe, ["ranks=4", *CUT]).config, 4)
    check_ranks(load(recipe, ["ranks=4", *CUT, "distributed.replicas=2"]).config, 4)
    place = Placement(
        rank=0, world_size=2, local_rank=0, local_world_size=1, master_addr="a", master_port=1, launcher="slurm"
    )
    with pytest.raises(UnsupportedPair, match=r"2 on a host that has 1 of them: an engine is within one host.*states"):
        check_ranks(config, 2, place)
    check_ranks(config, 8, replace(place, world_size=8, local_world_size=4))
    four = load(recipe, [*CUT[:2], "engine.tensor_parallel_size=4"]).config
    with pytest.raises(UnsupportedPair, match=r"4 on a host that has 6 of them.*_size to 2 or 3 or 6, or choose"):
        check_ranks(four, 12, replace(place, world_size=12, local_world_size=6))
    with pytest.raises(UnsupportedPair, match="other ways need the memory that it would release"):
        check_pairs(load(recipe, ["ranks=2", *CUT, "engine.sleep=1"]).config)
    with pytest.raises(UnsupportedPair, match=r"or ranks: 2 or a multiple of it with distributed\.shard: weights"):
        check_pairs(load(recipe, ["ranks=2", *CUT[1:]]).config)


def test_a_run_of_slices_goes_on_with_another_number_of_ranks_and_workers(tmp_path: Path) -> None:
    recipe = tmp_path / "config.yaml"
    recipe.write_text("model: m\nsteps: 3\nenv: arithmetic\n")
    two = load(recipe, ["ranks=2", *CUT]).config
    alone = load(recipe, ["engine=vllm"]).config
    assert digest(two) == digest(alone)
    assert digest(load(recipe, ["ranks=2", *CUT[1:], "sync=broadcast"]).config) == digest(alone), "another layout"
    recipe.write_text(dump(two))
    four = resumed(tmp_path, ["ranks=4"])
    assert digest(four) == digest(two)
    three = resumed(tmp_path, ["ranks=3", "engine.tensor_parallel_size=3"])
    assert (three.ranks, three.engine.tensor_parallel_size, digest(three)) == (3, 3, digest(two))  # type: ignore[attr-defined]
    back = resumed(tmp_path, ["ranks=1", "distributed.shard=states", "engine.tensor_parallel_size=1"])
    assert digest(back) == digest(two)
    recipe.write_text(dump(alone))
    assert digest(resumed(tmp_path, ["ranks=2", "distributed.shard=weights", CUT[2]])) == digest(alone)


@pytest.mark.parametrize(("gpus", "devices"), [("3,5", ("3,5",)), ("5,3", ("5,3",))])
def test_workers_are_on_the_gpus_of_the_ranks_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, devices: tuple[str, ...]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\nsteps: 3\nenv: arithmetic\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cut: Any = engines_of(load(recipe, ["ranks=2", *CUT]).config, 2, 2)
    assert (cut.replicas, cut.devices, cut.tensor_parallel_size) == (1, devices, 2)
    pairs: Any = engines_of(load(recipe, ["ranks=2", "engine=vllm"]).config, 2, 2)
    assert (pairs.replicas, ",".join(pairs.devices)) == (2, gpus)


def test_engines_apart_are_on_the_gpus_after_those_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\nsteps: 3\nenv: arithmetic\nsync: broadcast\nranks: 2\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    def devices(*engine: str) -> Any:
        config = load(recipe, [f"engine={{kind: vllm, {', '.join(engine)}}}"]).config
        check_gpus(config, RankCounts(world=2, local=2))
        return engines_of(config, 2, 2).devices

    assert devices("replicas: 2") == ("5", "4")
    assert devices("tensor_parallel_size: 2") == ("5,4",)
    assert devices("devices: ['7,6']", "tensor_parallel_size: 2") == ("7,6",), "beside the ranks, if so told"
    assert devices("urls: ['http://h:1']") == ()
    with pytest.raises(UnsupportedPair, match=r"the engines need 6 GPUs, and it has 4; lower ranks"):
        devices("replicas: 2", "tensor_parallel_size: 2")


def test_each_engine_is_on_the_gpus_of_its_neighbouring_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\nsteps: 3\nenv: arithmetic\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = load(recipe, ["ranks=4", *CUT]).config
    cut: Any = engines_of(config, 4, 4)
    assert (cut.replicas, cut.devices, cut.tensor_parallel_size) == (2, ("7,6", "5,4"), 2)
    assert (ranks_of_engine(config), engine_devices(2, 2)) == (2, "5,4")
    assert ranks_of_engine(load(recipe, ["ranks=4", "engine=vllm"]).config) == 1
    assert ranks_of_engine(load(recipe, ["ranks=4", WEIGHTS]).config) == 1


def test_of_ranks_that_share_an_engine_on_another_host_the_first_has_it(tmp_path: Path) -> None:
    replies: list[list[Any]] = []
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\nsteps: 3\nenv: arithmetic\n")

    class Commands:
        world = 4

        async def execute(self, command: str, body: Callable[[int], Any], mine: Any) -> tuple[None, list[Any]]:
            await mine
            replies.append([body(rank) for rank in (1, 2, 3)])
            return None, [None, {"url": "http://b", "key": "k", "reattached": False}, None]

    config = load(recipe, ["ranks=4", *CUT]).config
    world = ManyRanks(config, SimpleNamespace(), Commands(), SimpleNamespace())  # type: ignore[arg-type]
    requirements = EngineRequirements(model="m", dtype="float32")
    (engine,) = asyncio.run(world.start_engines(requirements))
    assert (engine.url, engine.key) == ("http://b", "k")
    assert asyncio.run(world.restart_engine(1)) == engine
    assert replies[1] == [None, {}, None], "the second engine's first rank is rank 2"


def test_engines_that_other_hosts_reach_have_keys(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\nsteps: 3\nenv: arithmetic\n")
    config = load(recipe, ["engine=vllm", "engine.require_api_key=false"]).config
    place = Placement(
        rank=0, world_size=2, local_rank=0, local_world_size=1, master_addr="a", master_port=1, launcher="slurm"
    )
    with pytest.raises(UnsupportedPair, match=r"engine\.require_api_key: false on several hosts"):
        check_ranks(config, 2, place)
    check_ranks(config, 2, replace(place, local_world_size=2))


def test_a_division_of_work_among_ranks_that_nothing_starts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\nsteps: 3\nenv: arithmetic\n")
    with pytest.raises(ConfigError, match="ranks is not set and no launcher started several processes"):
        RankCounts.of(load(recipe, [WEIGHTS]).config)
    numbers = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**numbers, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert RankCounts.of(load(recipe, [WEIGHTS]).config).world == 2


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: m\nsteps: 3\nenv: arithmetic\n")
    with pytest.raises(UnsupportedPair, match=r"ranks: 3 of this machine need as many GPUs, and it has 2"):
        check_gpus(load(recipe, ["ranks=3"]).config, RankCounts(world=3, local=3))
    check_gpus(load(recipe, ["ranks=2"]).config, RankCounts(world=2, local=2))


def rank_work_of(done: list[str]) -> RankWork:
    """Work that only says what it does."""

    async def compute(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    stepper = SimpleNamespace(
        begin_pass=lambda num_rounds: done.append(f"{num_rounds} rounds"),
        flush=lambda: done.append("stood in"),
        end_pass=lambda: done.append("summed"),
        step=lambda lr, most: done.append("apply"),
    )
    policy: Any = SimpleNamespace(compute=compute, device="cuda:1", model=torch.nn.Module())
    nothing: Any = None
    objective: Any = SimpleNamespace(reference=None)
    return RankWork(
        policy=policy, objective=objective, stepper=stepper, sampling=nothing, fold=lambda: done.append("fold")  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_follower_replies_once_its_weights_are_written_and_not_only_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(rank_work, "finish", lambda device: done.append(f"finish {device}"))
    handlers = rank_work.handlers(rank_work_of(done))
    for command, body in (("apply", [0.1, 1.0]), ("fold", [])):
        asyncio.run(handlers[command](body))  # type: ignore[arg-type]
    assert done == ["apply", "finish cuda:1", "fold", "finish cuda:1"]


def test_a_pass_ends_before_the_engine_is_paused_for_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks have added up is summed while the engine samples on, and queued before the host is said to be idle."""
    order: list[str] = []
    monkeypatch.setattr(rank_work, "micro_of", lambda plain, device, is_shared: plain)
    monkeypatch.setattr(RankWork, "micro", lambda self, micro, old: order.append(micro) or ({}, torch.zeros(1), None))
    monkeypatch.setattr(RankWork, "settle", lambda self, passes: ([], []))
    work = rank_work_of(order)
    work.take(["first", None])  # type: ignore[list-item]
    asyncio.run(work.rounds(lambda: order.append("queued")))
    assert order == ["2 rounds", "first", "stood in", "summed", "queued"]


def test_a_rank_that_holds_other_weights_than_the_lead_is_named_by_the_next_publish(tiny_model: Path) -> None:
    """Where no engine shares its weights, and so none would tell."""

    async def others(command: str, body: Any, here: Any) -> tuple[Any, list[Any]]:
        assert command == "checksums"
        sums = await here
        return sums, [sums, {**sums, "model.norm.weight": 0}]

    with live_policy(tiny_model) as policy:
        config = SimpleNamespace(distributed=Distributed(), engine=Vllm(), sync=Broadcast(), trainable=Full(), ranks=3)
        ranks: Any = SimpleNamespace(execute=others, world=3)
        world = ManyRanks(config, policy, ranks, RankParts(group=None, rendezvous=None))  # type: ignore[arg-type]
        with pytest.raises(TornWeights, match=r"1 of \d+ trained tensors differ between the trainer and rank 2.*norm"):
            asyncio.run(world.trained().checksums())
