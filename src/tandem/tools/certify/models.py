"""The model that a certificate is about."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tandem.config import loading as recipes
from tandem.config.loading import RunConfig
from tandem.model.attention import NAME
from tandem.model.policy import load_config, load_model
from tandem.tools.certify.formula import part
from tandem.tools.certify.plain import Exact

_TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.03,  # wide enough that the next-token distribution is not uniform
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
"""Sizes of a model that is computed in milliseconds; what else the architecture says stays as it is."""


def certified(config: RunConfig, *, real: bool) -> tuple[nn.Module, Exact]:
    """The recipe's model in float32 on the CPU, prepared for training, and the same in float64 and not prepared.

    Unless ``real`` a tiny random one like it.

    Raises:
        ConfigError: the model's configuration, or its weights, cannot be read.
    """
    torch.manual_seed(config.seed)
    if real:
        model = load_model(config.model, dtype=torch.float32, device=torch.device("cpu"))
    else:
        tiny = shrunk(load_config(config.model).get_text_config(), config.trainable.layers or ())
        model = AutoModelForCausalLM.from_config(tiny, dtype=torch.float32, attn_implementation=NAME)
    exact = Exact(model, part(recipes.as_json(config)["trainable"]))
    prepared: nn.Module = config.trainable.prepare(model).eval()
    return prepared, exact


def shrunk(like: Any, layers: Sequence[int]) -> Any:
    """A transformers configuration of the same architecture and few parameters, in which ``layers`` exist."""
    tiny = copy.deepcopy(like)
    depth = max(2, *(layer + 1 for layer in layers)) if layers else 2
    if getattr(like, "num_key_value_heads", None) is not None:
        tiny.num_key_value_heads = 2 if like.num_key_value_heads < like.num_attention_heads else 4
    for name, size in _TINY.items():
        if hasattr(tiny, name):
            setattr(tiny, name, size)
    tiny.num_hidden_layers = depth
    if getattr(tiny, "layer_types", None):
        tiny.layer_types = [tiny.layer_types[i % len(tiny.layer_types)] for i in range(depth)]
    return tiny
