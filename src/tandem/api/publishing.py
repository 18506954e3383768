"""A checkpoint's model or adapter, out of its run: to a folder, or to the hub, with its model card."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from tandem import hub, machine
from tandem.api.card import model_card
from tandem.api.targets import recipe_of, weights_of
from tandem.errors import CheckpointError, ConfigError
from tandem.observability.report.folder import load


def export(run: Path, destination: Path, step: int | None, merge: bool) -> str:
    """Copy the checkpoint into a new folder; returns the message to print.

    Raises:
        ConfigError: not a run, the destination is taken, or there is nothing to merge.
        CheckpointError: there is no such checkpoint, or it cannot be copied.
    """
    recipe_of(run)
    weights = weights_of(run, step)
    if not destination.name:
        raise ConfigError(f"{destination} is no folder that can be made; name one that is not there")
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise ConfigError(f"{destination} is already there and is left as it is; name a folder that is not")
    aside = destination.with_name(f".{destination.name}.tmp")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        if aside.exists():
            shutil.rmtree(aside)
        write_model(run, aside, step, merge, name=destination.name)
        aside.replace(destination)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"cannot export {weights} to {destination}: {error}") from error
    what = "model" if merge else weights.name
    return f"exported the {what} of step {int(weights.parent.name)} to {destination}"


def write_model(run: Path, folder: Path, step: int | None = None, merge: bool = False, name: str = "") -> None:
    """Write a checkpoint's model or adapter into a folder, which may have files already, and its card as README.md.

    Args:
        run: the run's folder.
        folder: where it goes.
        step: the checkpoint; None: the newest.
        merge: add an adapter to the weights it was trained on.
        name: what the card calls it; empty: as the folder.

    Raises:
        ConfigError: there is nothing to merge.
        CheckpointError: there is no such checkpoint.
    """
    weights = weights_of(run, step)
    if merge and weights.name != "adapter":
        raise ConfigError(f"{weights} is a whole model already; leave out --merge")
    if merge:
        _merge(run, weights, folder)
    else:
        shutil.copytree(weights, folder, dirs_exist_ok=True)
    whole = merge or weights.name == "model"
    (folder / "README.md").write_text(model_card(run, weights, name or folder.name, whole=whole), encoding="utf-8")
    machine.apply_umask(folder)


def push(
    run: Path,
    repository: str,
    step: int | None = None,
    *,
    merge: bool = False,
    private: bool | None = None,
    token: str | None = None,
    message: str | None = None,
) -> str:
    """Upload a checkpoint's model or adapter with its card, as ``huggingface-cli login`` lets you; the URL.

    Args:
        run: the run's folder.
        repository: ``user/name``, or the name of one of yours; made if it is not there.
        step: the checkpoint; None: the newest.
        merge: add an adapter to the weights it was trained on.
        private: whether a new repository is; None: as your account has it.
        token: of the hub; None: the one you are logged in with.
        message: of the commit.

    Raises:
        ConfigError: not a run, there is nothing to merge, or the hub refuses or cannot be reached.
        CheckpointError: there is no such checkpoint.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    recipe_of(run)
    weights_of(run, step)  # before a repository is made for it
    api = HfApi(token=token)
    # a lost connection is an error of the hub's HTTP library, which differs between its versions, and no OSError
    lost: tuple[type[BaseException], ...] = HfHubHTTPError.__bases__
    with tempfile.TemporaryDirectory() as folder:
        try:
            if reason := hub.away():
                raise ConfigError(f"cannot push to {repository}: {reason}")
            made = api.create_repo(repository, private=private, exist_ok=True)
            write_model(run, Path(folder), step, merge, name=made.repo_id)
            api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message or "Upload from Tandem")
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise ConfigError(f"cannot push to {repository}: {error}; log in by: hf auth login") from error
        except lost as error:
            raise ConfigError(f"cannot push to {repository}: the connection was lost ({error}); push again") from error
    return str(made)


def _merge(run: Path, adapter: Path, destination: Path) -> None:
    """Add the adapter to the weights it was trained on, and write the sum; no code that a recipe names is imported."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = load(run).config
    dtype = torch.float32 if config.get("dtype") == "float32" else torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(config["model"], dtype=dtype, trust_remote_code=False)
    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    merged.save_pretrained(destination)
    AutoTokenizer.from_pretrained(adapter, trust_remote_code=False).save_pretrained(destination)
