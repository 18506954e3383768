"""Hugging Face tensors in vLLM's parameters: stand-ins that are sliced, fused and padded as vLLM's own layers are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.vllm_workers import Served, Worker, mapped, served, trained
from torch import Tensor, nn

from tandem.engines.vllm.worker import parameter_map
from tandem.engines.vllm.worker.parameter_map import TensorPlace, recorded, share, sources_of
from tandem.errors import EngineError
from tandem.transport.checksums import ChecksumTally, Shard, checksums

MODELS = [
    pytest.param("Llama", {}, id="llama"),
    pytest.param("Llama", {"tied": True}, id="llama-tied"),
    pytest.param("Llama", {"attention_bias": True, "mlp_bias": True}, id="llama-every-bias"),
    pytest.param("Qwen2", {"tied": True}, id="qwen2-qkv-bias"),
    pytest.param("Qwen2", {"keys": 1}, id="qwen2-one-key-head"),
    pytest.param("Qwen2", {"keys": 4}, id="qwen2-as-many-key-heads"),
    pytest.param("Qwen3", {}, id="qwen3-qk-norm"),
]


def part(whole: Tensor, place: TensorPlace) -> Tensor:
    (row, column), size = place.first, place.tensor.shape
    rows = whole[row : row + size[0]]
    return rows if whole.dim() < 2 else rows[:, column : column + size[1]]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("kind", "options"), MODELS)
def test_distinct_places_hold_every_element_once(
    kind: str, options: dict[str, Any], world: int, adapters: bool
) -> None:
    model = trained(kind, **options)
    whole = dict(model.named_parameters())
    seen = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in whole.items()}
    known = set()  # what several ranks hold has one name and place
    for rank in range(world):
        fake = served(model, Worker(rank, world), adapters=adapters)
        located = mapped(fake, model, world=world)
        assert located.keys() == whole.keys()
        for name, parts in located.items():
            for place in parts:
                assert place.shape == whole[name].shape
                assert place.tensor.shape == part(whole[name], place).shape  # lies within the whole
                assert torch.equal(place.tensor, part(whole[name], place))
                assert place.tensor.numel() == 0 or shares(place, fake)
                part(seen[name], place).add_(int((name, place.first) not in known))
                known.add((name, place.first))
    assert all((count == 1).all() for count in seen.values())


def shares(place: TensorPlace, fake: nn.Module) -> bool:
    storage = fake.get_parameter(place.parameter).untyped_storage()
    return place.tensor.untyped_storage().data_ptr() == storage.data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("kind", "options"), MODELS)
def test_checksums_of_all_ranks_add_up_to_the_trainers(kind: str, options: dict[str, Any], world: int) -> None:
    model = trained(kind, **options)
    shards: dict[tuple[str, tuple[int, int]], Shard] = {}  # what several ranks hold is the same
    for rank in range(world):
        located = mapped(served(model, Worker(rank, world)), model, world=world)
        shards |= {(n, p.first): Shard(n, p.tensor, p.first) for n, parts in located.items() for p in parts}
    total = dict.fromkeys(dict(model.named_parameters()), 0)
    for shard in shards.values():
        for name, value in ChecksumTally([shard]).take().items():
            total[name] = (total[name] + value) % 2**64
    assert total == checksums(model.named_parameters())


def test_writing_every_place_is_what_loading_would_have_made() -> None:
    old, new = trained("Qwen2", tied=True), trained("Qwen2", tied=True, attention_dropout=0.0)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(-2)
    for rank in range(2):
        fake, fresh = (served(model, Worker(rank, 2)) for model in (old, new))
        for name, parts in mapped(fake, old, world=2).items():
            for place in parts:
                place.tensor.copy_(part(new.get_parameter(name).detach(), place))
        for name, parameter in fresh.named_parameters():
            assert torch.equal(fake.get_parameter(name), parameter), name  # padding rows too: they stay zero


class Experts(Served):
    """Two experts, whose weights a checkpoint has one by one; and what else a loader does, by the names of tensors."""

    def __init__(self, kind: str = ""):
        super().__init__()
        self.kind = kind
        self.w13 = nn.Parameter(torch.zeros(2, 6, 4), requires_grad=False)
        self.w2 = nn.Parameter(torch.zeros(2, 3, 4), requires_grad=False)
        self.sinks = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16 if kind == "narrow" else None))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, whole in weights:
            _, expert, leaf = name.split(".")
            if leaf == "sinks":
                self.sinks.data.copy_(whole * 2 if self.kind == "doubled" else whole)
                if self.kind == "in place":
                    self.sinks.data.copy_(-self.sinks.exp())
            elif leaf == "down":
                self.w2.data[int(expert)].copy_(whole.t().contiguous())
            elif self.kind != "forgotten" or leaf == "gate":
                assert self.kind != "failing", "no such layer"
                self.w13.data[int(expert), {"gate": slice(3), "up": slice(3, 6)}[leaf]].copy_(whole)
        if self.kind == "rebound":
            self.w2 = nn.Parameter(torch.zeros(2, 3, 4))


def stacked() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A trainer's tensors without values, and what a checkpoint has of them."""
    shapes = {"gate_up": (2, 6, 4), "down": (2, 4, 3), "sinks": (5,)}
    weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    stored = {"e.0.sinks": weights["sinks"]}
    for expert in range(2):
        stored[f"e.{expert}.gate"], stored[f"e.{expert}.up"] = weights["gate_up"][expert].chunk(2)
        stored[f"e.{expert}.down"] = weights["down"][expert]
    return weights, stored


