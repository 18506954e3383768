"""Decoder layers: compiled or not, checkpointed or not.

Both are put around each layer's ``forward``: modules, names, parameters and what is saved stay as they are. Passes that
sample (they read or write a key/value cache) stay eager: their shapes change with every token, and the compiler would
keep code for them instead of the training pass's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from tandem.errors import ConfigError
from tandem.model import _varlen, compilation, routing
from tandem.model.compilation import Compile
from tandem.model.context import ContextPacked
from tandem.model.plans import Decode, Packed
from tandem.model.unfolded import LayerPrefix, PrefixCache, prefixed

log = logging.getLogger(__name__)


def tune(
    model: nn.Module, *, compile: Compile = "auto", checkpointing: Checkpointing = "none", backend: str = "inductor"
) -> None:
    """Run the decoder layers of ``model`` so from now on.

    Args:
        model: a transformers model, adapted by PEFT or not.
        compile: the layers; auto does where the first training pass finds them on a CUDA device, if it can.
        checkpointing: what a training pass keeps of each layer.
        backend: torch's compiler.

    Raises:
        ConfigError: it is not known which of the model's modules are its layers.
    """
    layers = decoder_layers(model)
    for layer in layers:
        layer.__dict__.pop("forward", None)  # as it was
    if compile is False and checkpointing == "none":
        return
    if not layers and not (compile == "auto" and checkpointing == "none"):
        kind = type(model).__name__
        raise ConfigError(f"the layers of a {kind} are not known; set compile: false and checkpointing: none")
    # One for all layers of a class: the compiler finds the code of the first for each that follows.
    ways = {kind: _Way(kind.forward, compile, checkpointing, backend) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.forward = partial(ways[type(layer)], layer)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


class _Way:
    """Stands where the ``forward`` of a class of layers was."""

    def __init__(self, forward: Callable[..., Any], compile: Compile, checkpointing: Checkpointing, backend: str):
        self._eager = forward
        self._compile = compile
        self._checkpointing: Checkpointing = checkpointing
        self._backend = backend
        self._whole = False
        self._prefixed: _Way | None = None
        self._scores: Callable[..., Any] | None = None
        self._eager_trainable = forward if checkpointing == "none" else recomputed(forward, checkpointing)
        self._trainable = self._eager_trainable

    def __call__(self, layer: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        plan = kwargs.get("plan")
        if isinstance(plan, Decode) or (isinstance(plan, Packed) and plan.store is not None):
            return self._eager(layer, hidden, *args, **kwargs)
        for name, cache in kwargs.items():
            if isinstance(cache, LayerPrefix):  # of a layer within this one, as Zamba2's shared blocks
                return self._eager(layer, hidden, *args, **kwargs)
            if isinstance(cache, PrefixCache):
                return self._continue(layer, hidden, name, cache, args, kwargs)
        if self._scores is None:
            # Not before: the weights may have moved to another device after they were loaded.
            self._choose(compilation.decide(self._compile, hidden.device), hidden)
        # The kernel is within the layer's only graph then; that of long rows is called between two.
        row = plan.whole if isinstance(plan, ContextPacked) else plan
        spans = {"spans": row.spans(hidden.device)} if self._whole and isinstance(row, Packed) and not row.long else {}
        try:
            assert self._scores is not None
            run = self._trainable if torch.is_grad_enabled() else self._scores
            return run(layer, hidden, *args, **kwargs, **spans)
        except TorchDynamoException as error:
            if self._compile is True and not self._whole:
                raise
            why = " ".join(str(error).split())[:200]
        # Not within the handler: as long as the failed pass's frames live, checkpoint's hooks are those of that pass.
        if self._whole:
            self._whole = False
            log.warning("layers are compiled without their attention, since with it they cannot be: %s", why)
        else:
            self._choose(False, hidden)
            log.warning("the model's layers stay eager, since they cannot be compiled: %s", why)
        return self(layer, hidden, *args, **kwargs)

    def _continue(
        self, layer: nn.Module, hidden: torch.Tensor, name: str, cache: PrefixCache, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """A pass that leaves what a prefix leaves, or reads it."""
        if self._prefixed is None:
            self._prefixed = _Way(prefixed(self._eager), self._compile, self._checkpointing, self._backend)
        left, options = cache.of(layer), {key: value for key, value in kwargs.items() if key != name}
        # A layer that is computed again is given what it was given first, and that is nothing yet.
        prefix = name, {} if cache.of_BR is None else left, cache.length, cache.of_BR
        out, new = self._prefixed(layer, hidden, *args, prefix=prefix, **options)
        left.update(new)
        return out

    def _choose(self, compiled: bool, hidden: torch.Tensor) -> None:
        self._whole = compiled and _varlen.unsupported_input(hidden.dtype, hidden.device) is None
        self._scores, self._trainable = self._eager, self._eager_trainable
        if compiled:
            self._scores = self._trainable = compilation.compiled(self._eager, self._backend, self._checkpointing)
            if self._checkpointing == "full":
                self._trainable = recomputed(self._scores, "full")


Checkpointing = Literal["none", "selective", "full"]
"""none keeps all activations; selective the results of products and of attention; full what goes into each layer."""

_PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1}
"""Names of products, and at which argument their factors begin."""
_LEAST = 16
"""A product is kept if what it sums over is at least this part of the width of its result, and at least so many."""


def recomputed(run: Callable[..., Any], how: Literal["selective", "full"]) -> Callable[..., Any]:
    """``run`` with less kept for its backward pass, which runs it again.

    It must draw nothing at random, and no weight may be written between a forward pass and its backward pass. selective
    sees eager products alone: compiled ones write where they are told to.
    """
    # To keep the random state would make the host wait for the device, and nothing here draws: there is no dropout.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return lambda *args, **kwargs: checkpoint(routing.as_now(run), *args, **options, **kwargs)


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Products and attention take nearly all the time of a layer; the rest is most of what it would keep."""
    name = op.name().rpartition("::")[2]
    is_costly = (name in _PRODUCTS and _costs(*args[_PRODUCTS[name] :][:2])) or "attention" in name or "attn" in name
    return CheckpointPolicy.MUST_SAVE if is_costly else CheckpointPolicy.PREFER_RECOMPUTE


def _costs(left: Tensor, right: Tensor) -> bool:
    """Whether a product takes long for the memory of its result: that of an adapter's narrow factors does not."""
    return left.shape[-1] >= max(_LEAST, right.shape[-1] / _LEAST)
