"""Hugging Face tensors in vLLM's parameters: stand-ins that are sliced, fused and padded as vLLM's own layers are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.vllm_workers import HEAD, HIDDEN, MLP, PACKED, VOCABULARY, Fp8LinearMethod, Worker, norm, served, trained
from torch import Tensor, nn

from tandem.engines.vllm.worker.parameter_map import TensorPlace, places
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
        mapped = places(fake, world=world)
        assert mapped.keys() == whole.keys()
        for name, parts in mapped.items():
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
        mapped = places(served(model, Worker(rank, world)), world=world)
        shards |= {(n, p.first): Shard(n, p.tensor, p.first) for n, parts in mapped.items() for p in parts}
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
        for name, parts in places(fake, world=2).items():
            for place in parts:
                place.tensor.copy_(part(new.get_parameter(name), place))
        for name, parameter in fresh.named_parameters():
            assert torch.equal(fake.get_parameter(name), parameter), name  # padding rows too: they stay zero


def test_a_rank_that_has_only_padding_of_the_vocabulary_has_an_empty_place() -> None:
    weight = torch.randn(5, HIDDEN)
    seen = []
    for rank in range(4):
        model = nn.Module()
        model.embed = Worker(rank, 4).vocabulary(weight, padded=8)
        mapped = places(model, world=4)
        seen.append((mapped["embed.weight"][0].first[0], len(mapped["embed.weight"][0].tensor)))
    assert seen == [(0, 2), (2, 2), (4, 1), (5, 0)]


def test_layers_that_are_whole_on_every_rank_begin_at_their_first_row() -> None:
    for rank in range(2):
        worker, alone = Worker(rank, 2), Worker()
        model = nn.Module()
        model.split = worker.column(nn.Linear(HIDDEN, MLP))
        model.column = alone.column(nn.Linear(HIDDEN, MLP))  # disable_tp
        model.up = alone.row(nn.Linear(MLP, HIDDEN))
        model.embed = alone.vocabulary(torch.randn(VOCABULARY, HIDDEN))
        model.router = worker.layer(torch.randn(8, HIDDEN), input_size=HIDDEN, output_size=8)  # ReplicatedLinear
        mapped = places(model, world=2)
        first = {name: place.first for name, (place,) in mapped.items()}
        assert first.pop("split.weight") == first.pop("split.bias") == (rank * MLP // 2, 0)
        assert set(first.values()) == {(0, 0)}


def test_values_may_have_another_head_size() -> None:
    worker = Worker()
    attention = SimpleNamespace(
        q_proj=nn.Linear(HIDDEN, 4 * HEAD), k_proj=nn.Linear(HIDDEN, 2 * HEAD), v_proj=nn.Linear(HIDDEN, 2 * 8)
    )
    model = nn.Module()
    model.packed_modules_mapping = PACKED
    model.qkv_proj = worker.qkv(attention)
    model.qkv_proj.v_head_size = 8
    mapped = places(model, world=1)
    assert torch.equal(mapped["v_proj.weight"][0].tensor, attention.v_proj.weight)
    del model.qkv_proj.v_head_size  # then all heads are of one size, and the rows do not suffice
    with pytest.raises(EngineError, match=r"'qkv_proj.weight' has 112 rows, 128 were expected.*v_proj"):
        places(model, world=1)


def test_a_parameter_that_no_place_covers_wholly_is_named() -> None:
    model = served(trained("Llama"), Worker())
    gate_up = model.model.layers[1].mlp.gate_up_proj
    gate_up.weight = nn.Parameter(torch.zeros(2 * MLP + 1, HIDDEN))
    with pytest.raises(EngineError, match=rf"layers.1.mlp.gate_up_proj.weight' has {2 * MLP + 1} rows, {2 * MLP} were"):
        places(model, world=1)


def test_what_cannot_be_mapped_is_refused_by_name() -> None:
    def refused(message: str, *, world: int = 1, **layers: nn.Module) -> None:
        model = nn.Module()
        model.packed_modules_mapping = PACKED | {"in_proj": ["a", "b"]}
        for name, layer in layers.items():
            setattr(model, name, layer)
        with pytest.raises(EngineError, match=message):
            places(model, world=world)

    one, two = Worker(), Worker(0, 2)
    weight = torch.randn(8, HIDDEN)
    linear = nn.Linear(HIDDEN, 8, bias=False)
    attention = trained("Llama").model.layers[0].self_attn
    experts = nn.Module()
    experts.w13_weight = nn.Parameter(torch.randn(4, 8, HIDDEN))
    refused(r"'experts.w13_weight' .*\(4, 8, 64\).*experts", experts=experts)
    refused(r"'conv.weight' .*\(8, 1, 4\)", conv=one.layer(torch.randn(8, 1, 4)))
    loggers = nn.Module()
    loggers.loggers = nn.Parameter(torch.randn(8))
    refused(r"'attn.loggers' .*\(8,\).*not mapped", attn=loggers)
    integers = nn.Module()
    integers.weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.int32), requires_grad=False)
    refused("'packed.weight' .*torch.int32", packed=integers)
    refused("'x.weight' .*Fp8LinearMethod", x=one.layer(weight, quant_method=Fp8LinearMethod()))
    refused("'o_proj.weight' was repacked", o_proj=one.layer(torch.empty(0)))
    kept = one.vocabulary(weight)
    kept.cpu_linear = lambda x, _weight, bias: nn.functional.linear(x, weight, bias)
    refused("'lm_head.weight' was repacked .* the copy is what is read", lm_head=kept)
    sharded = norm(torch.ones(8))
    sharded.weight.weight_loader = print
    refused("'q_norm.weight' .* not mapped", q_norm=sharded)
    refused("holds 3 tensors, .* has 1: c_attn; .*restart", c_attn=one.qkv(attention))
    refused("'in_proj' holds 1 tensors, .* has 2: a, b", in_proj=one.merged(linear))
    refused("'in_proj' holds 1 tensors, .* has 2: a, b", in_proj=one.layer(weight))
    refused("'up' holds 2 tensors, .* has 1: up", up=one.merged(linear, linear))
    refused("'up.weight' is split in 2, among 4 workers", world=4, up=two.column(linear))
