"""Where each Hugging Face tensor lies in the storage that vLLM computes with, on one rank.

vLLM fuses q, k and v, and gate and up, into one parameter each, pads the vocabulary, and cuts layers over the ranks of
a tensor-parallel engine. A map holds views, so that what is written through it is what the next forward pass reads.
Nothing of vLLM is imported: layers are known by the attributes that their own weight loaders work with, and whatever
does not look exactly as expected is refused by name. Names are vLLM's with fused layers taken apart; that they are the
trainer's, and that the values are in their places, is what checksums are compared for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from torch import Tensor, nn

from tandem.errors import EngineError
from tandem.weights.checksums import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One stretch of a Hugging Face tensor in one of vLLM's parameters on this rank."""

    tensor: Tensor
    """View into the engine's storage."""
    parameter: str
    """vLLM's name of the parameter."""
    first: tuple[int, int]
    """Row and column of the view's first element in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    counted: bool
    """False where it repeats what another rank counts, such as norms on ranks after the first."""

    def of(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor that belongs here.

        Raises:
            EngineError: its shape or its type is not the engine's.
        """
        if tuple(whole.shape) != self.shape or whole.dtype != self.tensor.dtype:
            raise EngineError(
                f"a tensor of shape {tuple(whole.shape)} and type {whole.dtype} was to be written into {self.parameter}, "
                f"which holds {self.tensor.dtype} of a tensor of shape {self.shape}; engine and trainer must load the "
                "same model with the same dtype"
            )
        row, column = self.first
        part = whole[row : row + self.tensor.shape[0]]
        return part[:, column : column + self.tensor.shape[1]] if part.ndim == 2 else part


Places = dict[str, list[Place]]
"""Places on this rank by Hugging Face name."""


def places(model: nn.Module, *, rank: int, world: int) -> Places:
    """Map every parameter; ``rank`` and ``world`` are those of the tensor-parallel group.

    Tied tensors are one parameter and appear once, under the first of their names.

    Raises:
        EngineError: names a parameter that cannot be mapped, and why.
    """
    _refuse_copies(model)
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", None) or {}
    found: Places = defaultdict(list)
    for name, parameter in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        layer = _Layer(name, model.get_submodule(path), parameter, rank, world)
        layer.check()
        path = path.replace(".base_layer", "")  # what an adapter's layer wraps
        for module, place in layer.places(path, fused.get(path.rpartition(".")[2])):
            found[f"{module}.{attribute}" if module else attribute].append(place)
    return dict(found)


def shards(found: Places) -> Iterator[Shard]:
    """What this rank contributes to the checksum of each tensor: the sums over all ranks are the whole tensors'."""
    for name, where in found.items():
        yield from (Shard(name, place.tensor, place.first) for place in where if place.counted)


def uncovered(model: nn.Module, found: Places) -> list[str]:
    """Rows of parameters that no place covers, or more than one, beyond the padding of a vocabulary.

    It looks at addresses alone, so places that were found before the storage was moved cover nothing.
    """
    by_parameter: dict[str, list[Tensor]] = defaultdict(list)
    for place in chain.from_iterable(found.values()):
        by_parameter[place.parameter].append(place.tensor)
    out = []
    for name, parameter in model.named_parameters():
        end = 0
        for start, rows in sorted(_rows_of(view, parameter) for view in by_parameter[name]):
            if start != end:
                break
            end = start + rows
        module = model.get_submodule(name.rpartition(".")[0])
        if end != _rows_in_use(module, parameter):
            out.append(f"{name} from row {end}")
    return out


def _rows_of(view: Tensor, parameter: Tensor) -> tuple[int, int]:
    """First row and rows of a view in a parameter; (-1, 0) if it is not whole rows of that storage."""
    step = parameter.stride(0) * parameter.element_size()
    start, rest = divmod(view.data_ptr() - parameter.data_ptr(), step)
    ours = view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    whole = rest == 0 and view.shape[1:] == parameter.shape[1:] and view.stride() == parameter.stride()
    return (start, len(view)) if ours and whole else (-1, 0)


