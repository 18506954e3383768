"""What ``memory: fit`` chooses, against a search through everything it may choose from."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiers import long_but

from tandem.config import registry as resolve
from tandem.config.loading import RunConfig, load
from tandem.config.sections import Distributed
from tandem.envs.arithmetic import Arithmetic
from tandem.errors import ConfigError, DoesNotFit
from tandem.machine import Machine
from tandem.trainer import memory_plan as memory
from tandem.trainer.memory_plan import fitting
from tandem.trainer.memory_plan.fitting import CHECKPOINTING, ROOM, budgets
from tandem.types import Sampling

pytestmark = pytest.mark.slow

HOST = Machine(name="this machine", free=10**12, total=10**13, is_host=True)
CARD = Machine(name="a card", free=10**12, total=10**13, is_host=False)
NARROW = {"gradients": "bfloat16"}
OPTIMIZERS: tuple[tuple[str, dict[str, str]], ...] = (
    ("adamw", {"precision": "masters"}),
    ("adamw8bit", {}),
    ("adamw8bit", NARROW),
    ("adamw_cpu", {}),
)


@pytest.fixture(scope="module")
def model_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip


def recipe(**options: Any) -> RunConfig:
    engine = resolve.find("engines", "embedded")(max_rows=1)
    defaults = {"model": "m", "steps": 1, "env": Arithmetic(), "memory": "fit", "sampling": Sampling(max_tokens=200)}
    return RunConfig(**(defaults | {"groups_per_step": 2, "group_size": 2, "engine": engine} | options))


@pytest.fixture(scope="module")
def planners(model_config: Any) -> dict[bool, memory.Planner]:
    """By whether it is a host's; made once, since they remember what they ran."""
    own = recipe()
    return {m.is_host: memory.planner(own, model_config, m, HOST, prompt_tokens=100) for m in (HOST, CARD)}


def searched(planner: memory.Planner, config: RunConfig, set_options: Collection[str]) -> tuple[Any, ...] | None:
    """The first that fits of everything, by going through all of it."""
    ways = CHECKPOINTING if "checkpointing" not in set_options else (config.checkpointing,)
    kinds = [k for k in OPTIMIZERS if k[0] != "adamw_cpu" or not planner.machine.is_host]
    for share, (kind, options), how in itertools.product((ROOM, 1.0), kinds, ways):
        optimizer = resolve.find("optimizers", kind)(lr=config.optimizer.lr, **options)
        for size in sorted(budgets(planner, config, set_options), reverse=True):
            candidate = replace(config, optimizer=optimizer, checkpointing=how, micro_batch_tokens=size)
            plan = planner.plan(candidate)
            fits = plan.total <= share * plan.machine.free
            if fits and (plan.beside is None or plan.total_beside <= share * plan.beside.free):
                return chosen(candidate)
    return None


def chosen(config: RunConfig) -> tuple[Any, ...]:
    options = [getattr(config.optimizer, name, "") for name in ("precision", "gradients")]
    kind = resolve.kind_of("optimizers", config.optimizer)
    return kind, *options, config.checkpointing, config.micro_batch_tokens


SHARES = (1.3, 1.05, 0.98, 0.95, 0.92, 0.9, 0.88, 0.85, 0.82, 0.8, 0.75, 0.7, 0.6)
"""Memory that there is, of what a step in one micro-batch takes."""


@pytest.mark.parametrize("on_host", long_but([True, False], False))
def test_it_chooses_what_a_search_through_everything_finds(planners: Any, on_host: bool, long: bool) -> None:
    planner, own = planners[on_host], recipe()
    most = planner.plan(replace(own, micro_batch_tokens=planner.step_tokens(own))).total
    seen = set()
    for share in SHARES[:: 1 if long else 2]:
        little = replace(planner, machine=replace(planner.machine, free=int(share * most)))
        expected = searched(little, own, ())
        if expected is None:
            with pytest.raises(DoesNotFit):
                memory.fit(little, own, ())
        else:
            fitted = memory.fit(little, own, ())
            assert chosen(fitted.config) == expected
            assert fitted.plan.fits
            assert len(fitted.messages) == 3
        seen.add(expected and expected[:4])
    assert len(seen) > 3, seen


def test_a_rank_that_shares_sequences_computes_a_part_of_them(planners: Any) -> None:
    planner, own = planners[False], recipe(micro_batch_tokens=1 << 20, sampling=Sampling(max_tokens=1200))
    shared = replace(own, ranks=2, distributed=Distributed(context_parallel=2))
    whole, part = planner.step_tokens(own), planner.step_tokens(shared)
    assert whole <= 2 * part <= whole + 1
    assert budgets(planner, shared, ())[-1] == part
    assert budgets(planner, shared, ())[0] < sum(planner.longest(own)), "half of a sequence"
    plans = planner.plan(own), planner.plan(shared)
    of_whole, of_part = (next(line.bytes for line in plan.lines if line.name == "activations") for plan in plans)
    assert 0.45 < of_part / of_whole < 0.55


def with_free(planner: memory.Planner, free: int) -> memory.Planner:
    return replace(planner, machine=replace(planner.machine, free=free))


def test_with_room_enough_a_step_is_one_micro_batch_and_nothing_else_changes(planners: Any) -> None:
    own = recipe()
    fitted = memory.fit(planners[True], own, ())
    whole = 2 * (100 + 2 * 199)
    assert fitted.config == replace(own, memory="check", micro_batch_tokens=whole)
    assert fitted.messages == (
        f"micro_batch_tokens: {whole}, a whole step of the longest answers",
        "checkpointing: none, there is room for all activations",
        "optimizer: adamw (precision: masters), as the recipe has it",
    )


