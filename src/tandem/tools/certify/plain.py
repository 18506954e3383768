"""The model in float64 as transformers alone computes it, and what is trained of it by its plain weights.

An adapter is no layer here: what it adds is added to the weight, W + alpha/rank * B A, and its gradient is autograd's
of that sum. Nothing is shared with the layers that train it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tandem.types import Json

Options = Mapping[str, Json]
"""A part's options by name."""
KINDS = ("full", "lora")
"""Ways of training that are known here."""


class PlainModel:
    """A float64 copy of a model before it was prepared for training, and its weights.

    Args:
        model: as it was loaded.
        trainable: kind and options of what is trained.
    """

    def __init__(self, model: nn.Module, trainable: tuple[str, Options]):
        self.model = copy.deepcopy(model).double().eval().requires_grad_(False)
        causal: Any = self.model
        causal.set_attn_implementation("sdpa")
        self._parameters = dict(self.model.named_parameters())
        self.kind, options = trainable
        self._merged = bool(options.get("merged"))
        self._scale = options["alpha"] / options["rank"] if self.kind == "lora" else 0.0
        self._factors = self._adapted(options) if self.kind == "lora" else {}
        wanted = options.get("layers")
        self._first = {name: self._parameters[name].detach().clone() for name in self._factors}
        whole = [name for name in self._parameters if wanted is None or _layer(name) in wanted]
        self.names = (
            frozenset(n for pair in self._factors.values() for n in pair) if self._factors else frozenset(whole)
        )
        """Of what is trained, by the recipe."""
        self._leaves: dict[str, Tensor] = {}

    def _adapted(self, options: Options) -> dict[str, tuple[str, str]]:
        """Names of the two factors of what is added, by that of the weight it is added to."""
        head, targets = self.model.get_output_embeddings(), options["target_modules"]  # type: ignore[operator]
        factors = {}
        for name, module in self.model.named_modules():
            named = targets == "all-linear" or name.rpartition(".")[2] in targets
            within = options["layers"] is None or _layer(name) in options["layers"]
            if isinstance(module, nn.Linear) and module is not head and named and within:
                a, b = f"{name}.lora_A", f"{name}.lora_B"
                peft = [f"base_model.model.{factor}.default.weight" for factor in (a, b)]
                factors[f"{name}.weight"] = (a, b) if self._merged else (peft[0], peft[1])
        return factors

    def weights(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the model computes with, by its own names, differentiable; ``trained`` by the names of the policy."""
        if not self._factors:
            return {name: trained[name].double() for name in self.names & trained.keys()}
        return {
            name: self._first[name] + self._scale * trained[b].double() @ trained[a].double()
            for name, (a, b) in self._factors.items()
            if {a, b} <= trained.keys()
        }

    def held(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a reference keeps of it: a merged adapter's sums, else what is trained."""
        if self._merged:
            return self.weights(trained)
        return {name: value.double() for name, value in trained.items()}

    @torch.no_grad()
    def put(self, held: Mapping[str, Tensor]) -> None:
        """Compute with what a reference keeps."""
        self._write(held if self._merged else self.weights(held))

    def take(self, trained: Mapping[str, Tensor]) -> None:
        """Compute with these, and note their gradient."""
        self._leaves = {name: trained[name].double().requires_grad_() for name in self.names & trained.keys()}
        with torch.no_grad():
            self._write(self.weights(self._leaves))
        for name in self.weights(self._leaves):
            self._parameters[name].requires_grad_().grad = None

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            self._parameters[name].copy_(weight)

    def gradients(self) -> dict[str, Tensor]:
        """Of what was backpropagated since ``take``, by the names of what is trained."""
        weights = self.weights(self._leaves)
        torch.autograd.backward(list(weights.values()), [_slope(self._parameters[name]) for name in weights])
        return {name: _slope(self._leaves.get(name, torch.zeros(()))) for name in sorted(self.names)}

    def logits(self, ids: Sequence[int]) -> Tensor:
        """All logits of one sequence, (tokens, vocabulary), float64 and differentiable."""
        logits: Tensor = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        return logits.double()


def _slope(of: Tensor) -> Tensor:
    """A gradient; 0 where there is none."""
    return torch.zeros_like(of) if of.grad is None else of.grad


def _layer(name: str) -> int | None:
    """The number of the layer that a weight is in."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)
