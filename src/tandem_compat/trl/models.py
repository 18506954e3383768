"""Model objects that a script has loaded: what training starts from, and how the trained weights get into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.errors import ConfigError


def loaded(name: str) -> Any:
    """A model by its name, as a script would load it."""
    return AutoModelForCausalLM.from_pretrained(name, dtype="auto")


def started(model: Any, runs: Path) -> tuple[str, Any]:
    """The name of what training starts from, and the LoRA on it, if there is one.

    Weights that are no longer those of the name are written to a folder in ``runs``, whose name it then is.

    Raises:
        ConfigError: it is no model of transformers, or its adapter was trained.
    """
    if not hasattr(model, "name_or_path"):
        raise ConfigError(
            f"model is a {type(model).__name__}; give a model of transformers or PEFT, its name or folder"
        )
    adapter = model.active_peft_config if hasattr(model, "active_peft_config") else None
    weights = model.state_dict()
    if any("lora_B" in name and bool(value.any()) for name, value in weights.items()):
        raise ConfigError(
            "model has an adapter that was trained, and a run starts with a new one; give model.merge_and_unload() "
            "and peft_config"
        )
    base = model.get_base_model() if adapter is not None else model
    name = base.name_or_path
    plain = {_plain(key): value for key, value in base.state_dict().items() if "lora_" not in key}
    if name and (getattr(base, "is_quantized", False) or _same(plain, loaded(name).to(base.dtype).state_dict())):
        return name, adapter
    folder = runs / "model"
    base.save_pretrained(folder, state_dict=plain)
    if name:
        AutoTokenizer.from_pretrained(name).save_pretrained(folder)
    return str(folder.absolute()), adapter


def with_weights(model: Any, weights: Path) -> Any:
    """A model with trained weights, which are put into it; one without an adapter gets a trained one around it."""
    from peft import PeftModel, set_peft_model_state_dict

    if weights.name != "adapter":
        model.load_state_dict(loaded(str(weights)).to(model.dtype).state_dict())
    elif isinstance(model, PeftModel):
        set_peft_model_state_dict(model, load_file(weights / "adapter_model.safetensors"))
    else:
        model = PeftModel.from_pretrained(model, str(weights))
    return model


def _plain(key: str) -> str:
    """The name that a weight has without PEFT's layers."""
    return key.replace(".base_layer.", ".")


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key].cpu(), theirs[key]) for key in ours)
