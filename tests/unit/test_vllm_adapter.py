"""Adapters in vLLM's slots, against a stand-in with the same slots; no vLLM is needed."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tandem.engines.base import EngineRequirements, LoraAdapter
from tandem.engines.vllm.adapters import (
    AdapterWriter,
    scaling,
)
from tandem.engines.vllm.client.engine import VllmEngine
from tandem.engines.vllm.spec import Vllm
from tandem.engines.vllm.worker.adapter import InPlaceAdapters
from tandem.engines.vllm.worker.extension import WorkerExtension
from tandem.errors import EngineError
from tandem.transport.checksums import Shard, checksums, joined
from tandem.types import PolicyVersion

HIDDEN, HEADS, KEYS, HEAD, MLP, SLOTS, MAX_RANK = 16, 8, 2, 4, 24, 2, 8
CONFIG = {"r": 6, "lora_alpha": 10, "target_modules": ["q_proj"], "bias": "none", "use_dora": False}
SHAPES = {  # module → (input, output)
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD),
    "self_attn.k_proj": (HIDDEN, KEYS * HEAD),
    "self_attn.v_proj": (HIDDEN, KEYS * HEAD),
    "self_attn.o_proj": (HEADS * HEAD, HIDDEN),
    "mlp.gate_proj": (HIDDEN, MLP),
    "mlp.up_proj": (HIDDEN, MLP),
    "mlp.down_proj": (MLP, HIDDEN),
}


def layer(base: dict[str, Any], slices: tuple[int, ...], columns: int, *, rank: int, world: int) -> Any:
    """One wrapped layer: ``slices`` are this worker's rows of each B, ``columns`` its columns of A."""
    return SimpleNamespace(
        base_layer=SimpleNamespace(**base),
        tp_rank=rank,
        tp_size=world,
        n_slices=len(slices),
        output_slices=slices,
        lora_a_stacked=tuple(torch.zeros(SLOTS, 1, MAX_RANK, columns, dtype=torch.bfloat16) for _ in slices),
        lora_b_stacked=tuple(torch.zeros(SLOTS, 1, rows, MAX_RANK, dtype=torch.bfloat16) for rows in slices),
    )


