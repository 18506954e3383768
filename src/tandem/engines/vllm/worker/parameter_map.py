"""Map of the trainer's tensors to vLLM's parameters: what vLLM's own loader does, watched once.

The loader is handed tensors without values. All that it does to them is to take views, whose place in the tensor is
known from offset and strides, and to copy these into parameters; a copy is noted instead of made. So whatever it fuses,
renames, transposes or slices among ranks needs no rule here. What it computes, of small tensors such as a recurrence's
decay, it computes again from a copy of the trainer's. Nothing here imports vLLM.
"""

from __future__ import annotations

import bisect
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.errors import ConfigError, EngineError

RESTART = "use sync: restart for this model"
SOURCE = "tandem.source."
"""Begins the name of a tensor that is kept for the loader to compute with."""
_MOST_SOURCES = 1 / 64
"""Of a model's numbers, at most, are kept so."""


class TensorPlace(NamedTuple):
    """A part of a trainer's tensor that this rank holds."""

    tensor: Tensor
    """View into vLLM's parameter, with the dimensions of the trainer's tensor."""
    parameter: str
    first: tuple[int, int]
    """Row and column that the view's first element has in the whole tensor, whose later dimensions are one."""
    shape: tuple[int, ...]
    """Of the whole tensor, over all ranks."""


class Region(NamedTuple):
    """A box of a trainer's tensor, and where its elements lie in a parameter."""

    parameter: str
    first: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    """Of the first element, from the parameter's own."""
    strides: tuple[int, ...]
    """In the parameter, by the tensor's dimensions."""


class Stored(NamedTuple):
    """A tensor as a checkpoint has it: a view of one of the trainer's."""

    key: str
    """Its name there."""
    source: str
    """The trainer's tensor."""
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, source: Tensor) -> Tensor:
        """The view."""
        return source.as_strided(self.size, self.strides, self.offset)


class ParameterMap(NamedTuple):
    """Where this rank holds what; it outlives the storage, which may be moved."""

    shapes: Mapping[str, tuple[int, ...]]
    regions: Mapping[str, list[Region]]
    stored: tuple[Stored, ...] = ()
    """What the loader computes with."""
    derived: tuple[str, ...] = ()
    """Parameters that it computes of that."""

    def places(self, model: nn.Module, sources: Mapping[str, Tensor] | None = None) -> dict[str, list[TensorPlace]]:
        """The same as views into the parameters that the model has now, and into ``sources``."""
        parameters = {_bare(name): (name, p.data) for name, p in model.named_parameters()}
        parameters |= {SOURCE + name: (SOURCE + name, tensor) for name, tensor in (sources or {}).items()}
        return {
            name: [_place(*parameters[region.parameter], region, self.shapes[name]) for region in regions]
            for name, regions in self.regions.items()
        }

    def derive(self, model: nn.Module, sources: Mapping[str, Tensor]) -> None:
        """Have the loader compute what it computes, in place."""
        if self.stored:
            with torch.no_grad(), _unwrapped(model):
                model.load_weights((one.key, one.of(sources[one.source])) for one in self.stored)  # type: ignore[operator]

    def stale(self, model: nn.Module, sources: Mapping[str, Tensor]) -> bool:
        """Whether some parameter has not the bits that the loader computes of ``sources``; what is read stays."""
        with _unwrapped(model):
            parameters = [model.get_parameter(name) for name in self.derived]
        held = [parameter.data for parameter in parameters]
        for parameter in parameters:  # of no numbers: what is not computed is seen
            parameter.data = torch.full_like(parameter.data, math.nan)
        try:
            self.derive(model, sources)
            return not all(torch.equal(p.data, bits) for p, bits in zip(parameters, held, strict=True))
        finally:
            for parameter, bits in zip(parameters, held, strict=True):
                parameter.data = bits


