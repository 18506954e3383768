"""``GRPOConfig`` and ``GRPOTrainer`` with TRL's arguments, over a run of Tandem's."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_utils import TrainOutput

import tandem
from tandem.api import described
from tandem.api.publishing import push, write_model
from tandem.api.targets import resumed
from tandem.config.tree import Problems
from tandem.envs.data.rows import read_file
from tandem.errors import DOCS, ConfigError
from tandem.model.policy import load_tokenizer
from tandem_compat.trl import models
from tandem_compat.trl.callbacks import Callbacks, newest
from tandem_compat.trl.options import OPTIONS
from tandem_compat.trl.rules import TrlRecipe


class GRPOConfig:
    """Fields of TRL's configuration, by name; what cannot be had is told as it is made.

    Example: ``GRPOConfig(output_dir="out", learning_rate=1e-6, num_generations=8, max_steps=100)``.
    """

    fields: dict[str, Any]

    def __init__(self, output_dir: str | None = None, **fields: Any) -> None:
        vars(self)["fields"] = {"output_dir": output_dir, **fields}
        TrlRecipe.of(self.fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in OPTIONS:
            raise AttributeError(f"GRPOConfig has no {name!r}")
        value = self.fields.get(name)
        return OPTIONS[name].default if value is None else value

    def __setattr__(self, name: str, value: Any) -> None:
        TrlRecipe.of({**self.fields, name: value})
        self.fields[name] = value


class GRPOTrainer:
    """TRL's trainer, over a run of Tandem's: ``recipe`` is what its arguments come to, ``run`` what ``train`` made."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Callable[..., Any] | str | Sequence[Callable[..., Any] | str],
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        quantization_config: Any = None,
        **others: Any,
    ) -> None:
        """Translate the arguments; a model object is told by its name, or written down where it is no longer that.

        Raises:
            ConfigError: with everything that has no counterpart, and what to do instead.
        """
        _refuse(others)
        self.run: tandem.Run | None = None
        self.args = args or GRPOConfig()
        self.reward_funcs = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        self.callbacks = Callbacks(self.args, callbacks or ())
        reader = TrlRecipe.of(self.args.fields)
        runs = Path(reader["output_dir"])
        self._model, self._trained = (None if isinstance(model, str) else model), False
        if self._model is not None:
            model, adapter = models.started(model, runs)
            peft_config = peft_config or adapter
        if quantization_config is not None or getattr(self._model, "is_quantized", False):
            reader.note("quantization", f"{model} is trained unquantized, which takes the memory of its whole weights")
        env = described.environment(train_dataset, runs)
        rows, held_out = [row.columns for row in read_file(env["path"])], 0
        # A text is a prompt to go on with, as in TRL, and a list of messages is a chat.
        env |= {"test_share": 0.0, "chat": not isinstance(rows[0][env["prompt"]], str)}
        if eval_dataset is not None:
            env["test_path"] = described.environment(eval_dataset, runs)["path"]
            del env["test_share"]
            held_out = sum(1 for _ in read_file(env["test_path"]))
        reader.finish(len(rows), held_out=held_out)
        reader.recipe |= {"model": model, "env": env, "rewards": _rewards(self.reward_funcs, reader["reward_weights"])}
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
        self.processing_class = processing_class
        self.state = self.callbacks.state

    def train(self, resume_from_checkpoint: bool | str | None = None) -> TrainOutput:
        """Train to the last step, or until a callback stops it; ``run`` is the run.

        Args:
            resume_from_checkpoint: the folder of a run to go on with; True: the newest in ``output_dir``.
        """
        config, begun = self.recipe.config, None
        if resume_from_checkpoint:
            path = resume_from_checkpoint
            begun = (tandem.Run.open(path) if isinstance(path, str) else newest(Path(config.runs))).folder
            config = resumed(begun, [])
        self.run = self.callbacks.around(config, begun)
        self._trained = False
        if self._model is not None:
            self._load_trained()
        if self.args.push_to_hub:
            self.push_to_hub()
        summary = self.run.summary
        losses = [loss for loss in self.run.metrics.column("loss") if math.isfinite(loss)]
        loss = statistics.fmean(losses) if losses else math.nan
        metrics = {"train_runtime": summary["seconds"], "train_loss": loss, "epoch": self.state.epoch}
        return TrainOutput(summary["steps"], loss, metrics)

    @property
    def model(self) -> Any:
        """The model as it is now, of transformers or PEFT; one that was given is trained in place."""
        if self._model is None:
            self._model = models.loaded(self.recipe.config.model)
        if self.run is not None and not self._trained:
            self._load_trained()
        return self._model

    def add_callback(self, callback: Any) -> None:
        """Have a callback called too."""
        self.callbacks.add(callback)

    def save_model(self, output_dir: str | None = None) -> None:
        """Write the trained model, or the adapter, and its card into a folder; by default ``output_dir``.

        Raises:
            ConfigError: nothing was trained yet.
        """
        write_model(self._ended().folder, Path(output_dir or self.args.output_dir))

    def push_to_hub(self, commit_message: str | None = None, **_: Any) -> str:
        """Upload the trained model, or the adapter, with its card; the URL.

        Raises:
            ConfigError: nothing was trained yet.
        """
        args = self.args
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        run, token = self._ended().folder, args.hub_token
        return push(run, name, private=args.hub_private_repo, token=token, message=commit_message)

    def _load_trained(self) -> None:
        self._model, self._trained = models.with_weights(self._model, self._ended().weights()), True

    def _ended(self) -> tandem.Run:
        if self.run is None:
            raise ConfigError("there is no trained model yet; call train() first")
        return self.run


_OTHERS = {
    "reward_processing_classes": "a reward model's own tokenizer is used",
    "optimizers": "optim and learning_rate of GRPOConfig choose the optimizer",
} | dict.fromkeys(
    ("tools", "rollout_func", "environment_factory"),
    f"a conversation of several turns is an environment ({DOCS}/guide/multi-turn/)",
)


def _refuse(others: Mapping[str, Any]) -> None:
    """What cannot be had, all of it at once."""
    problems = Problems()
    for name, value in others.items():
        if name not in _OTHERS:
            problems.add(name, "GRPOTrainer has no such argument here; leave it out")
        elif value not in (None, [], (), (None, None)):
            problems.add(name, f"it has no counterpart here: {_OTHERS[name]}")
    problems.raise_if_any("GRPOTrainer")


def _rewards(each: Sequence[Any], weights: Sequence[float] | None) -> dict[str, Any]:
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