def layers(rank: int, world: int) -> dict[str, Any]:
    """The adapted layers of a one-layer model as worker ``rank`` of ``world`` holds them."""
    on = {"rank": rank, "world": world}
    copies = max(1, world // KEYS)
    q, kv = HEADS * HEAD // world, KEYS * HEAD * copies // world
    column = {"input_size": HIDDEN, "gather_output": False}
    qkv = column | {"output_size": 1, "num_kv_head_replicas": copies, "output_sizes": [1, 1, 1]}

    def row(size: int) -> dict[str, Any]:
        return {
            "input_size": size,
            "input_size_per_partition": size // world,
            "output_size": HIDDEN,
            "input_is_parallel": True,
        }

    return {
        "model.layers.0.self_attn.qkv_proj": layer(qkv, (q, kv, kv), HIDDEN, **on),
        "model.layers.0.self_attn.o_proj": layer(row(HEADS * HEAD), (HIDDEN,), HEADS * HEAD // world, **on),
        "model.layers.0.mlp.gate_up_proj": layer(
            column | {"output_sizes": [MLP, MLP]}, (MLP // world, MLP // world), HIDDEN, **on
        ),
        "model.layers.0.mlp.down_proj": layer(row(MLP), (HIDDEN,), MLP // world, **on),
        "lm_head": SimpleNamespace(base_layer=None, lora_a_stacked=None, tp_rank=rank),
    }


@dataclass
class Manager:
    """vLLM's LRU manager: registered adapters, slots, and a slot refilled whenever an adapter is activated."""

    modules: dict[str, Any]
    model: Any = field(default_factory=SimpleNamespace)
    lora_slots: int = SLOTS
    activations: int = 0
    pinned: set[int] = field(default_factory=set)
    registered: OrderedDict[int, Any] = field(default_factory=OrderedDict)
    lora_index_to_id: list[int | None] = field(default_factory=lambda: [None] * SLOTS)
    lora_config: Any = field(default_factory=lambda: SimpleNamespace(max_lora_rank=MAX_RANK))

    @property
    def packed_modules(self) -> dict[str, list[str]]:
        at = "model.layers.0."
        return {
            at + "self_attn.qkv_proj": [at + f"self_attn.{x}_proj" for x in "qkv"],
            at + "mlp.gate_up_proj": [at + "mlp.gate_proj", at + "mlp.up_proj"],
        }

    def create_dummy_lora(self, lora_id: int, rank: int, embedding_modules: object) -> Any:
        return SimpleNamespace(id=lora_id, loras={})

    def add_adapter(self, adapter: Any) -> None:
        self.registered[adapter.id] = adapter

    def activate_adapter(self, lora_id: int) -> None:
        if lora_id in self.lora_index_to_id:
            return
        if None not in self.lora_index_to_id:
            oldest = next((i for i in self.registered if i in self.lora_index_to_id and i not in self.pinned), None)
            if oldest is None:
                raise RuntimeError("All items are pinned, cannot remove oldest from the cache.")
            self.lora_index_to_id[self.lora_index_to_id.index(oldest)] = None
        slot = self.lora_index_to_id.index(None)
        self.lora_index_to_id[slot] = lora_id
        self.activations += 1
        for name, module in self.modules.items():
            for tensor in [*(module.lora_a_stacked or ()), *(getattr(module, "lora_b_stacked", None) or ())]:
                tensor[slot] = self.registered[lora_id].loras.get(name, None) or 0

    def pin_adapter(self, lora_id: int) -> None:
        self.pinned.add(lora_id)

    def get_adapter(self, lora_id: int) -> Any:
        return self.registered.get(lora_id)

    def deactivate(self, lora_id: int) -> None:
        self.lora_index_to_id = [None if x == lora_id else x for x in self.lora_index_to_id]

    def remove_adapter(self, lora_id: int) -> bool:
        self.deactivate(lora_id)
        self.pinned.discard(lora_id)
        return self.registered.pop(lora_id, None) is not None


def engine(rank: int = 0, world: int = 1, **options: Any) -> tuple[InPlaceAdapters, Manager]:
    manager = Manager(layers(rank, world), **options)
    worker = SimpleNamespace(_adapter_manager=manager, embedding_modules={"lm_head": "output_embeddings"})
    return InPlaceAdapters(SimpleNamespace(lora_manager=worker)), manager


def adapter(seed: int = 0, *, rank: int = 6, name: str = ".default", dtype: torch.dtype = torch.bfloat16) -> Any:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (columns, rows) in SHAPES.items():
        at = f"base_model.model.model.layers.0.{module}"
        tensors[f"{at}.lora_A{name}.weight"] = torch.randn(rank, columns, generator=generator).to(dtype)
        tensors[f"{at}.lora_B{name}.weight"] = torch.randn(rows, rank, generator=generator).to(dtype)
    return tensors


def expected(tensors: dict[str, Tensor], factor: float = 10 / 6) -> dict[str, Tensor]:
    """What slots must hold: B multiplied in float32 and rounded once."""
    out = {}
    for name, tensor in tensors.items():
        stored = tensor.bfloat16()
        if ".lora_B" in name:
            stored = (stored.float() * torch.tensor(factor)).bfloat16()
        out[name.replace(".default", "")] = stored
    return out


def filled(manager: Manager) -> int:
    """Elements of all slots that are not zero."""
    return sum(
        int((tensor != 0).sum())
        for module in manager.modules.values()
        for tensor in [*(module.lora_a_stacked or ()), *(getattr(module, "lora_b_stacked", None) or ())]
    )


def test_slots_hold_the_adapter_to_the_bit_under_the_trainers_names() -> None:
    slots, _ = engine()
    tensors = adapter()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    slots.put(7, CONFIG, tensors)
    held = list(slots.stored(7))
    want = expected(tensors)
    assert [h.name for h in held] == list(want)
    for h in held:
        assert torch.equal(h.tensor, want[h.name]), h.name
        assert h.first == (0, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors.items())


def test_the_trainer_computes_the_same_bits() -> None:
    slots, _ = engine()
    tensors = adapter(dtype=torch.float32)  # wider than the slots
    slots.put(7, CONFIG, tensors)
    for h in slots.stored(7):
        mine = tensors[h.name.replace(".weight", ".default.weight")]
        mine = mine.to(h.tensor.dtype)
        assert torch.equal(h.tensor, mine * scaling(CONFIG) if "lora_B" in h.name else mine), h.name


def test_a_second_version_is_written_over_the_first_in_place() -> None:
    slots, manager = engine()
    slots.put(7, CONFIG, adapter(0))
    first = [h.tensor.data_ptr() for h in slots.stored(7)]
    slots.put(7, CONFIG, adapter(1, name=""))
    want = expected(adapter(1))
    assert all(torch.equal(h.tensor, want[h.name]) for h in slots.stored(7))
    assert [h.tensor.data_ptr() for h in slots.stored(7)] == first
    assert manager.activations == 1


def test_two_adapters_do_not_touch_each_other() -> None:
    slots, _ = engine()
    slots.put(7, CONFIG, adapter(0))
    slots.put(8, CONFIG, adapter(1))
    slots.put(8, CONFIG, adapter(2))
    for lora_id, seed in ((7, 0), (8, 2)):
        want = expected(adapter(seed))
        assert all(torch.equal(h.tensor, want[h.name]) for h in slots.stored(lora_id))


def test_a_smaller_adapter_leaves_nothing_of_the_one_before() -> None:
    slots, manager = engine()
    slots.put(7, CONFIG | {"r": MAX_RANK}, adapter(0, rank=MAX_RANK))
    assert slots.remove(7)
    assert not slots.remove(7)
    small = {name: tensor for name, tensor in adapter(1, rank=2).items() if "q_proj" in name}
    slots.put(8, CONFIG | {"r": 2}, small)
    assert filled(manager) == sum(tensor.numel() for tensor in small.values())


@pytest.mark.parametrize("world", [1, 2, 4])  # with 4 workers, two hold the same keys
def test_parts_of_all_workers_make_the_whole_once(world: int) -> None:
    tensors = adapter()
    whole = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected(tensors).items()}
    counts = {name: torch.zeros(tensor.shape) for name, tensor in whole.items()}
    seen = set()  # replicas have the same name and place, by which checksums tell them
    for rank in range(world):
        slots, _ = engine(rank, world)
        slots.put(7, CONFIG, tensors)
        for h in slots.stored(7):
            assert torch.equal(part_of(h, expected(tensors)[h.name]), h.tensor)  # replicas too
            if (h.name, h.first) not in seen:
                seen.add((h.name, h.first))
                part_of(h, whole[h.name]).copy_(h.tensor)
                part_of(h, counts[h.name]).add_(1)
    for name, tensor in expected(tensors).items():
        assert torch.equal(whole[name], tensor), name
        assert bool((counts[name] == 1).all()), name


def part_of(h: Shard, whole: Tensor) -> Tensor:
    (row, column), (rows, columns) = h.first, h.tensor.shape
    return whole[row : row + rows, column : column + columns]


def test_vllm_never_evicts_it() -> None:
    slots, manager = engine()
    slots.put(7, CONFIG, adapter())
    for other in (11, 12, 13):
        manager.add_adapter(SimpleNamespace(id=other, loras={}))
        manager.activate_adapter(other)
    want = expected(adapter())
    assert all(torch.equal(h.tensor, want[h.name]) for h in slots.stored(7))


def test_a_slot_filled_anew_without_its_values_is_loud() -> None:
    slots, manager = engine()
    slots.put(7, CONFIG, adapter())
    manager.deactivate(7)
    with pytest.raises(EngineError, match="publish it again"):
        manager.activate_adapter(7)


def test_an_adapter_that_vllm_dropped_is_registered_again() -> None:
    slots, manager = engine()
    slots.put(7, CONFIG, adapter(0))
    manager.remove_adapter(7)  # as vLLM does when it reloads or wakes
    with pytest.raises(EngineError, match="in no slot"):
        list(slots.stored(7))
    manager.add_adapter(SimpleNamespace(id=9, loras={}))
    manager.activate_adapter(9)  # and another one took the slot
    slots.put(7, CONFIG, adapter(1))
    want = expected(adapter(1))
    assert all(torch.equal(h.tensor, want[h.name]) for h in slots.stored(7))
    assert manager.lora_index_to_id == [9, 7]


def test_a_deactivated_adapter_is_registered_again() -> None:
    slots, manager = engine()
    slots.put(7, CONFIG, adapter(0))
    manager.deactivate(7)
    slots.put(7, CONFIG, adapter(1))
    assert 7 in manager.lora_index_to_id
    want = expected(adapter(1))
    assert all(torch.equal(h.tensor, want[h.name]) for h in slots.stored(7))


def test_an_id_that_came_from_a_file_is_refused() -> None:
    slots, manager = engine()
    slots.put(8, CONFIG, adapter())
    for lora_id in (7, 8):  # the second took the place of one that was put
        manager.add_adapter(SimpleNamespace(id=lora_id, loras={}))
        with pytest.raises(EngineError, match=f"holds an adapter {lora_id}"):
            slots.put(lora_id, CONFIG, adapter())


@pytest.mark.parametrize("world", [1, 2])
def test_what_vllm_loaded_from_a_file_is_read_back_by_name(world: int) -> None:
    names, want = adapter(1, name=""), expected(adapter(1))
    seen = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    for rank in range(world):
        slots, manager = engine(rank, world)
        slots.put(7, CONFIG, adapter(0))
        slots.put(8, CONFIG, adapter(1))
        with pytest.raises(EngineError, match="adapter 9 is in no slot"):
            list(slots.loaded(9, names, CONFIG))
        manager.lora_index_to_id[1] = 9  # the second slot, as if a file had filled it
        for held in slots.loaded(9, names, CONFIG):
            part_of(held, seen[held.name]).copy_(held.tensor)
        with pytest.raises(EngineError, match=r"no linear layer 'model\.layers\.9\.self_attn\.q_proj'"):
            list(slots.loaded(9, [name.replace("layers.0", "layers.9") for name in names], CONFIG))
    assert all(torch.equal(seen[name], want[name]) for name in want)


def test_an_adapter_of_another_rank_in_the_same_slot_is_summed_as_it_is() -> None:
    """As the next trainer's is on an engine that outlives a run."""
    worker = WorkerExtension()
    worker._tandem_adapters, _ = engine()
    for rank in (4, 6, 2):
        worker._tandem_adapters.put(7, CONFIG | {"r": rank}, adapter(rank=rank))
        sums = joined("the engine", [worker.tandem_adapter_checksums(7, [], "{}")])
        assert sums == checksums(expected(adapter(rank=rank), 10 / rank).items())
        worker.tandem_forget(7)


def test_what_sums_versions_by_name_is_kept_for_each_slot_and_not_for_each_version() -> None:
    worker, names = WorkerExtension(), list(adapter(name=""))
    worker._tandem_adapters, manager = engine()
    for version in range(6):
        manager.lora_index_to_id = [2 * version, 2 * version + 1]
        for lora_id in manager.lora_index_to_id:
            worker.tandem_adapter_checksums(lora_id, names, json.dumps(CONFIG))
    assert len(worker._tandem_sums) == SLOTS


def test_no_free_slot_is_said_and_leaves_nothing_registered() -> None:
    slots, manager = engine()
    slots.put(7, CONFIG, adapter())
    slots.put(8, CONFIG, adapter())
    with pytest.raises(EngineError, match=r"no slot is free for adapter 9.*has 2.*--max-loras"):
        slots.put(9, CONFIG, adapter())
    assert list(manager.registered) == [7, 8]


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"r": MAX_RANK + 1}, {}, "slots hold 1 to 8.*--max-lora-rank"),
        ({"r": 4}, {}, r"\(6, 16\).*takes floating-point \(4, 16\)"),
        ({}, {f"{Q}.lora_A.default.weight": None}, f"has {Q}.lora_B.weight but not its other half"),
        ({}, {f"{Q}.lora_A.default.weight": torch.zeros(6, 15)}, r"q_proj.lora_A.weight.*\(6, 15\).*\(6, 16\)"),
        ({}, {f"{Q}.lora_B.default.weight": torch.zeros(64, 6)}, r"q_proj.lora_B.weight.*\(64, 6\).*\(32, 6\)"),
        ({}, {f"{Q}.lora_B.default.weight": torch.zeros(32, 6, dtype=torch.int8)}, "torch.int8"),
        (
            {},
            {f"{Q}.lora_magnitude_vector.default.weight": torch.zeros(6)},
            "lora_magnitude_vector.*is no lora_A",
        ),
        (
            {},
            {f"base_model.model.{m}.lora_{h}.weight": torch.zeros(6, 6) for m in ("lm_head",) for h in "AB"},
            "no linear layer 'lm_head'",
        ),
        (
            {},
            {f"base_model.model.model.layers.1.mlp.up_proj.lora_{h}.weight": torch.zeros(6, 6) for h in "AB"},
            "no linear layer 'model.layers.1.mlp.up_proj'",
        ),
    ],
)
def test_what_cannot_be_served_is_named_and_nothing_is_written(config: Any, change: Any, message: str) -> None:
    slots, manager = engine()
    tensors = {name: tensor for name, tensor in (adapter() | change).items() if tensor is not None}
    with pytest.raises(EngineError, match=message):
        slots.put(7, CONFIG | config, tensors)
    assert filled(manager) == 0
    assert not manager.registered