def test_what_the_recipe_sets_is_a_bound_or_kept(planners: Any) -> None:
    large = {"groups_per_step": 4, "group_size": 4}
    own = recipe(micro_batch_tokens=1200, checkpointing="full", **large)
    fitted = memory.fit(planners[True], own, ("micro_batch_tokens", "checkpointing"))
    assert (fitted.config.micro_batch_tokens, fitted.config.checkpointing) == (1200, "full")
    assert fitted.messages[:2] == (
        "micro_batch_tokens: 1200, the recipe's own bound",
        "checkpointing: full, as the recipe says",
    )
    most = planners[True].plan(replace(own, micro_batch_tokens=1200)).total
    tight = memory.fit(
        with_free(planners[True], most - 1), replace(own, micro_batch_tokens=2400), ("micro_batch_tokens",)
    )
    assert tight.config.micro_batch_tokens < 2400
    unset = memory.fit(planners[True], own, ())
    assert (unset.config.micro_batch_tokens, unset.config.checkpointing) == (3584, "none")


@pytest.mark.parametrize("kind", ["adafactor", "adamw8bit", "adamw_cpu"])
def test_an_optimizer_other_than_adamw_is_kept(planners: Any, kind: str) -> None:
    own = recipe(optimizer=resolve.find("optimizers", kind)())
    with pytest.raises(DoesNotFit):
        memory.fit(with_free(planners[False], 10**6), own, ())
    assert memory.fit(planners[False], own, ()).config.optimizer == own.optimizer


def test_a_precision_that_is_set_is_kept(planners: Any) -> None:
    own = recipe()
    tried = {
        getattr(w.optimizer, "precision", "") for w in fitting._ways(own, ("optimizer.precision",), planners[False])
    }
    assert tried == {"masters"}
    tried = {getattr(w.optimizer, "precision", "") for w in fitting._ways(recipe(dtype="float32"), (), planners[True])}
    assert tried == {"masters"}  # of float32 weights there is nothing to keep beside them


def test_gradients_are_narrowed_only_where_few_are_added_up_and_the_weights_are_narrow(planners: Any) -> None:
    def narrowed(own: RunConfig, *set_options: str) -> list[RunConfig]:
        tried = fitting._ways(own, set_options, planners[False])
        return [way for way in tried if getattr(way.optimizer, "gradients", "") == "bfloat16"]

    assert len(narrowed(recipe())) == len(CHECKPOINTING)
    assert narrowed(recipe(), "optimizer.gradients") == []
    assert narrowed(recipe(dtype="float32")) == []
    assert narrowed(recipe(trainable=resolve.find("trainable", "lora")())) == []
    way, *_ = narrowed(recipe())
    whole = planners[False].step_tokens(way)
    sizes = [whole // 64, whole // 33, -(-whole // 32), whole // 2, whole]
    assert fitting._precise(planners[False], way, sizes) == sizes[2:]
    assert fitting._precise(planners[False], recipe(), sizes) == sizes
    assert fitting._precise(planners[False], way, sizes[:2]) == sizes[1:2]


def test_smaller_states_keep_the_other_options(planners: Any) -> None:
    own = recipe(optimizer=resolve.find("optimizers", "adamw")(lr=3e-5, beta2=0.98, weight_decay=0.1, warmup_steps=4))
    tried = [way.optimizer for way in fitting._ways(own, (), planners[False])]
    assert [resolve.kind_of("optimizers", one) for one in tried[::3]] == [kind for kind, _ in OPTIMIZERS]
    assert {(one.lr, one.beta2, one.weight_decay, one.warmup_steps) for one in tried} == {(3e-5, 0.98, 0.1, 4)}  # type: ignore[attr-defined]


def test_what_does_not_fit_at_all_is_refused_without_advice_that_was_tried(planners: Any) -> None:
    with pytest.raises(DoesNotFit) as caught:
        memory.fit(with_free(planners[False], 605 * 10**6), recipe(), ())
    message = str(caught.value)
    assert "lower micro_batch_tokens" not in message
    assert "adamw_cpu" not in message
    with pytest.raises(DoesNotFit, match="memory: fit"):
        with_free(planners[False], 605 * 10**6).plan(recipe(micro_batch_tokens=996)).require()


def test_a_run_is_saved_as_it_was_fitted_and_goes_on_so(tiny_model: Path, tmp_path: Path) -> None:
    from tandem.api.targets import resumed
    from tandem.trainer import assemble as run

    file = tmp_path / "recipe.yaml"
    lines = [f"model: {tiny_model}", "steps: 2", "env: arithmetic", "memory: fit", "groups_per_step: 2"]
    lines += ["group_size: 2", "dtype: float32", f"runs: {tmp_path}", "name: r", "sampling: {max_tokens: 8}"]
    lines += ["loggers: []", "evaluate: {tasks: 0}", "zero_variance_groups: keep"]
    file.write_text("\n".join(lines))
    loaded = load(file, ["steps=1"])
    folder = asyncio.run(run.train(loaded.config, resume=None, set_options=frozenset(loaded.places)))
    saved = load(folder / "config.yaml").config
    assert saved.memory == "check"
    assert saved.micro_batch_tokens != RunConfig.micro_batch_tokens
    again = resumed(folder, ["steps=2"])
    assert again.micro_batch_tokens == saved.micro_batch_tokens
    asyncio.run(run.train(again, resume=folder))
    assert load(folder / "config.yaml").config.micro_batch_tokens == saved.micro_batch_tokens
    with pytest.raises(ConfigError, match="keeps its 'memory'"):
        resumed(folder, ["memory=fit"])
