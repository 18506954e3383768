"""LoRA (arXiv 2106.09685): a low-rank adapter of frozen linear layers, by PEFT."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from tandem.errors import CheckpointError, ConfigError, bounded, check_bounds
from tandem.lazy import Tensor, torch
from tandem.trainable.base import Trainable, layer_of, read_into, safetensors_in
from tandem.transport.adapters import write_adapter

_PREFIX = "base_model.model."
"""What PEFT puts before the names of the model it wraps."""
_AS_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names that PEFT takes for those of experts wherever a model has any, also of its dense layers."""


@dataclass(frozen=True, kw_only=True)
class Lora(Trainable):
    """LoRA: W + alpha/rank * B A, with B starting at zero. ``write`` makes a PEFT adapter folder.

    The adapter has the base weights' type (the optimizer keeps float32 masters of a bfloat16 one): a float32 adapter
    beside bfloat16 layers makes a training pass on a CPU a third slower, by its casts. There is no dropout: the policy
    that is scored must be the policy that sampled, or the ratio of an untouched token is not 1.

    ``merged`` keeps the sum in the layer's own weight, rounded to its type; trainer and engine both run on it, so the
    ratio sees one rounded policy on both sides and is 1 for an untouched token. The gradient of A and B is taken at the
    rounded weights. A bfloat16 weight follows once its change reaches half of its last bit (0.2 to 0.4 % of it):
    nothing is lost until then, since A and B hold the whole change and the sum is made anew after every step. What
    ``write`` wrote, run unmerged, differs from the policy that sampled by this rounding.
    """

    folder_name: ClassVar[str] = "adapter"

    rank: int = bounded(16, least=1)
    """Columns of A and rows of B; parameters and memory grow with it."""
    alpha: int = bounded(32, least=1)
    """The adapter's output is multiplied by alpha/rank."""
    target_modules: tuple[str, ...] | str = "all-linear"
    """Linear layers that are adapted, as PEFT takes them: ends of names, such as q_proj or self_attn.q_proj, or a
    regular expression of whole names; all-linear takes all but the output head, and no experts."""
    target_parameters: tuple[str, ...] = ()
    """Experts that are adapted, each with A and B of its own: ends of names of three-dimensional parameters, such as
    experts.gate_up_proj and experts.down_proj; beside vLLM merged, as modules_to_save."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole and saved with the adapter, by ends of names, such as lm_head or embed_tokens."""
    use_rslora: bool = False
    """Multiply by alpha/sqrt(rank) instead (rsLoRA, arXiv 2312.03732)."""
    merged: bool = False
    """The engine's weights hold W0 + alpha/rank * B A; no adapter kernels anywhere, but W0 is kept as well."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self)
        if not self.target_modules and not self.target_parameters:
            raise ValueError("target_modules must name at least one module, or be all-linear")
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                raise ValueError(f"target_modules is no regular expression: {error}") from error

    @property
    def payload(self) -> Literal["weights", "adapter"]:
        """Merged weights travel as any others."""
        return "weights" if self.merged else "adapter"

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Freeze the model, inject the adapter; A is drawn from torch's global generator, which the caller seeds."""
        from peft import get_peft_model

        config = self._config(self.targets(model), self.experts(model))
        if self.merged:
            config.modules_to_save = None  # trained where they are, not in PEFT's copies
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        with warnings.catch_warnings():
            # PEFT asks transformers for a property by a name that transformers has since deprecated.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            adapted: torch.nn.Module = get_peft_model(model, config, autocast_adapter_dtype=False)
        if self.merged:
            from tandem.trainable import _merged

            plain = _merged.convert(adapted, self._scaling)
            for _, parameter in self._whole(plain):
                parameter.requires_grad_(True)
            return plain
        from tandem.trainable import _adapted  # which imports PEFT

        return _adapted.adapt(adapted)

    def _whole(self, model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        """Weights of ``modules_to_save``, tied ones under each name."""
        ends = tuple(f".{end}" for end in self.modules_to_save)
        modules = [module for name, module in model.named_modules() if f".{name}".endswith(ends)]
        wanted = {id(parameter) for module in modules for parameter in module.parameters()}
        return [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if id(p) in wanted]

    @property
    def _scaling(self) -> float:
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    def _config(self, targets: list[str], experts: list[str]) -> Any:
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            use_rslora=self.use_rslora,
            target_modules=targets,
            target_parameters=experts or None,
            modules_to_save=list(self.modules_to_save) or None,
            layers_to_transform=None if self.layers is None else list(self.layers),
            task_type="CAUSAL_LM",
        )

    def targets(self, model: torch.nn.Module) -> list[str]:
        """Names of the modules to adapt, checked against the model; no tensor is looked at."""
        left_out = self._left_out(model)
        modules = [(name, module) for name, module in model.named_modules() if id(module) not in left_out]
        linear = [name for name, module in modules if isinstance(module, torch.nn.Linear)]
        self.check_layers(linear)
        if self.layers is not None:
            linear = [name for name in linear if layer_of(name) in self.layers]
        known = sorted({name.rpartition(".")[2] for name in linear})
        if not linear and self.target_modules == "all-linear":
            raise ConfigError("trainable: the model has no linear layers for lora to adapt; use full")
        if self.target_modules == "all-linear":
            adaptable = set(linear)
            others = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in adaptable}
            return linear if others & set(known) and self.layers is None else known
        has = f"it has {', '.join(known)}, such as {linear[0]}" if linear else "it has none"
        if isinstance(self.target_modules, str):
            matched = [name for name in linear if re.fullmatch(self.target_modules, name)]
            if not matched:
                wanted = f"no linear layer's whole name matches {self.target_modules!r}"
                raise ConfigError(f"trainable.target_modules: {wanted}; {has}")
            return matched
        ends = {end: [name for name in linear if f".{name}".endswith(f".{end}")] for end in self.target_modules}
        if wrong := [end for end, names in ends.items() if not names]:
            raise ConfigError(f"trainable.target_modules: the model has no linear layer {wrong[0]!r}; {has}")
        return list(self.target_modules)

    def experts(self, model: torch.nn.Module) -> list[str]:
        """Names of the experts to adapt, checked against the model."""
        known = _experts(model)
        for end in self.target_parameters:
            if not any(f".{name}".endswith(f".{end}") for name in known):
                has = ", ".join(sorted({_short(name) for name in known})) or "none"
                raise ConfigError(f"trainable.target_parameters: no experts' name ends in {end!r}; the model has {has}")
        for end in self.modules_to_save:
            if not any(f".{name}".endswith(f".{end}") for name, _ in model.named_modules()):
                raise ConfigError(f"trainable.modules_to_save: the model has no module {end!r}; lm_head is its output")
        ends = tuple(f".{end}" for end in self.target_parameters)
        wanted = [name for name in known if f".{name}".endswith(ends)]
        return wanted if self.layers is None else [name for name in wanted if layer_of(name) in self.layers]

    def _left_out(self, model: torch.nn.Module) -> set[int]:
        """Ids of linear layers without an adapter: the head, those of images, those that PEFT or kernels misread."""
        experts = bool(_experts(model))
        left_out = self.beside_text(model) | {id(model.get_output_embeddings())}  # type: ignore[operator]
        for module in model.modules():
            is_mamba = hasattr(module, "A_log") and hasattr(module, "D")  # its kernels read out_proj's weight
            for name, child in module.named_children():
                if (
                    (is_mamba and name == "out_proj")
                    or (experts and name in _AS_EXPERTS)
                    or "Router" in type(child).__name__
                ):
                    left_out.add(id(child))
        return left_out

    def described(self, model: torch.nn.Module) -> str:
        """Which modules of a prepared model get an adapter, how many of each name, and which experts get none."""
        adapted, experts = Counter[str](), Counter(map(_short, _experts(model)))
        for name, module in model.named_modules():
            if hasattr(module, "lora_A"):
                parameter = getattr(module, "parameter_name", None)
                adapted[f"experts.{parameter}" if parameter else name.rpartition(".")[2]] += 1
        on = [f"{count} {name}" for name, count in adapted.items()] + [f"the whole {n}" for n in self.modules_to_save]
        without = [name for name in experts if name not in adapted]
        rest = f"; none on {', '.join(without)}: name them in trainable.target_parameters" if without else ""
        return f"adapters on {', '.join(on)}{rest}"

    def source(self, model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        """The adapter's tensors; merged, weights that hold one or are trained whole, by their Hugging Face names."""
        if not self.merged:
            return super().source(model)
        saved = [(name, parameter) for name, parameter in self.parameters(model) if ".lora_" not in name]
        return [(name, module.weight) for name, _, module in _merged_layers(model)] + saved

    def fold(self, model: torch.nn.Module) -> None:
        """Merged: write W0 + alpha/rank * B A into every adapted weight; otherwise nothing."""
        for _, _, module in _merged_layers(model):
            module.fold()

    def unfold(self, model: torch.nn.Module) -> None:
        """Merged: every adapted weight is W0 again."""
        for _, _, module in _merged_layers(model):
            module.unfold()

    def cut(self, model: torch.nn.Module, part: Callable[[str], tuple[slice, slice]]) -> None:
        """Merged: take a rank's part of every W0."""
        for name, _, module in _merged_layers(model):
            module.cut(*part(name))

    @property
    def folds(self) -> bool:
        """Only merged weights follow A and B."""
        return self.merged

    def untrained(self, model: torch.nn.Module) -> AbstractContextManager[None] | None:
        """The adapter switched off; merged, W0 is not where the model computes."""
        if self.merged:
            return None
        off: AbstractContextManager[None] = model.disable_adapter()  # type: ignore[operator]
        return off

    def base_names(self, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
        """The causal model's own weights, under the names they had before the adapter came."""
        added = ("lora_", ".modules_to_save.")
        adapter = {id(p) for name, p in self.parameters(model) if any(part in name for part in added)}
        causal = getattr(model, "get_base_model", lambda: model)()
        base = ((name, p) for name, p in causal.named_parameters() if id(p) not in adapter)
        return {re.sub(r"\.(?:base_layer|original_module)(?=\.)", "", name): p for name, p in base}

    def adapter_config(self, model: torch.nn.Module) -> dict[str, Any]:
        """Rank, alpha, the adapted modules by name and the rest of PEFT's ``adapter_config.json``, as plain data."""
        experts = {name for name, module in model.named_modules() if hasattr(module, "parameter_name")}
        experts |= {
            f"{_PREFIX}{name}" for _, name, module in _merged_layers(model) if hasattr(module, "parameter_name")
        }
        names = {name.rpartition(".lora_")[0] for name in self.live_tensors(model) if ".lora_" in name} - experts
        names = {name.removeprefix(_PREFIX) for name in names}
        targets = self.target_modules
        whole = targets != "all-linear" and (isinstance(targets, str) or any("." in end for end in targets))
        short = names if whole else {name.rpartition(".")[2] for name in names}
        config = self._config(sorted(short), list(self.target_parameters))
        if self.merged and self.modules_to_save:  # and what they are tied to
            config.modules_to_save = sorted({name.split(".")[-2] for name, _ in self._whole(model)})
        causal: Any = getattr(model, "get_base_model", lambda: model)()
        config.base_model_name_or_path = causal.name_or_path or None
        config.inference_mode = True
        plain: dict[str, Any] = config.to_dict()
        return {key: sorted(value) if isinstance(value, set) else value for key, value in plain.items()}

    def kept_bytes(self, model: torch.nn.Module) -> int:
        """Merged: W0 of the adapted layers."""
        return sum(module.weight.nbytes for _, _, module in _merged_layers(model))

    def live_tensors(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """The adapter's under the names of its file."""
        if not self.merged:
            from peft import get_peft_model_state_dict

            live: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
            return live
        whole = {f"{_PREFIX}{name}": parameter.detach() for name, parameter in self._whole(model)}
        return whole | {
            f"{_PREFIX}{name}.{part}.weight": getattr(module, part).detach()
            for _, name, module in _merged_layers(model)
            for part in ("lora_A", "lora_B")
        }

    def write(self, model: torch.nn.Module, tensors: Mapping[str, Tensor], tokenizer: Any, folder: Path) -> None:
        """Write the adapter, which ``PeftModel.from_pretrained(base, folder)`` loads."""
        write_adapter(folder, tensors, self.adapter_config(model))
        tokenizer.save_pretrained(folder)

    def load(self, model: torch.nn.Module, folder: Path) -> None:
        """Copy the adapter's tensors into the live ones, and fold."""
        live = self.live_tensors(model)
        missing = read_into(list(live.items()), safetensors_in(folder))
        if missing:
            lacks = f"{folder} lacks {len(missing)} of {len(live)} adapter tensors, first {missing[0]}"
            raise CheckpointError(f"{lacks}; resume with the recipe that the checkpoint was made with")
        self.fold(model)


def _experts(model: torch.nn.Module) -> list[str]:
    """Names of stacked experts, without what an adapter puts around them."""
    stacked = [name for name, parameter in model.named_parameters() if parameter.dim() == 3 and "experts" in name]
    return [name.replace(".base_layer", "") for name in stacked]


def _short(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _merged_layers(model: torch.nn.Module) -> Iterable[tuple[str, str, Any]]:
    """A merged weight's name, its adapter's, and the module that holds both, for each."""
    from tandem.trainable import _merged  # which needs torch

    return _merged.layers(model)