def _place(name: str, parameter: Tensor, region: Region, shape: tuple[int, ...]) -> TensorPlace:
    column = sum(i * step for i, step in zip(region.first[1:], _contiguous(shape)[1:], strict=True))
    return TensorPlace(
        tensor=parameter.as_strided(region.size, region.strides, parameter.storage_offset() + region.offset),
        parameter=name,
        first=(region.first[0] if shape else 0, column),
        shape=shape,
    )


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
    part, rest = tensor, place.first[0] * math.prod(place.shape[1:]) + place.first[1]
    for dim, step in enumerate(_contiguous(place.shape)):
        part = part.narrow(dim, rest // step, place.tensor.shape[dim])
        rest %= step
    return part


def tensors_of(name: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The trainer's tensors of a model's folder or id, without values, and what a checkpoint has of them, as views.

    Raises:
        EngineError: this environment's transformers does not know the model.
    """
    from transformers import AutoConfig
    from transformers.core_model_loading import revert_weight_conversion

    from tandem.model.packing import causal_class

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        with torch.device("meta"):
            model = causal_class(config).from_config(config, dtype=dtype)
        with torch.no_grad(), _Views():  # type: ignore[no-untyped-call]
            weights = {key: parameter.detach() for key, parameter in model.named_parameters()}
            buffers = {k: v for k, v in model.state_dict().items() if k in dict(model.named_buffers())}
            return weights, revert_weight_conversion(model, weights | buffers)
    except (OSError, ValueError, ConfigError) as error:
        raise EngineError(f"the engine's transformers cannot make the trainer's model: {error}; {RESTART}") from error


def sources_of(name: str, known: ParameterMap, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """The tensors that a loader computes with, by the trainer's names, from a model's folder or id.

    Raises:
        EngineError: no safetensors file there has one.
    """
    from safetensors import SafetensorError, safe_open
    from transformers.utils.hub import cached_file

    sources = {one.source: torch.empty(known.shapes[one.source], dtype=dtype, device=device) for one in known.stored}
    ways: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    index = cached_file(name, "model.safetensors.index.json", **ways)
    files = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"] if index else {}
    for one in known.stored:
        try:
            file = cached_file(name, files.get(one.key, "model.safetensors"), **ways)
            with safe_open(file or f"{name}/model.safetensors", "pt") as tensors:
                one.of(sources[one.source]).copy_(tensors.get_tensor(one.key))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise EngineError(f"{one.key!r} is not read from {name!r} as it is trained: {error}; {RESTART}") from error
    return sources


def recorded(
    model: nn.Module, weights: Mapping[str, Tensor], stored: Mapping[str, Tensor], *, world: int
) -> ParameterMap:
    """Watch vLLM's loader.

    Args:
        model: vLLM's, loaded; its values are left alone.
        weights: the trainer's tensors, on the meta device.
        stored: the same as a checkpoint has them: views of ``weights`` under other names, and buffers.
        world: tensor-parallel workers.

    Raises:
        EngineError: the loader fails, or computes what it stores; a tensor or a parameter is not covered.
    """
    recording = _Recording(weights, stored)
    with _unwrapped(model), _kept(model):
        recording.parameters = _Parameters(model)
        try:
            with torch.no_grad(), recording:
                model.load_weights(recording.handed_out())  # type: ignore[operator]
        except Exception as error:
            raise EngineError(
                f"vLLM's loader of {type(model).__name__} failed on tensors without values ({error!r}); {RESTART}"
            ) from error
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        derived, computed_with = recording.derivation()
        for name in {one.source for one in computed_with}:
            first = (0,) * len(shapes[name])
            recording.regions[name] = [Region(SOURCE + name, first, shapes[name], 0, _contiguous(shapes[name]))]
        regions = {name: _merged(recording.regions[name]) for name in shapes}
        known = ParameterMap(shapes=shapes, regions=regions, stored=computed_with, derived=derived)
        _check(model, recording, known, world)
    return known


class _Parameters:
    """A model's parameters by address."""

    def __init__(self, model: nn.Module):
        self.named = {name: p.data for name, p in model.named_parameters()}
        self._sorted = sorted((p.data_ptr(), name) for name, p in self.named.items() if p.numel())

    def find(self, tensor: Tensor) -> str | None:
        """The one in which a tensor begins."""
        at = bisect.bisect_right(self._sorted, (tensor.data_ptr(), "\U0010ffff")) - 1
        if at < 0:
            return None
        start, name = self._sorted[at]
        return name if tensor.data_ptr() - start < self.named[name].nbytes else None


class _Views(TorchDispatchMode):
    """What would copy a tensor without values gives a view of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in ("aten::clone", "aten::_to_copy") and args[0].is_meta:
            if kwargs.get("dtype") in (None, args[0].dtype):
                return torch.ops.aten.alias(args[0])
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class _Recording(_Views):
    """Notes copies of tensors without values into parameters, and makes none."""

    parameters: _Parameters

    def __init__(self, weights: Mapping[str, Tensor], stored: Mapping[str, Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {_storage(weight): (name, weight) for name, weight in weights.items()}
        self._stored, self._key = stored, ""
        self._buffers = {_storage(tensor) for tensor in stored.values()} - self._weights.keys()
        self.regions: dict[str, list[Region]] = defaultdict(list)
        self.covered: dict[str, int] = defaultdict(int)
        """Elements that a loader wrote, by parameter."""
        self.computed: set[str] = set()
        """Parameters that hold other values than some tensor's own."""
        self._fed: dict[str, set[int]] = defaultdict(set)
        """Storages of the tensors that went into a parameter."""

    def handed_out(self) -> Iterator[tuple[str, Tensor]]:
        """What the loader is given; it is to take one after the other."""
        for key, tensor in self._stored.items():
            self._key = key
            yield key, tensor

    def derivation(self) -> tuple[tuple[str, ...], tuple[Stored, ...]]:
        """Parameters that the loader computes, and all that it computes them with; none where that is much."""
        derived, before = set(self.computed), -1
        while len(derived) > before:  # what else goes into one is computed with too, wherever it goes
            before = len(derived)
            storages = set[int]().union(*(self._fed[name] for name in derived))
            derived |= {name for name, fed in self._fed.items() if fed & storages}
        size = {key: tensor.numel() for key, (_, tensor) in self._weights.items()}
        if not storages <= size.keys() or sum(size[key] for key in storages) > _MOST_SOURCES * sum(size.values()):
            return (), ()
        return tuple(sorted(derived)), tuple(
            Stored(key, self._weights[at][0], tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            for key, tensor in self._stored.items()
            if (at := _storage(tensor)) in storages
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if func._schema.is_mutable and args and isinstance(args[0], Tensor) else None
        if target is None or target.is_meta:
            return super().__torch_dispatch__(func, types, args, kwargs)
        name = self.parameters.find(target)
        has_values = not any(isinstance(value, Tensor) and value.is_meta for value in args[1:])
        if name is None and has_values:
            return func(*args, **kwargs or {})
        if name is not None and func._schema.name == "aten::copy_" and not has_values:
            self._note(name, target, args[1])
        elif name is not None and func._schema.name not in ("aten::fill_", "aten::zero_"):  # what pads a vocabulary
            self.computed.add(name)
            self._fed[name].add(_storage(self._stored[self._key]))
        return target

    def _note(self, name: str, target: Tensor, source: Tensor) -> None:
        self.covered[name] += target.numel()
        if not target.numel() or _storage(source) in self._buffers:
            return
        known, parameter = self._weights.get(_storage(source)), self.parameters.named[name]
        self._fed[name].add(_storage(self._stored[self._key] if known is None else source))
        if known is None or source.dtype != target.dtype:
            self.computed.add(name)
            return
        whole = known[1]
        offset = (target.data_ptr() - parameter.data_ptr()) // parameter.element_size()
        region = _region(tuple(whole.shape), source.expand_as(target), target, name, offset)
        if region is None:
            self.computed.add(name)
        else:
            self.regions[known[0]].append(region)


def _region(shape: tuple[int, ...], source: Tensor, target: Tensor, name: str, offset: int) -> Region | None:
    """A copied view of a contiguous tensor as a box of it; None where it is no box."""
    steps, rest, first = _contiguous(shape), source.storage_offset(), []
    for step in steps:
        first.append(rest // step)
        rest %= step
    size, strides = [1] * len(shape), [0] * len(shape)
    for n, step, stride in zip(source.shape, source.stride(), target.stride(), strict=True):
        while n > 1:
            dim = next((d for d in range(len(shape)) if steps[d] == step and shape[d] > 1), None)
            if dim is None or size[dim] > 1:
                return None
            here = n if n <= shape[dim] - first[dim] else shape[dim]
            if n % here or first[dim] + here > shape[dim]:
                return None
            size[dim], strides[dim] = here, stride
            n, step, stride = n // here, step * shape[dim], stride * here
    return Region(parameter=name, first=tuple(first), size=tuple(size), offset=offset, strides=tuple(strides))


def _merged(regions: list[Region]) -> list[Region]:
    """Regions that lie side by side, in the tensor and evenly in a parameter, as one."""
    for dim in reversed(range(len(regions[0].first)) if regions else ()):
        out: list[Region] = []
        for region in sorted(regions, key=lambda r: (r.parameter, _without(r.first, dim), r.first[dim])):
            if out and (joined := _joined(out[-1], region, dim)):
                out[-1] = joined
            else:
                out.append(region)
        regions = out
    return regions


def _joined(one: Region, other: Region, dim: int) -> Region | None:
    """Two regions as one that is longer in a dimension."""
    step, rest = divmod(other.offset - one.offset, one.size[dim])
    is_next = one.parameter == other.parameter and other.first[dim] == one.first[dim] + one.size[dim]
    is_even = not rest and step > 0 and all(r.size[dim] == 1 or r.strides[dim] == step for r in (one, other))
    is_alike = all(_without(getattr(one, of), dim) == _without(getattr(other, of), dim) for of in _BOX)
    if not (is_next and is_even and is_alike):
        return None
    size, strides = list(one.size), list(one.strides)
    size[dim], strides[dim] = one.size[dim] + other.size[dim], step
    return one._replace(size=tuple(size), strides=tuple(strides))


_BOX = ("first", "size", "strides")


def _without(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return values[:dim] + values[dim + 1 :]


def _check(model: nn.Module, recording: _Recording, known: ParameterMap, world: int) -> None:
    for name, parameter in recording.parameters.named.items():
        what = f"the engine's {name!r} ({parameter.dtype}, {tuple(parameter.shape)})"
        layer = model.get_submodule(name.rpartition(".")[0])
        # A product that is a closure reads the copy that it closed over: also of layers that keep their weight.
        if not parameter.numel() or getattr(getattr(layer, "cpu_linear", None), "__closure__", None):
            raise EngineError(
                f"{what} was repacked for this processor at load, and the copy is what is read: writing the weight "
                "would change nothing. Start the engine through Tandem, which keeps weights as they are"
            )
        if parameter.device.type == "cpu" and hasattr(layer, "w13_weight"):
            raise EngineError(f"{what} is of experts, whose weights vLLM repacks for a processor; {RESTART}")
        if name in known.derived:
            continue
        if name in recording.computed:
            raise EngineError(f"{what} is computed from the trainer's weights, or of another type; {RESTART}")
        written, is_padded = recording.covered[name], hasattr(layer, "org_vocab_size")
        if written > parameter.numel() or (written < parameter.numel() and not is_padded):
            raise EngineError(f"{what} has {parameter.numel()} numbers, the trainer gives {written}; {RESTART}")
    for name, shape in known.shapes.items():
        here = sum(math.prod(region.size) for region in known.regions[name])
        if world == 1 and here != math.prod(shape):
            raise EngineError(f"the engine has {here} of the {math.prod(shape)} numbers of {name!r}; {RESTART}")
        if any(region.size[2:] != shape[2:] for region in known.regions[name]):
            raise EngineError(f"the engine's workers split the last dimension of {name!r} {shape}; {RESTART}")


@contextmanager
def _unwrapped(model: nn.Module) -> Iterator[None]:
    """Take away what vLLM's adapters put around layers: its loader knows the model without."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if hasattr(child, "base_layer")
    ]
    try:
        for parent, name, child in wrapped:
            parent._modules[name] = child.base_layer  # type: ignore[assignment]
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Undo what a loader does to the parameters themselves."""
    kept = [(module, dict(module._parameters)) for module in model.modules()]
    data = [(p, p.data) for _, named in kept for p in named.values() if p is not None]
    try:
        yield
    finally:
        for module, named in kept:
            module._parameters.update(named)
        for parameter, tensor in data:
            if parameter.data.data_ptr() != tensor.data_ptr():
                parameter.data = tensor


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _bare(name: str) -> str:
    """A parameter's name without what adapters add to it."""
    return f".{name}".replace(".base_layer.", ".").removeprefix(".")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
