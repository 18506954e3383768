"""Map of Hugging Face's tensors to vLLM's parameters: fused, padded, tied, wrapped, and sliced among ranks.

Nothing here imports vLLM: layers are told apart by the attributes that they have in every release in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tandem.errors import EngineError

WRAPPED = "base_layer."
"""vLLM's adapters wrap a layer, and its parameters then have this in their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A part of a Hugging Face tensor that this rank holds."""

    tensor: Tensor
    """View into vLLM's parameter."""
    parameter: str
    first: tuple[int, int]
    """Row and column that the view's first element has in the whole tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor, over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One of the tensors fused in a parameter: ``size`` of its rows here, from row ``first`` of ``total``."""

    name: str
    size: int
    first: int
    total: int


def share(tensor: Tensor, place: TensorPlace) -> Tensor:
    """The part of a whole tensor that lies at a place.

    Raises:
        EngineError: it is of another shape or type, which copying would hide.
    """
    if tuple(tensor.shape) != tuple(place.shape) or tensor.dtype != place.tensor.dtype:
        raise EngineError(
            f"the trainer sends {tuple(tensor.shape)} of {tensor.dtype} for {place.parameter!r}, the engine holds "
            f"{tuple(place.shape)} of {place.tensor.dtype}; give both the same model and dtype"
        )
    rows = tensor[place.first[0] : place.first[0] + place.tensor.shape[0]]
    return rows if place.tensor.dim() < 2 else rows[:, place.first[1] : place.first[1] + place.tensor.shape[1]]


def places(model: nn.Module, *, world: int) -> dict[str, list[TensorPlace]]:
    """Every Hugging Face tensor's places on this rank; tied ones once, under the name that comes first.

    Args:
        model: vLLM's.
        world: tensor-parallel workers.

    Raises:
        EngineError: a parameter of a kind that cannot be mapped, or is not covered by its tensors, or layers that are
            spread over workers.
    """
    placements: dict[str, list[TensorPlace]] = {}
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    slices = {1}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        layer = model.get_submodule(owner)
        _require_plain(name, leaf, parameter, layer)
        slices.add(getattr(layer, "tp_size", 1))
        if not slices <= {1, world}:
            raise EngineError(
                f"the engine's {name!r} is split in {layer.tp_size}, among {world} workers: only layers that every "
                "worker has a slice or all of can be written in place; use tensor parallelism alone, or sync: restart"
            )
        column, columns = _columns(layer, parameter)
        parts = list(_parts(_unwrapped(owner), layer, parameter, packed))
        row, rows = 0, sum(part.size for part in parts)
        # Else values would be written beyond it, or some of it never; but for the padding of a vocabulary.
        if rows > parameter.shape[0] or (rows < parameter.shape[0] and not hasattr(layer, "org_vocab_size")):
            raise EngineError(
                f"the engine's {name!r} has {parameter.shape[0]} rows, {rows} were expected of the tensors fused in "
                f"it: {', '.join(part.name for part in parts)}; use sync: restart for this model"
            )
        for part in parts:
            place = TensorPlace(
                tensor=parameter.data[row : row + part.size],
                parameter=name,
                first=(part.first, column),
                shape=(part.total, columns) if parameter.dim() > 1 else (part.total,),
            )
            placements.setdefault(f"{part.name}.{leaf}", []).append(place)
            row += part.size
    return placements


def _require_plain(name: str, leaf: str, parameter: Tensor, layer: nn.Module) -> None:
    # A product that is a closure reads the copy that it closed over: on a CPU, also of layers that keep their weight.
    if parameter.numel() == 0 or getattr(getattr(layer, "cpu_linear", None), "__closure__", None):
        raise EngineError(
            f"the engine's {name!r} was repacked for this processor at load, and the copy is what is read: writing "
            "the weight would change nothing. Start the engine through Tandem, which keeps weights as they are"
        )
    quantised = type(getattr(layer, "quant_method", None)).__name__
    # Norms and the like have no method, and no loader of their own.
    known = "Unquantized" in quantised or (quantised == "NoneType" and not hasattr(parameter, "weight_loader"))
    if known and leaf in ("weight", "bias") and parameter.dim() in (1, 2) and parameter.is_floating_point():
        return
    raise EngineError(
        f"the engine's {name!r} ({parameter.dtype}, {tuple(parameter.shape)}, {quantised}) is quantised, of experts or "
        "of another kind that is not mapped to a Hugging Face tensor; use sync: restart for this model"
    )


def _parts(owner: str, layer: Any, parameter: Tensor, packed: Mapping[str, list[str]]) -> Iterator[_Part]:
    """The rows of a parameter, tensor by tensor."""
    parent, _, leaf = owner.rpartition(".")
    names = [f"{parent}.{name}" if parent else name for name in packed.get(leaf, [leaf])]
    rows = parameter.shape[0]
    if hasattr(layer, "total_num_kv_heads"):  # QKVParallelLinear
        yield from _qkv(owner, names, layer)
    elif hasattr(layer, "org_vocab_size"):  # embeddings and the output head, padded and sliced
        first, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
        yield _Part(name=owner, size=end - first, first=first, total=layer.org_vocab_size)
    elif hasattr(layer, "gather_output"):  # ColumnParallelLinear, MergedColumnParallelLinear
        totals = getattr(layer, "output_sizes", [layer.output_size])
        _require_names(owner, names, len(totals))
        for name, total in zip(names, totals, strict=True):
            size = total // layer.tp_size
            yield _Part(name=name, size=size, first=layer.tp_rank * size, total=total)
    else:  # RowParallelLinear, of which the columns are sliced; ReplicatedLinear; norms
        _require_names(owner, names, 1)
        yield _Part(name=owner, size=rows, first=0, total=rows)


def _require_names(owner: str, names: list[str], count: int) -> None:
    if len(names) != count:
        raise EngineError(
            f"the engine's {owner!r} holds {count} tensors, the model's checkpoint has {len(names)}: "
            f"{', '.join(names)}; use sync: restart for this model"
        )


def _qkv(owner: str, names: list[str], layer: Any) -> Iterator[_Part]:
    """Queries, keys and values; where there are fewer key heads than ranks, several ranks hold the same."""
    _require_names(owner, names, 3)  # one tensor might have them in another order
    tp_rank = layer.tp_rank
    copies = layer.num_kv_head_replicas
    value_size = getattr(layer, "v_head_size", layer.head_size)
    query = layer.num_heads * layer.head_size
    total = layer.total_num_heads * layer.head_size
    yield _Part(name=names[0], size=query, first=tp_rank * query, total=total)
    for name, head in ((names[1], layer.head_size), (names[2], value_size)):
        size = layer.num_kv_heads * head
        total = layer.total_num_kv_heads * head
        yield _Part(name=name, size=size, first=tp_rank // copies * size, total=total)


def _unwrapped(owner: str) -> str:
    """A layer's name without what adapters add to it."""
    return f"{owner}.".replace(f".{WRAPPED}", ".").removesuffix(".")


def _columns(layer: Any, parameter: Tensor) -> tuple[int, int]:
    """First column here, and columns in all; RowParallelLinear splits them among ranks."""
    if parameter.dim() < 2:
        return 0, 1
    here = parameter.shape[1]
    if hasattr(layer, "input_is_parallel") and layer.input_size_per_partition != layer.input_size:
        return layer.tp_rank * here, layer.input_size
    return 0, here
