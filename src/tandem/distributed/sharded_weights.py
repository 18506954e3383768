"""Weights cut among the ranks: torch's FSDP2, cut so that each rank's shard is its slice of a tensor-parallel engine.

A rank holds 1/N of the float32 masters, where N ranks hold the whole model together: all, or those of each replica
(HSDP). Each layer's bfloat16 copy is gathered when it is computed with and dropped after; gradients are
reduce-scattered in float32 and *summed*, over replicas too, since the packer has divided already: after each
micro-batch, or once for several, which until then are added up whole on each rank. To publish, a rank rounds its own
masters into the memory of the engine's worker beside it: what the engine's slices have in common with the rank's
shards never travels.

An adapter of frozen weights is not cut: it is small, and every rank has all of it.

Everything here but ``local_parameters`` is collective: all ranks call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from tandem.distributed.slice_writer import SliceWriter
from tandem.distributed.slices import EngineSlice, Slice, shard_dimension, shard_slice
from tandem.errors import ConfigError
from tandem.model import packing
from tandem.model.layers import decoder_layers
from tandem.transport.checksums import ChecksumTally
from tandem.transport.checksums import Shard as ChecksumShard

BACKBONE = "tandem_backbone"
"""Method of the sharded causal model that computes hidden states: the head's weight is gathered with it."""
GATHERED_BYTES = 1 << 26
"""Of the parts of a tensor that one rank gathers at once, unless it is told otherwise."""
BaseNames = Callable[[nn.Module], Mapping[str, nn.Parameter]]
_LOW = (1 << 32) - 1