def test_a_wrong_second_version_leaves_the_first() -> None:
    slots, _ = engine()
    slots.put(7, CONFIG, adapter(0))
    fewer = {name: tensor for name, tensor in adapter(1).items() if "down_proj" not in name}
    with pytest.raises(EngineError, match=r"14 tensors, now it has rank 6 and 12.*mlp.down_proj.lora_A"):
        slots.put(7, CONFIG, fewer)
    with pytest.raises(EngineError, match=r"with rank 6 .* rank 4.*POST /lora/unload"):
        slots.put(7, CONFIG | {"r": 4}, adapter(1, rank=4))
    wrong = adapter(1) | {f"{Q}.lora_B.default.weight": torch.zeros(31, 6)}
    with pytest.raises(EngineError, match=r"\(31, 6\)"):
        slots.put(7, CONFIG, wrong)
    want = expected(adapter(0))
    assert all(torch.equal(h.tensor, want[h.name]) for h in slots.stored(7))


def test_layouts_that_cannot_be_cut_are_refused() -> None:
    slots, manager = engine(1, 2)
    o_proj = manager.modules["model.layers.0.self_attn.o_proj"]
    o_proj.lora_b_stacked = (torch.zeros(SLOTS, 1, HIDDEN // 2, MAX_RANK),)
    with pytest.raises(EngineError, match=r"o_proj as A \(8, 16\) and B \(8, 8\).*--fully-sharded-loras"):
        slots.put(7, CONFIG, adapter())

    fused = {"input_size": HIDDEN, "gather_output": False, "output_sizes": [MLP, MLP]}
    manager.modules["model.fused_proj"] = layer(fused, (MLP,), HIDDEN, rank=1, world=2)
    pair = {f"model.fused_proj.lora_{h}.weight": torch.zeros(6, 6) for h in "AB"}
    with pytest.raises(EngineError, match=r"'model.fused_proj', one layer in the checkpoint.*tensor_parallel_size: 1"):
        slots.put(8, CONFIG, pair)

    manager.modules["model.fused_proj"] = layer(fused, (MLP, MLP), HIDDEN, rank=1, world=2)
    with pytest.raises(EngineError, match=r"no linear layer 'model\.fused_proj'"):
        slots.put(8, CONFIG, pair)


@pytest.mark.parametrize("method", ["get_rename_mapper", "get_unstacked_mapper"])
def test_modules_are_renamed_as_vllm_does_when_it_loads_a_file(method: str) -> None:
    renames = SimpleNamespace(apply_list=lambda names: [name.replace("language_model.", "model.") for name in names])
    slots, _ = engine(model=SimpleNamespace(hf_to_vllm_mapper=SimpleNamespace(**{method: lambda: renames})))
    tensors = {name.replace(".model.model.", ".model.language_model."): t for name, t in adapter().items()}
    slots.put(7, CONFIG, tensors)
    assert {h.name.partition(".layers")[0] for h in slots.stored(7)} == {"base_model.model.language_model"}


def test_scaling_is_pefts() -> None:
    assert scaling({"r": 16, "lora_alpha": 32}) == 2
    assert scaling({"r": 16, "lora_alpha": 32, "use_rslora": True}) == 8


def test_an_engine_without_adapters_says_so() -> None:
    with pytest.raises(EngineError, match="--enable-lora"):
        InPlaceAdapters(SimpleNamespace())


def numbers(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Many bit patterns, with the smallest and the largest there are."""
    info = torch.finfo(dtype)
    edges = torch.tensor([0.0, -0.0, info.tiny, info.smallest_normal, info.max, info.min, torch.inf, -torch.inf])
    return torch.cat([torch.randn(61), 1e-4 * torch.randn(500), edges]).to(device, dtype)


FACTORS = [1.0, 2.0, 0.5, 2.0**-7, 10 / 6, 0.3, 32 / 12**0.5]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def trained(tensors: dict[str, Tensor], config: dict[str, Any] = CONFIG) -> LoraAdapter:
    return LoraAdapter(config=config, tensors=tuple(tensors.items()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_whatever_multiplies_b_gives_the_bits_of_one_float32_product(
    dtype: torch.dtype, factor: float, device: str
) -> None:
    tensors = [numbers(dtype, device), numbers(dtype, device)[:7]]
    want = [(t.float() * torch.tensor(factor, dtype=torch.float32, device=device)).to(dtype) for t in tensors]
    one_by_one = [tensor * factor for tensor in tensors]  # what vLLM does when it loads a file
    config = {"r": 1, "lora_alpha": factor}
    named = {f"{n}.lora_B.default.weight": t.view(1, -1) for n, t in enumerate(tensors)}
    stored = AdapterWriter().stored(trained(named, config))
    for n, expected in enumerate(want):
        for product in (one_by_one[n], stored[n][1].flatten(), tensors[n].mul_(factor)):
            assert torch.equal(product, expected)


def test_what_the_trainer_stores_follows_its_tensors_and_stays_in_its_place() -> None:
    tensors, keeper = adapter(), AdapterWriter()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    first = keeper.stored(trained(tensors))
    where = [tensor.data_ptr() for _, tensor in first]
    assert all(torch.equal(tensor, expected(tensors)[name]) for name, tensor in first)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors.items())
    assert all(pointer % 16 == 0 for pointer in where), "wide loads need it"
    for tensor in tensors.values():
        tensor.add_(1)
    second = keeper.stored(trained(tensors))
    assert all(torch.equal(tensor, expected(tensors)[name]) for name, tensor in second)
    assert [tensor.data_ptr() for _, tensor in second] == where
    larger = adapter(rank=8)
    third = keeper.stored(trained(larger, CONFIG | {"r": 8}))
    assert all(torch.equal(tensor, expected(larger, 10 / 8)[name]) for name, tensor in third)


def meta(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def test_a_lent_slot_is_written_by_its_borrower(tmp_path: Path) -> None:
    slots, manager = engine()
    slots.put(8, CONFIG, adapter(5))  # beside it
    slots.put(7, CONFIG, adapter(4))  # as a broadcast does; its values move with the slot
    borrower = AdapterWriter()
    answer = json.loads(json.dumps(slots.export(7, CONFIG, meta(adapter()), tmp_path)))
    assert all(torch.equal(h.tensor, expected(adapter(4))[h.name]) for h in slots.stored(7))
    for seed in (0, 1):
        assert borrower.write(answer, trained(adapter(seed))) == sum(tensor.nbytes for tensor in adapter().values())
        want = expected(adapter(seed))
        assert all(torch.equal(h.tensor, want[h.name]) for h in slots.stored(7))
    q = manager.modules["model.layers.0.self_attn.qkv_proj"]
    slot = manager.lora_index_to_id.index(7)
    assert torch.equal(q.lora_a_stacked[0][slot, 0, :6], want[f"{Q}.lora_A.weight"]), "what vLLM's kernels read"
    assert torch.equal(q.lora_b_stacked[0][slot, 0, :, :6], want[f"{Q}.lora_B.weight"])
    assert all(torch.equal(h.tensor, expected(adapter(5))[h.name]) for h in slots.stored(8))
    slots.put(7, CONFIG, adapter(2))  # another way to write it goes on to work
    assert all(torch.equal(h.tensor, expected(adapter(2))[h.name]) for h in slots.stored(7))


@pytest.mark.slow
def test_a_slot_is_lent_again_as_it_is_and_leaves_no_file(tmp_path: Path) -> None:
    slots, _ = engine()
    first, second = (slots.export(7, CONFIG, meta(adapter()), tmp_path)["key"] for _ in range(2))
    assert first == second, "what was attached stays so"
    assert [path.name.startswith("tandem-adapter") for path in tmp_path.iterdir()] == [True], "one file for both"
    slots.remove(7)
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_not_lent(tmp_path: Path) -> None:
    slots, manager = engine()
    with pytest.raises(EngineError, match=r"takes floating-point \(4, 16\)"):
        slots.export(7, CONFIG | {"r": 4}, meta(adapter()), tmp_path)
    assert not manager.registered
    wide = adapter(dtype=torch.float32)
    answer = slots.export(7, CONFIG, meta(wide), tmp_path)
    with pytest.raises(EngineError, match=r"q_proj.lora_A.weight as torch.bfloat16.*the trainer has torch.float32"):
        AdapterWriter().write(answer, trained(wide))
    assert filled(manager) == 0


class Server:
    """An engine over HTTP that lends a stand-in's slot."""

    name = "engine one"

    def __init__(self, folder: Path) -> None:
        self.adapters, self.manager = engine()
        self.folder = folder
        self.requests: list[str] = []

    async def post(self, path: str, body: Any) -> Any:
        self.requests.append(path.rpartition("/")[2])
        tensors = {name: torch.empty(shape, dtype=getattr(torch, t), device="meta") for name, shape, t in body.tensors}
        return {"ranks": [self.adapters.export(7, body.config, tensors, self.folder)]}

    def held(self) -> dict[str, Tensor]:
        return {h.name: h.tensor for h in self.adapters.stored(7)}


def fleet_of(*servers: Server) -> Any:
    requirements = EngineRequirements(model="", dtype="bfloat16")
    return SimpleNamespace(
        servers=list(servers), restart_count=0, context=64, requirements=requirements, options=Vllm(control_seconds=0.5)
    )


def test_the_trainer_writes_the_slot_of_now(tmp_path: Path) -> None:
    server = Server(tmp_path)
    live = VllmEngine(fleet_of(server), context=64, ends=[])

    def publish(seed: int) -> None:
        assert asyncio.run(live.adapt(trained(adapter(seed)))) == sum(tensor.nbytes for tensor in adapter().values())
        want = expected(adapter(seed))
        assert all(torch.equal(tensor, want[name]) for name, tensor in server.held().items())

    publish(0)
    publish(1)
    server.adapters.remove(7)  # unloaded by somebody
    publish(2)
    server.adapters, server.manager = engine()  # started again
    publish(3)


def test_one_rank_writes_the_slots_of_all_engines(tmp_path: Path) -> None:
    servers = [Server(tmp_path), Server(tmp_path)]
    fleet = fleet_of(*servers)
    live = VllmEngine(fleet, context=64, ends=[])

    def publish(seed: int, *to: Server) -> None:
        copied = asyncio.run(live.adapt(trained(adapter(seed))))
        assert copied == len(to) * sum(tensor.nbytes for tensor in adapter().values())
        want = expected(adapter(seed))
        for server in to:
            assert all(torch.equal(tensor, want[name]) for name, tensor in server.held().items())

    publish(0, *servers)
    publish(1, *servers)
    fleet.servers[:] = servers[1:]  # the first does not answer
    publish(2, servers[1])
    fleet.servers[:] = [servers[1], servers[0]]
    publish(3, *servers)


def test_each_rank_writes_the_slot_of_its_own_engine(tmp_path: Path) -> None:
    servers = [Server(tmp_path), Server(tmp_path)]
    fleet = fleet_of(*servers)
    lead = VllmEngine(fleet, context=64, ends=[])
    follower = AdapterWriter()

    def publish(seed: int) -> None:
        now = trained(adapter(seed))
        asyncio.run(lead.adapt(now, everywhere=False))
        (slot,) = asyncio.run(lead.slots_of_ranks(now))
        want = expected(adapter(seed))
        assert not all(torch.equal(tensor, want[name]) for name, tensor in servers[1].held().items()), "not yet"
        follower.write(msgspec.msgpack.decode(msgspec.msgpack.encode(slot)), now)
        for server in servers:
            assert all(torch.equal(tensor, want[name]) for name, tensor in server.held().items())

    publish(0)
    publish(1)
    assert [server.requests for server in servers] == [["lend_slot"] * 2] * 2
    fleet.restart_count += 1
    servers[1].adapters, servers[1].manager = engine()
    publish(2)


@pytest.mark.parametrize("way", ["swap", "load"])
def test_what_a_trainer_has_loaded_is_served_when_it_is_stamped(tmp_path: Path, way: str) -> None:
    """An engine to which nobody ever published would sample from it before it is proven."""
    requests: list[Any] = []

    async def every(path: str, body: Any) -> None:
        requests.append((path, body.served))

    fleet = fleet_of()
    fleet.all = every
    engine = VllmEngine(fleet, context=8, ends=[])
    adapter = LoraAdapter(config=CONFIG, tensors=())
    version = PolicyVersion(step=0, digest="")
    asyncio.run(engine.swap(tmp_path, version, adapter) if way == "swap" else engine.load(tmp_path, adapter))
    assert requests == [("/lora/load", False)]
