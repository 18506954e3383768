"""A low-rank adapter beside the frozen linear layers (arXiv 2106.09685), by PEFT."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn

from tandem.errors import CheckpointError, ConfigError
from tandem.trains.base import Trains, layer_of, read_into, safetensors_in


@dataclass(frozen=True, kw_only=True)
class Lora(Trains):
    """LoRA: W + alpha/rank * B A, with B starting at zero. ``save`` writes a PEFT adapter folder.

    The adapter has the base weights' type (the optimizer keeps float32 masters of a bfloat16 one): a float32 adapter
    beside bfloat16 layers makes a training pass on a CPU a third slower, by its casts. There is no dropout: the policy
    that is scored must be the policy that sampled, or the ratio of an untouched token is not 1.
    """

    folder_name: ClassVar[str] = "adapter"

    rank: int = 16
    """Columns of A and rows of B; parameters and memory grow with it."""
    alpha: int = 32
    """The adapter's output is multiplied by alpha/rank."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that are adapted, such as q_proj; all-linear takes all but the output head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ValueError("rank must be at least 1")
        if self.alpha < 1:
            raise ValueError("alpha must be at least 1")
        if not self.target_modules:
            raise ValueError("target_modules must name at least one module, or be all-linear")

    def prepare(self, model: nn.Module) -> nn.Module:
        """Freeze the model, inject the adapter; A is drawn from torch's global generator, which the caller seeds."""
        from peft import LoraConfig, get_peft_model

        targets = self._targets(model)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=targets,
            layers_to_transform=None if self.layers is None else list(self.layers),
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            # PEFT asks transformers for a property by a name that transformers has since deprecated.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            adapted: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=False)
        return adapted

    def _targets(self, model: nn.Module) -> list[str]:
        """Last parts of the names of the modules to adapt, checked against the model."""
        head = model.get_output_embeddings()  # type: ignore[operator]
        linear = [
            name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
        ]
        self.check_layers(linear)
        if self.layers is not None:
            linear = [name for name in linear if layer_of(name) in self.layers]
        known = sorted({name.rpartition(".")[2] for name in linear})
        if self.target_modules == "all-linear":
            return known
        wrong = [name for name in self.target_modules if name not in known]
        if wrong:
            raise ConfigError(
                f"trains.target_modules: the model has no linear layer {wrong[0]!r}; it has {', '.join(known)}"
            )
        return list(self.target_modules)

    def save(self, model: nn.Module, tokenizer: Any, folder: Path) -> None:
        """Write the adapter, which ``PeftModel.from_pretrained(base, folder)`` loads."""
        # save_embedding_layers decides now what PEFT would otherwise ask the hub about.
        model.save_pretrained(folder, save_embedding_layers=False)  # type: ignore[operator]
        tokenizer.save_pretrained(folder)

    def load(self, model: nn.Module, folder: Path) -> None:
        """Copy the adapter's tensors into the live ones."""
        from peft import get_peft_model_state_dict

        live = get_peft_model_state_dict(model, save_embedding_layers=False)
        missing = read_into(list(live.items()), safetensors_in(folder))
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(live)} adapter tensors, first {missing[0]}; "
                "resume with the recipe that the checkpoint was made with"
            )
