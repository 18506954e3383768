"""Stand-ins of vLLM's workers: layers that are sliced, fused and padded as vLLM's own, of tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tandem.engines.vllm.worker.parameter_map import ParameterMap, TensorPlace, recorded

Load = Callable[[Tensor], Tensor]
VOCABULARY, HIDDEN, MLP, HEAD = 259, 64, 96, 16
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@dataclass(frozen=True)
class Worker:
    rank: int = 0
    world: int = 1

    def layer(self, weight: Tensor, bias: Tensor | None = None, **attributes: Any) -> nn.Module:
        made = nn.Module()
        made.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        if bias is not None:
            made.bias = nn.Parameter(bias.contiguous(), requires_grad=False)
        for name, value in {"loaders": [(0, _whole)], **attributes}.items():
            setattr(made, name, value)
        return made

    def slice(self, whole: Tensor, dim: int = 0) -> Tensor:
        return whole.chunk(self.world, dim)[self.rank]

    def merged(self, *linears: nn.Linear) -> nn.Module:
        parts = [[self.slice(p) for p in linear.parameters()] for linear in linears]
        return self.layer(*fused(parts), loaders=loaders(parts, [self.slice] * len(linears)))

    def row(self, linear: nn.Linear) -> nn.Module:
        return self.layer(
            self.slice(linear.weight, 1),
            linear.bias,
            loaders=[(0, lambda whole: self.slice(whole, 1) if whole.dim() > 1 else whole)],
        )

    def qkv(self, attention: Any) -> nn.Module:
        keys = attention.k_proj.out_features // HEAD
        copies = max(1, self.world // keys)
        other = Worker(self.rank // copies, self.world // copies)  # ranks that share a key head hold the same slice
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        parts = [[w.slice(p) for p in linear.parameters()] for w, linear in ((self, q), (other, k), (other, v))]
        return self.layer(*fused(parts), loaders=loaders(parts, [self.slice, other.slice, other.slice]))

    def vocabulary(self, weight: Tensor, padded: int = 0) -> nn.Module:
        padded = padded or -(-len(weight) // 64) * 64
        whole = torch.zeros(padded, weight.shape[1], dtype=weight.dtype)
        whole[: len(weight)] = weight
        rows = padded // self.world
        first = min(self.rank * rows, len(weight))
        end = min((self.rank + 1) * rows, len(weight))
        cut = [(0, lambda whole: whole[first:end])]
        return self.layer(self.slice(whole), loaders=cut, org_vocab_size=len(weight))


class Served(nn.Module):
    """A model with vLLM's way of loading: by names, of which some are parts of one layer."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, whole in weights:
            owner, _, leaf = name.rpartition(".")
            parent, _, last = owner.rpartition(".")
            index = 0
            for packed, names in PACKED.items():
                if last in names:
                    owner, index = f"{parent}.{packed}".lstrip("."), names.index(last)
            layer: Any = self.get_submodule(owner)
            start, part = getattr(layer, "loaders", [(0, _whole)])[index]
            getattr(layer, leaf).data.narrow(0, start, len(part(whole))).copy_(part(whole))


def mapped(fake: nn.Module, model: nn.Module, *, world: int = 1) -> dict[str, list[TensorPlace]]:
    """Where a stand-in holds the tensors of a model."""
    return map_of(fake, model, world=world).places(fake)


def map_of(fake: nn.Module, model: nn.Module, *, world: int = 1) -> ParameterMap:
    """The map of a stand-in for a model, as its loader shows it."""
    weights = {name: torch.empty_like(p, device="meta") for name, p in model.named_parameters()}
    return recorded(fake, weights, dict(weights), world=world)


def loaders(parts: list[list[Tensor]], slices: list[Load]) -> list[tuple[int, Load]]:
    """Of each tensor fused in a layer the row at which its part begins, and how that is cut out."""
    return list(zip(accumulate((len(weight) for weight, *_ in parts), initial=0), slices, strict=False))


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def fused(parts: list[list[Tensor]]) -> list[Tensor]:
    """Weights and, where there are any, biases."""
    return [torch.cat(columns) for columns in zip(*parts, strict=True)]


def trained(kind: str, *, keys: int = 2, tied: bool = False, vocabulary: int = VOCABULARY, **options: Any) -> Any:
    """A tiny model as the trainer has it, with no two elements of a tensor alike."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": MLP, "num_attention_heads": 4, "head_dim": HEAD}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocabulary,
        num_hidden_layers=2,
        num_key_value_heads=keys,
        tie_word_embeddings=tied,
        **{**sizes, **options},
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def served(model: Any, worker: Worker, *, adapters: bool = False) -> nn.Module:
    """The same model as a vLLM worker holds it."""
    out = Served()
    out.model = nn.Module()
    out.model.embed_tokens = worker.vocabulary(model.model.embed_tokens.weight)
    out.model.layers = nn.ModuleList()
    for theirs in model.model.layers:
        layer = nn.Module()
        layer.self_attn = nn.Module()
        layer.self_attn.qkv_proj = worker.qkv(theirs.self_attn)
        layer.self_attn.o_proj = worker.row(theirs.self_attn.o_proj)
        for name in ("q_norm", "k_norm"):
            if hasattr(theirs.self_attn, name):
                setattr(layer.self_attn, name, norm(getattr(theirs.self_attn, name).weight))
        layer.mlp = nn.Module()
        layer.mlp.gate_up_proj = worker.merged(theirs.mlp.gate_proj, theirs.mlp.up_proj)
        layer.mlp.down_proj = worker.row(theirs.mlp.down_proj)
        layer.input_layernorm = norm(theirs.input_layernorm.weight)
        layer.post_attention_layernorm = norm(theirs.post_attention_layernorm.weight)
        if adapters:
            for parent, name in ((layer.self_attn, "qkv_proj"), (layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
                setattr(parent, name, wrapped(getattr(parent, name)))
        out.model.layers.append(layer)
    out.model.norm = norm(model.model.norm.weight)
    if adapters:
        out.model.embed_tokens = wrapped(out.model.embed_tokens)
    tied = model.config.tie_word_embeddings
    out.lm_head = out.model.embed_tokens if tied else worker.vocabulary(model.lm_head.weight)
    return out


def norm(weight: Tensor) -> nn.Module:
    made = nn.Module()
    made.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return made


def wrapped(layer: nn.Module) -> nn.Module:
    made = nn.Module()
    made.base_layer = layer
    return made
