"""8-bit matrix products of decoder layers, by torchao; the weights themselves keep their type.

Both factors are rounded anew at each product, every row and column by a power of two of its own, and the product is
summed wide. The gradient of a weight is computed in the weight's type: it is what the optimizer adds up, and its sum
runs over tokens, of which there may be any number, while 8-bit products want multiples of 16.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import replace

import torch
from torch import nn

from tandem.errors import ConfigError
from tandem.model.layers import decoder_layers

CAPABILITY = (8, 9)
"""Of the first GPUs with 8-bit products."""
NARROWEST = 1024
"""Layers with fewer inputs or outputs stay: for each token a product saves time by inputs x outputs, and rounding costs
it by inputs + outputs; at about a thousand of either the two are equal."""


def check() -> None:
    """Refuse matmul: fp8 where it cannot work.

    Raises:
        ConfigError: says what is missing.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError("matmul: fp8 needs torchao; pip install 'tandem-rl[fp8]', or set matmul: dtype")
    if not torch.cuda.is_available():
        raise ConfigError("matmul: fp8 needs a GPU, and this machine shows none; set matmul: dtype")
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        name, (major, minor) = torch.cuda.get_device_name(), capability
        raise ConfigError(f"matmul: fp8 needs capability 8.9, and {name} has {major}.{minor}; set matmul: dtype")


def convert(model: nn.Module, *, emulate: bool = False) -> list[str]:
    """Let the linear layers of the decoder layers compute in 8 bits; their parameters stay the same objects.

    Adapters, output head and embeddings stay as they are, and so do layers that are too narrow to gain.

    Args:
        model: a transformers model, adapted by PEFT or not.
        emulate: round to 8 bits and multiply in the weights' type: the same numbers on any device, and no faster.

    Returns:
        The names of the layers that changed.

    Raises:
        ConfigError: there are none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torchao lacks on this machine, 8-bit training does not use
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    recipe = replace(Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), emulate=emulate)
    names = {id(module): name for name, module in model.named_modules()}
    changed: list[str] = []

    def wanted(module: nn.Module, _: str) -> bool:
        name = names.get(id(module), "")
        if not _gains(module) or ".lora_" in name:
            return False
        changed.append(name)
        return True

    for layer in decoder_layers(model):
        convert_to_float8_training(layer, config=recipe, module_filter_fn=wanted)
    if not changed:
        narrow = f"no layer has at least {NARROWEST} inputs and outputs and computes with its own weight"
        raise ConfigError(f"matmul: fp8 changes nothing: {narrow} (trainable.merged does not); set matmul: dtype")
    return changed


def _gains(module: nn.Module) -> bool:
    """Whether it is a plain linear layer of a size that 8-bit products take and are worth it."""
    if type(module) is not nn.Linear or module.weight.dtype != torch.bfloat16:
        return False
    sizes = (module.in_features, module.out_features)
    return min(sizes) >= NARROWEST and all(size % 16 == 0 for size in sizes)