class ShardedWeights:
    """A causal language model whose parameters are cut among the ranks of a mesh.

    Args:
        model: a transformers model, or PEFT's of one, with weights alike on all ranks, or on the meta device and filled
            after; it is changed in place. Trained parameters become float32 (float64 ones stay so), each rank keeping
            its own shard.
        mesh: of one dimension, or of two: (replicas, shards), where gradients are summed over replicas as well.
        base_names: the weights that are cut, by Hugging Face name; what else the model has is its adapter.
        holders: group of the ranks whose shards are together the slice of the engine's worker beside this one, in the
            order of shards; None: each rank's shard is.

    Raises:
        ConfigError: names a parameter that cannot be cut, or says that the model's layers are not known.

    Example:
        >>> mesh = init_device_mesh("cuda", (8,))               # doctest: +SKIP
        >>> weights = ShardedWeights(model, mesh, base_names)   # doctest: +SKIP
        >>> loss_of(weights.hidden(tokens_BT, positions_BT, plan)).backward()  # doctest: +SKIP
    """

    def __init__(self, model: Any, mesh: DeviceMesh, base_names: BaseNames, holders: Any = None):
        if not (layers := decoder_layers(model)):
            raise ConfigError(
                f"distributed.shard: weights does not know the layers of {type(model).__name__}; use shard: states"
            )
        self.model, self.causal = model, getattr(model, "get_base_model", lambda: model)()
        self.mesh = mesh
        self._base_names = base_names
        self.dtype: torch.dtype = next(model.parameters()).dtype
        """In which the model computes and is published."""
        cuda = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        """Of this rank, as FSDP chooses it; a model that is elsewhere, say on the host, comes here layer by layer."""
        self.group = (mesh if mesh.ndim == 1 else mesh["shards"]).get_group()
        """Ranks that hold the whole model together."""
        self._holders = holders
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.replica, self.num_replicas = (0, 1) if mesh.ndim == 1 else (mesh.get_local_rank(0), mesh.size(0))
        """Which of the replicas of all shards this rank has one of, and how many there are."""
        # Of the parameters themselves none is held: what is cut is freed before the next layer is.
        base = base_names(model)
        self.shapes = {name: tuple(p.shape) for name, p in base.items()}
        """Of the whole tensors."""
        self._dimensions = {id(p): shard_dimension(name, p.shape, self.ranks) for name, p in base.items()}
        del base
        narrow = self.dtype in (torch.bfloat16, torch.float16)
        self._precision = MixedPrecisionPolicy(
            param_dtype=self.dtype if narrow else None,
            reduce_dtype=torch.float32 if narrow else None,
            cast_forward_inputs=False,
        )
        self._cut_modules: list[FSDPModule] = []
        for layer in layers:
            self._cut(layer, reshard_after_forward=True)
        # Embeddings, last norm and head: needed at both ends of a pass, so they stay until the backward pass is over.
        self._cut(self.causal, reshard_after_forward=False)
        # By one pass: parts of weights are collected in each, which takes all ranks.
        setattr(self.causal, BACKBONE, partial(packing.hidden, self.causal, at_once=True))
        register_fsdp_forward_method(self.causal, BACKBONE)

    def _cut(self, module: nn.Module, *, reshard_after_forward: bool) -> None:
        whole = {p for p in module.parameters() if not isinstance(p, DTensor)}
        adapter = {p for p in whole if id(p) not in self._dimensions}
        for parameter in whole - adapter:
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=lambda parameter: Shard(self._dimensions[id(parameter)]),
            mp_policy=self._precision,
            ignored_params=adapter,
        )
        assert isinstance(module, FSDPModule)
        self._cut_modules.append(module)
        module.set_gradient_divide_factor(1.0)
        # A sum as it is: NCCL would multiply by a factor of 1 on the way, and gloo knows no other reduction.
        module.set_force_sum_reduction_for_comms(True)

    @torch.no_grad()
    def fill(self, whole: nn.Module | None) -> None:
        """Take the weights and buffers of the first rank's whole model, tensor by tensor; for a model on meta.

        Args:
            whole: the first rank's, whose parameters are emptied as they are taken; None on other ranks.
        """
        self.model.to_empty(device=self.device)
        base = {} if whole is None else self._base_names(whole)
        for name, parameter in self._base_names(self.model).items():
            _local(parameter).copy_(self.part_sent(name, base.get(name)))
            if name in base:
                base[name].data = base[name].data.new_empty(0)
        others = {} if whole is None else {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if not isinstance(tensor, DTensor):
                tensor.copy_(self.sent(others.get(name), tensor.shape, tensor.dtype))

    def part_sent(self, name: str, whole: Tensor | None) -> Tensor:
        """This rank's part of a whole tensor of the first rank, None on other ranks, in the dtype of the model."""
        return self.part(name).of(self.sent(whole, self.shapes[name], self.dtype))

    def sent(self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The first rank's tensor, on every rank's device."""
        if tensor is None:
            here = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        else:
            here = tensor.detach().to(self.device, dtype).contiguous()
        dist.broadcast(here, src=0)
        return here

    @property
    def local_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This rank's trained shards by name, as plain parameters in the memory of FSDP's own; tied ones once."""
        return [
            (name, nn.Parameter(_local(p), requires_grad=True))
            for name, p in self._base_names(self.model).items()
            if p.requires_grad
        ]

    def part(self, name: str) -> Slice:
        """Which part of the tensor ``name`` this rank holds."""
        return shard_slice(name, self.shapes[name], self.rank, self.ranks)

    def hidden(self, tokens_BT: Tensor, positions_BT: Tensor, plan: Any) -> Tensor:
        """Last hidden states, (B, T, hidden size); the head's weight is whole from here to the end of ``backward``."""
        hidden: Tensor = getattr(self.causal, BACKBONE)(tokens_BT, positions_BT, plan)
        return hidden

    def reduce_gradients(self, is_reduced: bool) -> None:
        """Whether the backward passes from now on sum gradients over ranks, and with them those that did not.

        What is not summed is added up on each rank, as whole float32 tensors (float64 for weights of that type).
        """
        self.causal.set_requires_gradient_sync(is_reduced)

    def keep_gathered(self, *, forward: bool, backward: bool) -> None:
        """Whether what passes gather from now on stays after the forward pass, and after the backward pass.

        Embeddings, last norm and head always stay after the forward pass.
        """
        for layer in self._cut_modules[:-1]:
            layer.set_reshard_after_forward(not forward, recurse=False)
        for module in self._cut_modules:
            module.set_reshard_after_backward(not backward, recurse=False)

    def reshard(self) -> None:
        """Drop gathered weights: those of a pass without backward would outlive the next update."""
        for module in self._cut_modules:
            module.reshard()

    def global_norm(self, local_norm: Tensor) -> Tensor:
        """L2 norm over all shards from that over this rank's; float64, no dimension.

        It is one sum of all ranks, to which one replica adds: replicas that each added up their own could differ in the
        last bit, and then in their weights.
        """
        square = local_norm.double().square().to(self.device)
        if self.replica:
            square = torch.zeros_like(square)
        dist.all_reduce(square)
        return square.sqrt()

    @torch.no_grad()
    def copy_to(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy what is trained to the lead's whole parameters, wherever these lie by then; other ranks have none."""
        shards = self.shards()
        for name, _ in self.local_parameters:
            self.gather(name, shards[name], parameters.get(name))

    @torch.no_grad()
    def gather(
        self, name: str, shard: Tensor, whole: Tensor | None, *, to: int = 0, most_bytes: int = GATHERED_BYTES
    ) -> None:
        """Write a whole tensor, in the dtype of the model, on one rank of those that hold the model together.

        Args:
            name: of the tensor.
            shard: this rank's of ``shards``.
            whole: where it is written; None on other ranks, and where nobody wants it.
            to: number of that rank among those.
            most_bytes: of all ranks' parts that are under way at once: some rows of each.
        """
        parts = [shard_slice(name, self.shapes[name], rank, self.ranks) for rank in range(self.ranks)]
        num_rows, num_columns = len(parts[0].rows), len(parts[0].columns)  # of the largest
        each = max(1, most_bytes // (num_columns * self.dtype.itemsize * (self.ranks + 1)))
        for start in range(0, num_rows, each):
            sent = shard.new_zeros((min(each, num_rows - start), num_columns), dtype=self.dtype)
            some = shard[start : start + each].flatten(1) if shard.dim() > 1 else shard[start : start + each, None]
            sent[: len(some)] = some
            received = [torch.empty_like(sent) for _ in parts] if self.rank == to else None
            dist.gather(sent, received, group=self.group, group_dst=to)
            if whole is not None and received is not None:
                for part, rows in zip(parts, received, strict=True):
                    place = Slice(rows=part.rows[start : start + each], columns=part.columns).of(whole)
                    place.copy_(rows[: len(place)].view(place.shape))

    def writer(self, slices: Mapping[str, Sequence[EngineSlice]]) -> SliceWriter:
        """What writes the weights into the engine's worker beside this rank, as often as they are published.

        Args:
            slices: of every parameter, where its parts lie in the worker's memory; in the model's dtype.

        Raises:
            ConfigError: the engine holds other tensors than the model, or of another dtype.
        """
        holders = self._holders
        return SliceWriter(self.shards(), self.shapes, slices, dtype=self.dtype, group=self.group, holders=holders)

    def shards(self) -> dict[str, Tensor]:
        """All of this rank's, tied ones once; they stay where they are."""
        self.reshard()
        return {name: _local(parameter) for name, parameter in self._base_names(self.model).items()}

    @torch.no_grad()
    def checksums(self) -> dict[str, int]:
        """Checksum of every whole tensor as it is published, from every rank's part; the same on all ranks."""
        tallies = [
            # Rounded one after the other: no second copy of a rank's weights is kept for it.
            ChecksumTally([ChecksumShard(name, local.to(self.dtype), self.part(name).first)]).queue()
            for name, local in self.shards().items()
        ]
        sums = torch.cat([tally.to(self.device) for tally in tallies])
        # Two halves of 32 bits: sums of int64 that overflow are defined for no backend.
        halves = torch.stack([(sums >> 32) & _LOW, sums & _LOW], dim=1)
        dist.all_reduce(halves, group=self.group)
        return {
            name: ((high << 32) + low) % (1 << 64)
            for name, (high, low) in zip(self.shapes, halves.tolist(), strict=True)
        }


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    local: Tensor = parameter.to_local()
    return local.detach()
