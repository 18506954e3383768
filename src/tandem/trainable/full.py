"""Full fine-tuning, of all layers or some."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tandem.errors import CheckpointError
from tandem.lazy import Tensor, torch
from tandem.trainable.base import Trainable, layer_of, read_into, safetensors_in


@dataclass(frozen=True, kw_only=True)
class Full(Trainable):
    """Full fine-tuning: embeddings, layers, norms and output head. ``write`` makes a Hugging Face model folder."""

    folder_name: ClassVar[str] = "model"

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Mark all parameters, or those of ``layers``."""
        self.check_layers(name for name, _ in model.named_parameters())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.layers is None or layer_of(name) in self.layers)
        outside = self.beside_text(model)
        for module in model.modules():
            if id(module) in outside:
                for parameter in module.parameters(recurse=False):
                    parameter.requires_grad_(False)
        return model

    def live_tensors(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """The whole model's."""
        return dict(model.state_dict())

    def write(self, model: torch.nn.Module, tensors: Mapping[str, Tensor], tokenizer: Any, folder: Path) -> None:
        """Write the whole model, which ``AutoModelForCausalLM.from_pretrained(folder)`` loads."""
        model.save_pretrained(folder, state_dict=dict(tensors))  # type: ignore[operator]
        tokenizer.save_pretrained(folder)

    def load(self, model: torch.nn.Module, folder: Path) -> None:
        """Stream the files tensor by tensor, so that no second model is held."""
        names_of: dict[int, tuple[Tensor, list[str]]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            names_of.setdefault(id(tensor), (tensor.detach(), []))[1].append(name)
        live = [(name, tensor) for tensor, names in names_of.values() for name in names]
        missing = set(read_into(live, safetensors_in(folder)))
        if any(missing.issuperset(names) for _, names in names_of.values()):
            _reload(model, folder)


def write_part(model: Any, tensors: Mapping[str, Tensor], folder: Path, number: int, of: int) -> None:
    """Write one of several weight files of a model's folder; the first brings the model's configuration.

    Args:
        model: asked for its configuration alone.
        tensors: of this file, by Hugging Face name.
        folder: made if it is not there.
        number: of the file, from 0.
        of: how many files there are.
    """
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"model-{number + 1:05d}-of-{of:05d}.safetensors"
    save_file(revert_weight_conversion(model, dict(tensors)), file, metadata={"format": "pt"})
    if number == 0:
        aside = folder / ".configuration"  # transformers would remove the other ranks' files
        model.save_pretrained(aside, state_dict={})
        for other in aside.glob("*.json"):
            other.rename(folder / other.name)
        shutil.rmtree(aside)


def write_index(folder: Path) -> None:
    """Say which of a folder's weight files has which tensor, once all ranks have written theirs."""
    from safetensors import safe_open

    file_of: dict[str, str] = {}
    for file in (files := safetensors_in(folder)):
        with safe_open(file, framework="pt") as stored:
            file_of |= dict.fromkeys(stored.keys(), file.name)
    index = {"metadata": {"total_size": sum(file.stat().st_size for file in files)}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _reload(model: torch.nn.Module, folder: Path) -> None:
    """For a model that transformers stores under other names than it runs with: let transformers translate."""
    config: Any = model.config
    other, info = type(model).from_pretrained(folder, dtype=config.dtype, output_loading_info=True)  # type: ignore[attr-defined]
    wrong = sorted([*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]])
    if wrong:
        raise CheckpointError(f"{folder} is not of this model: {len(wrong)} weights do not match, first {wrong[0]}")
    with torch.no_grad():
        stored = other.state_dict()
        for name, tensor in model.state_dict().items():
            tensor.copy_(stored[name])
