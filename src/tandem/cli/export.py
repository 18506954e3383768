"""``tandem export``: a checkpoint's model or adapter, out of its run."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError

from tandem import machine
from tandem.api.targets import recipe_of, weights_of
from tandem.config.tree import Problems, parse, plain
from tandem.errors import CheckpointError, ConfigError


def export(run: Path, destination: Path, step: int | None, merge: bool) -> str:
    """Copy the checkpoint; returns the message to print.

    Raises:
        ConfigError: not a run, the destination is taken, or there is nothing to merge.
        CheckpointError: there is no such checkpoint, or it cannot be copied.
    """
    recipe = recipe_of(run)
    weights = weights_of(run, step)
    is_adapter = (weights / "adapter_config.json").is_file()
    if not destination.name:
        raise ConfigError(f"{destination} is no folder that can be made; name one that is not there")
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise ConfigError(f"{destination} is already there and is left as it is; name a folder that is not")
    if merge and not is_adapter:
        raise ConfigError(f"{weights} is a whole model already; leave out --merge")
    aside = destination.with_name(f".{destination.name}.tmp")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        if aside.exists():
            shutil.rmtree(aside)
        if merge:
            _merge(recipe, weights, aside)
        else:
            shutil.copytree(weights, aside)
        machine.apply_umask(aside)
        aside.replace(destination)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"cannot export {weights} to {destination}: {error}") from error
    what = "adapter" if is_adapter and not merge else "model"
    return f"exported the {what} of step {int(weights.parent.name)} to {destination}"


def _merge(recipe: Path, adapter: Path, destination: Path) -> None:
    """Add the adapter to the weights it was trained on, and write the sum.

    Of the recipe the model is read alone: no code that it names is imported.

    Raises:
        ConfigError: it does not say which model that was.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = plain(tree) if (tree := parse(recipe.read_text(encoding="utf-8"), str(recipe), Problems())) else None
    if not isinstance(options, dict) or not isinstance(model := options.get("model"), str):
        raise ConfigError(f"{recipe} names no model, which the adapter would be merged into")
    dtype = torch.float32 if options.get("dtype") == "float32" else torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, trust_remote_code=False)
    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    merged.save_pretrained(destination)
    AutoTokenizer.from_pretrained(adapter, trust_remote_code=False).save_pretrained(destination)