def _rows_in_use(module: nn.Module, parameter: Tensor) -> int:
    indices = getattr(module, "shard_indices", None)
    return len(parameter) if indices is None else int(indices.num_org_elements)


def _refuse_copies(model: nn.Module) -> None:
    """Refuse what hides weights from the map: a repacked copy that is read instead, or layers on another stage."""
    for name, module in model.named_modules():
        if type(module).__name__ == "PPMissingLayer":
            raise EngineError(
                f"{name} lies on another pipeline stage; weights are mapped within one stage: set "
                "pipeline_parallel_size to 1 and use tensor_parallel_size"
            )
        # A CPU layer whose product is a closure reads what it closed over, which is a copy in another layout.
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            _refuse(
                f"{name}.weight", "vLLM reads a copy of it, repacked for this CPU, so it must load without repacking"
            )


def _refuse(name: str, why: str) -> NoReturn:
    raise EngineError(
        f"the engine's parameter {name} cannot be mapped to Hugging Face tensors: {why}. Weights cannot be written in "
        "place in this engine; sync: restart needs no map"
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive rows of a parameter and where they belong."""

    module: str
    rows: int
    first: int
    total: int
    counted: bool


@dataclass(frozen=True, slots=True)
class _Layer:
    """One parameter, the module that owns it and the rank it is on."""

    name: str
    module: Any
    parameter: Tensor
    rank: int
    world: int

    @property
    def attribute(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def size(self) -> int:
        """Ranks that the layer is cut over; 1 where every rank holds it whole."""
        cut = hasattr(self.module, "gather_output") or self.row_parallel or hasattr(self.module, "shard_indices")
        return int(self.module.tp_size) if cut else 1

    @property
    def row_parallel(self) -> bool:
        return hasattr(self.module, "input_is_parallel")

    @property
    def counted(self) -> bool:
        return self.size > 1 or self.rank == 0

    @property
    def place(self) -> int:
        """This rank's number among those that the layer is cut over."""
        return self.rank if self.size > 1 else 0

    def check(self) -> None:
        """Refuse what is not a plain, unquantised layer.

        Raises:
            EngineError: says why.
        """
        if self.parameter.numel() == 0:
            _refuse(self.name, "vLLM emptied it after loading, keeping a copy in another layout")
        if not self.parameter.is_floating_point():
            _refuse(self.name, f"its type is {self.parameter.dtype}, a quantised weight's")
        method = getattr(self.module, "quant_method", None)
        if method is None:
            self._check_plain()
        elif not type(method).__name__.startswith("Unquantized"):
            _refuse(self.name, f"it is quantised ({type(method).__name__})")
        elif self.attribute not in ("weight", "bias"):
            _refuse(self.name, f"only weights and biases of {type(self.module).__name__} could be taken apart")
        if self.size not in (1, self.world) or getattr(self.module, "tp_rank", self.place) != self.place:
            where = f"rank {getattr(self.module, 'tp_rank', '?')} of {self.size}"
            _refuse(self.name, f"its layer is cut for {where}, but this is rank {self.rank} of {self.world}")

    def _check_plain(self) -> None:
        """A module that no linear or embedding method drives holds its parameters whole, as norms do."""
        marked = [mark for mark in ("output_dim", "input_dim", "weight_loader") if hasattr(self.parameter, mark)]
        if marked:
            _refuse(self.name, f"{type(self.module).__name__} loads it in a way of its own ({marked[0]})")
        if self.world > 1 and "norm" not in type(self.module).__name__.lower():
            _refuse(self.name, f"it is not known how {type(self.module).__name__} spreads it over {self.world} ranks")

    def places(self, path: str, fused: Sequence[str] | None) -> Iterator[tuple[str, Place]]:
        """Its places, each with the path of the Hugging Face module."""
        local = self.parameter.detach()
        column, columns = 0, tuple(local.shape[1:])
        parts = self._parts(path, fused)
        if self.row_parallel and self.attribute == "weight":
            column, columns = self.place * local.shape[1], (int(self.module.input_size),)
            if local.shape[1] * self.size != columns[0]:
                _refuse(self.name, f"{self.size} times {local.shape[1]} columns are not its layer's {columns[0]}")
        rows = sum(part.rows for part in parts)
        if len(local) != rows and not (hasattr(self.module, "shard_indices") and len(local) > rows):
            _refuse(self.name, f"it has {len(local)} rows, but its layer's sizes add up to {rows}")
        start = 0
        for part in parts:
            view = local[start : start + part.rows]
            start += part.rows
            if part.rows:
                yield (
                    part.module,
                    Place(
                        tensor=view,
                        parameter=self.name,
                        first=(part.first, column),
                        shape=(part.total, *columns),
                        counted=part.counted,
                    ),
                )

    def _parts(self, path: str, fused: Sequence[str] | None) -> list[_Part]:
        if hasattr(self.module, "shard_indices"):
            return [self._vocabulary(path)]
        # A row-parallel layer's bias and its rows are whole on every rank; only its columns are cut.
        if self.row_parallel:
            rows = len(self.parameter)
            counted = self.counted if self.attribute == "weight" else self.rank == 0
            return [_Part(path, rows, 0, rows, counted)]
        if hasattr(self.module, "total_num_kv_heads"):
            parts = self._heads()
        elif hasattr(self.module, "output_sizes"):
            parts = [self._share(int(size)) for size in self.module.output_sizes]
        else:
            return [self._share(len(self.parameter) * self.size, path)]
        return self._named(parts, path, fused)

    def _vocabulary(self, path: str) -> _Part:
        """The rows of real tokens; those after them are padding."""
        indices = self.module.shard_indices
        if indices.num_added_elements:
            _refuse(self.name, f"it holds {indices.num_added_elements} tokens added by adapters")
        first, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        return _Part(path, end - first, first, int(self.module.org_vocab_size), self.counted)

    def _share(self, total: int, module: str = "") -> _Part:
        """This rank's equal share of so many rows."""
        return _Part(module, total // self.size, self.place * (total // self.size), total, self.counted)

    def _heads(self) -> list[_Part]:
        """Rows of q, k and v; where ranks outnumber key heads, neighbours hold the same one and the first counts."""
        m = self.module
        widths = (m.head_size, getattr(m, "v_head_size", m.head_size))
        copies = int(m.num_kv_head_replicas)
        number, counted = self.place // copies, self.counted and self.place % copies == 0
        q = self._share(m.total_num_heads * m.head_size)
        kv = [
            _Part("", rows, number * rows, m.total_num_kv_heads * width, counted)
            for width in widths
            for rows in (m.num_kv_heads * width,)
        ]
        return [q, *kv]

    def _named(self, parts: Iterable[_Part], path: str, fused: Sequence[str] | None) -> list[_Part]:
        """Give each part its module, or all of them one module where the checkpoint itself is fused."""
        parts, parent = list(parts), path.rpartition(".")[0]
        if fused is None or len(fused) not in (1, len(parts)):
            _refuse(
                self.name, f"the model's packed_modules_mapping does not say which {len(parts)} layers it is made of"
            )
        if len(fused) == len(parts):
            names = [f"{parent}.{leaf}" if parent else leaf for leaf in fused]
            return [_Part(n, p.rows, p.first, p.total, p.counted) for n, p in zip(names, parts, strict=True)]
        total, before, out = sum(part.total for part in parts), 0, []
        for part in parts:
            out.append(_Part(path, part.rows, before + part.first, total, part.counted))
            before += part.total
        return out