def test_experts_that_are_stacked_here_and_apart_in_a_checkpoint_have_one_place_each() -> None:
    model = Experts()
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    located = recorded(model, *stacked(), world=1).places(model)
    assert {name: len(parts) for name, parts in located.items()} == {"gate_up": 1, "down": 1, "sinks": 1}
    assert not any(p.any() for p in model.parameters())
    assert addresses == {name: p.data_ptr() for name, p in model.named_parameters()}
    for name, (place,) in located.items():
        whole = torch.randn(place.shape)
        place.tensor.copy_(share(whole, place))
        held = {"gate_up": model.w13, "down": model.w2.mT, "sinks": model.sinks}[name]
        assert torch.equal(held, whole)
        assert checksums([(name, place.tensor)]) == checksums([(name, whole)])


def test_a_tally_of_transposed_experts_follows_what_is_written() -> None:
    model = Experts()
    (place,) = recorded(model, *stacked(), world=1).places(model)["down"]
    tally, whole = ChecksumTally([Shard("down", place.tensor)]), torch.randn(2, 4, 3)
    place.tensor.copy_(whole)
    assert tally.take() == checksums([("down", whole)])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("doubled", r"'sinks' .* is computed from the trainer's weights.*restart"),
        ("in place", r"'sinks' .* is computed from the trainer's weights"),
        ("narrow", r"'sinks' \(torch.bfloat16, .* or of another type; use sync: restart"),
        ("forgotten", r"'w13' .* has 48 numbers, the trainer gives 24; use sync: restart"),
        ("failing", r"loader of Experts failed on tensors without values .*no such layer"),
    ],
)
def test_what_a_loader_does_beyond_placing_is_refused_by_name(kind: str, message: str) -> None:
    model = Experts(kind)
    with pytest.raises(EngineError, match=message):
        recorded(model, *stacked(), world=1)


@pytest.mark.parametrize("kind", ["doubled", "in place", "narrow"])
def test_what_a_loader_computes_of_little_is_computed_again(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parameter_map, "_MOST_SOURCES", 1.0)
    model = Experts(kind)
    known = recorded(model, *stacked(), world=1)
    assert (known.derived, [one.key for one in known.stored]) == (("sinks",), ["e.0.sinks"])
    with pytest.raises(EngineError, match=r"'e.0.sinks' is not read from .*; use sync: restart"):
        sources_of(str(tmp_path), known, torch.float32, torch.device("cpu"))
    first, new = torch.randn(2, 5)
    save_file({"e.0.sinks": first}, tmp_path / "model.safetensors")
    sources = sources_of(str(tmp_path), known, torch.float32, torch.device("cpu"))
    model.load_weights([("e.0.sinks", first)])
    held, before = model.sinks.data, model.sinks.data.clone()
    assert not known.stale(model, sources)
    assert known._replace(stored=()).stale(model, sources)  # a loader that computes it of something else
    (place,) = known.places(model, sources)["sinks"]
    place.tensor.copy_(share(new, place))
    assert known.stale(model, sources)
    assert torch.equal(model.sinks, before)  # what is sampled from is only looked at
    known.derive(model, sources)
    assert not known.stale(model, sources)
    assert torch.equal(held, {"doubled": new * 2, "in place": -new.exp(), "narrow": new.bfloat16()}[kind])


def test_a_loader_that_binds_parameters_anew_changes_no_model() -> None:
    model = Experts("rebound")
    before = model.w2
    recorded(model, *stacked(), world=1)
    assert model.w2 is before


def test_layers_that_were_repacked_are_refused() -> None:
    model = trained("Llama")
    fake = served(model, Worker())
    weight = fake.lm_head.weight
    fake.lm_head.cpu_linear = lambda x, _weight, bias: nn.functional.linear(x, weight, bias)
    with pytest.raises(EngineError, match=r"'lm_head.weight' .* was repacked .* the copy is what is read"):
        mapped(fake, model)


def test_experts_that_a_processor_has_repacked_are_refused() -> None:
    tensors, weights = stacked()
    model = Experts()
    model.w13_weight = None  # as vLLM calls it
    with pytest.raises(EngineError, match=r"'w13'.*vLLM repacks for a processor; use sync: restart"):
        recorded(model, tensors, weights, world=1)
