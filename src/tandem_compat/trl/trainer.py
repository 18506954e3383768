"""``GRPOConfig`` and ``GRPOTrainer`` with TRL's arguments, over a run of Tandem's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tandem
from tandem.api import described
from tandem.cli.export import export
from tandem.envs.data.rows import read_file
from tandem.errors import DOCS, ConfigError
from tandem.model.policy import load_tokenizer
from tandem_compat.trl.options import OPTIONS
from tandem_compat.trl.rules import TrlRecipe


class GRPOConfig:
    """Fields of TRL's configuration, by name; what cannot be had is told as it is made.

    Example: ``GRPOConfig(output_dir="out", learning_rate=1e-6, num_generations=8, max_steps=100)``.
    """

    def __init__(self, output_dir: str | None = None, **fields: Any) -> None:
        self.fields = {"output_dir": output_dir, **fields}
        TrlRecipe.of(self.fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in OPTIONS:
            raise AttributeError(f"GRPOConfig has no {name!r}")
        return self.fields.get(name, OPTIONS[name].default)


class GRPOTrainer:
    """TRL's trainer, over a run of Tandem's: ``recipe`` is what its arguments come to, ``run`` what ``train`` made."""

    def __init__(
        self,
        model: str,
        reward_funcs: Callable[..., Any] | str | Sequence[Callable[..., Any] | str],
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        """Translate the arguments; nothing is loaded yet.

        Raises:
            ConfigError: one has no counterpart; the message says what to do instead.
        """
        self.run: tandem.Run | None = None
        _refuse(model, others)
        reader = TrlRecipe.of((args or GRPOConfig()).fields)
        runs = Path(reader["output_dir"])
        env = described.environment(train_dataset, runs)
        rows, held_out = [row.columns for row in read_file(env["path"])], 0
        # A text is a prompt to go on with, as in TRL, and a list of messages is a chat.
        env |= {"test_share": 0.0, "chat": not isinstance(rows[0][env["prompt"]], str)}
        if eval_dataset is not None:
            env["test_path"] = described.environment(eval_dataset, runs)["path"]
            del env["test_share"]
            held_out = sum(1 for _ in read_file(env["test_path"]))
        reader.finish(len(rows), held_out=held_out)
        reader.recipe |= {"model": model, "env": env, "rewards": _rewards(reward_funcs, reader["reward_weights"])}
        if peft_config is not None:
            reader.put("trainable", _adapter(peft_config))
            if peft_config.lora_dropout:
                reader.nothing("peft_config", "Tandem has no dropout, so lora_dropout is left out")
        if processing_class is not None and processing_class.chat_template != load_tokenizer(model).chat_template:
            reader.put("chat_template", processing_class.chat_template)
        translation = reader.translated()
        for note in translation.notes:
            sys.stderr.write(f"tandem: {note}\n")
        self.recipe = tandem.Recipe.load(translation.options)

    def train(self) -> tandem.Run:
        """Train to the last step; the run."""
        self.run = tandem.train(self.recipe)
        return self.run

    def save_model(self, output_dir: str) -> None:
        """Write the trained model, or the adapter, to a folder.

        Raises:
            ConfigError: nothing was trained yet.
        """
        if self.run is None:
            raise ConfigError("there is no trained model yet; call train() first")
        export(self.run.folder, Path(output_dir), None, False)


_OTHERS = {
    "callbacks": "tandem.train(trainer.recipe, on_step=f) calls f after every step",
    "reward_processing_classes": "a reward model's own tokenizer is used",
    "optimizers": "optim and learning_rate of GRPOConfig choose the optimizer",
} | dict.fromkeys(
    ("tools", "rollout_func", "environment_factory"),
    f"a conversation of several turns is an environment ({DOCS}/guide/multi-turn/)",
)


def _refuse(model: Any, others: Any) -> None:
    """What cannot be had."""
    if not isinstance(model, str):
        raise ConfigError(f"model is a {type(model).__name__}; give its name or folder")
    for name, value in others.items():
        if name not in _OTHERS:
            raise ConfigError(f"GRPOTrainer has no argument {name!r} here")
        if value not in (None, [], (), (None, None)):
            raise ConfigError(f"{name} has no counterpart here; {_OTHERS[name]}")


def _rewards(funcs: Any, weights: Sequence[float] | None) -> dict[str, Any]:
    each = list(funcs) if isinstance(funcs, list | tuple) else [funcs]
    if weights is not None and len(weights) != len(each):
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(each)} reward_funcs")
    named: dict[str, Any] = {}
    for part, weight in zip(each, weights or [1.0] * len(each), strict=True):
        model = isinstance(part, str)
        name = "reward_model" if model else getattr(part, "__name__", type(part).__name__)
        options = {"kind": "reward_model", "model": part} if model else {"kind": part}
        named[f"{name}_{len(named)}" if name in named else name] = {**options, "weight": weight}
    return named


def _adapter(peft_config: Any) -> dict[str, Any]:
    """The trainable of a ``peft.LoraConfig``."""
    if type(peft_config).__name__ != "LoraConfig" or peft_config.use_dora or peft_config.modules_to_save:
        raise ConfigError(
            "peft_config: Tandem trains PEFT's plain LoRA: give a LoraConfig without DoRA and saved modules"
        )
    alpha = peft_config.lora_alpha * (peft_config.r**0.5 if peft_config.use_rslora else 1)
    modules = peft_config.target_modules
    chosen = {} if modules is None else {"target_modules": modules if isinstance(modules, str) else sorted(modules)}
    return {"kind": "lora", "rank": peft_config.r, "alpha": alpha, **chosen}
