"""The trainable contract: which parameters are trained, and how they are named, saved and loaded."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from tandem.errors import CheckpointError, ConfigError
from tandem.lazy import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class Trainable(ABC):
    """A frozen dataclass whose fields are its options."""

    folder_name: ClassVar[str]
    """What ``write`` writes is called this within a checkpoint."""

    layers: tuple[int, ...] | None = None
    """Train only these transformer layers, numbered from 0 (nothing outside them); null trains all."""

    def __post_init__(self) -> None:
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise ValueError("layers must name at least one layer, none below 0; leave it out to train all")

    @property
    def payload(self) -> Literal["weights", "adapter"]:
        """What an engine is given: whole weights under their Hugging Face names, or the adapter's tensors."""
        return "weights"

    @abstractmethod
    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Mark what is trained (``requires_grad``) and add what it needs; returns the module to run, saved as it is.

        The model may be on the meta device, to count parameters without weights.

        Raises:
            ConfigError: an option names layers or modules that the model does not have.
        """

    def save(self, model: torch.nn.Module, tokenizer: Any, folder: Path) -> None:
        """Write what is trained, as it is now, and the tokenizer. Blocks."""
        self.write(model, self.live_tensors(model), tokenizer, folder)

    @abstractmethod
    def live_tensors(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Tensors that a saved folder holds, by name, as training changes them; tied ones under each name."""

    @abstractmethod
    def write(self, model: torch.nn.Module, tensors: Mapping[str, Tensor], tokenizer: Any, folder: Path) -> None:
        """Write a folder that Hugging Face's libraries load. Blocks.

        Args:
            model: asked for its configuration, and for no weight: it may be trained meanwhile.
            tensors: those of ``live_tensors``, or copies of them in which tied ones are one tensor too.
            tokenizer: written beside them.
            folder: made if it is not there.
        """

    @abstractmethod
    def load(self, model: torch.nn.Module, folder: Path) -> None:
        """Read back what ``write`` wrote, into the same storage, bit for bit. Blocks.

        Raises:
            CheckpointError: the folder cannot be read, or it is of another model.
        """

    def parameters(self, model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that are trained, tied ones once."""
        return [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def source(self, model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        """The tensors that training changes and an engine samples from, as they travel; tied ones once.

        The parameters themselves: an engine that lends its own memory may move their storage.
        """
        return self.parameters(model)

    def fold(self, model: torch.nn.Module) -> None:  # noqa: B027 - most ways of training have nothing to fold
        """Bring the weights that are sampled from up to date with the parameters that the optimizer wrote.

        Called after the optimizer's step, on the compute thread, while no token is sampled. Writes in place, in the
        storage that the weights have at that time.
        """

    def unfold(self, model: torch.nn.Module) -> None:  # noqa: B027
        """Bring all weights back to what they were before training, and keep no copy: they are about to be cut."""

    def cut(self, model: torch.nn.Module, part: Callable[[str], tuple[slice, slice]]) -> None:  # noqa: B027
        """Take weights of which a rank has some rows and columns, by name, as they are now; ``fold`` comes next."""

    @property
    def folds(self) -> bool:
        """Whether ``fold`` does anything: every rank of several is told to."""
        return type(self).fold is not Trainable.fold

    def untrained(self, model: torch.nn.Module) -> AbstractContextManager[None] | None:
        """Within it the model computes what it did before it was trained; None where it cannot."""
        return None

    def base_names(self, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """Every weight of the causal language model by its Hugging Face name, tied ones once; no adapter tensors."""
        return dict(model.named_parameters())

    def adapter_config(self, model: torch.nn.Module) -> dict[str, Any]:
        """What PEFT's ``adapter_config.json`` holds, for an engine that is handed the adapter's tensors.

        Raises:
            TypeError: there is no adapter.
        """
        raise TypeError(f"{type(self).__name__} trains no adapter; ask only where an adapter travels")

    def described(self, model: torch.nn.Module) -> str:
        """What of a prepared model is trained, in words; nothing where that is all of it."""
        return ""

    def kept_bytes(self, model: torch.nn.Module) -> int:
        """Bytes kept where the weights are, beside the model's parameters."""
        return 0

    def beside_text(self, model: torch.nn.Module) -> set[int]:
        """Ids of the modules that a model for images has beside its language model: they are not trained."""
        causal: Any = model
        if causal.config.get_text_config() is causal.config:
            return set()
        parts = (causal.get_decoder(), causal.get_output_embeddings())
        text = {id(module) for part in parts for module in part.modules()}
        return {id(module) for module in causal.modules()} - text

    def check_layers(self, names: Iterable[str]) -> None:
        """Raise ConfigError unless every wanted layer has one of the names."""
        known = {index for name in names if (index := layer_of(name)) is not None}
        wrong = sorted(set(self.layers or ()) - known)
        if wrong:
            have = f"has layers 0 to {max(known)}" if known else "has no numbered layers"
            raise ConfigError(f"trainable.layers: there is no layer {wrong[0]}; the model {have}")


_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Index of the transformer layer that a parameter or module is in; None outside the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def read_into(live: Sequence[tuple[str, Tensor]], files: Iterable[Path]) -> list[str]:
    """Copy tensors of safetensors files into live ones of the same name; returns live names that are in no file.

    Raises:
        CheckpointError: a file is damaged, or a shape or type differs.
    """
    from safetensors import SafetensorError, safe_open

    missing = dict(live)
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - it is not a mapping
                    if name in missing:
                        _copy(name, stored.get_tensor(name), missing.pop(name), file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); resume from an older checkpoint") from error
    return list(missing)


def _copy(name: str, stored: Tensor, live: Tensor, file: Path) -> None:
    if stored.shape != live.shape or stored.dtype != live.dtype:
        kinds = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (stored, live)]
        raise CheckpointError(f"{file} holds {name} as {kinds[0]}, the model has {kinds[1]}; resume with its recipe")
    with torch.no_grad():
        live.copy_(stored)


def safetensors_in(folder: Path) -> list[Path]:
    """The weight files of a saved folder.

    Raises:
        CheckpointError: there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is gone: a run removes its older checkpoints; try again, or tandem export one")
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file; it is not a folder that save wrote")
    return files
