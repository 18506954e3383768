"""Talking to a trained model, with the model as it was before training beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import transformers

from tandem.api import targets
from tandem.model.policy import load_tokenizer
from tandem.observability.report.folder import Row, load


class Replies(NamedTuple):
    """What two models say to one message."""

    before: str
    """The model that training began with."""
    after: str
    """The trained one."""

    def __str__(self) -> str:
        return f"before: {self.before}\nafter:  {self.after}"

    def __repr__(self) -> str:
        return str(self)


class BeforeAndAfter:
    """A run's model before and after training, each with a conversation of its own."""

    def __init__(self, config: Row, weights: Path) -> None:
        """Load both.

        Args:
            config: the run's recipe.
            weights: the trained model's folder, or its adapter's.
        """
        self._config = config
        self._tokenizer = load_tokenizer(config["model"], chat_template=config.get("chat_template"))
        self._adapter = weights.name == "adapter"
        base = self._load(config["model"])
        if self._adapter:
            import peft

            self._models = [peft.PeftModel.from_pretrained(base, str(weights)).eval()] * 2
        else:
            self._models = [base, self._load(weights)]
        self._conversations: list[list[dict[str, str]]] = [[], []]

    @classmethod
    def of(cls, run: Path, step: int | None) -> Self:
        """Those of a run at a checkpoint; None: the newest. The last that was asked for stays loaded.

        Raises:
            CheckpointError: there is no such checkpoint.
        """
        targets.recipe_of(run)  # which says what else is near, where it is no run
        weights = targets.weights_of(run, step)
        if _last.get(cls, (None,))[0] != weights:
            _last[cls] = (weights, cls(load(run).config, weights))
        loaded: Self = _last[cls][1]
        loaded.begin()
        return loaded

    def begin(self) -> None:
        """Forget what was said."""
        self._conversations = [[], []]

    def reply(self, message: str) -> Replies:
        """Answers to a message, each in its own conversation."""
        for messages in self._conversations:
            messages.append({"role": "user", "content": message})
        return Replies(*(self._answer(number) for number in (0, 1)))

    def converse(self, ask: Callable[[str], str], tell: Callable[[str], object]) -> None:
        """Answer what a person says until an empty line, or the end of the input."""
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while message := ask("you:    ").strip():
                tell(str(self.reply(message)))

    def _load(self, path: str | Path) -> Any:
        dtype = getattr(torch, self._config.get("dtype", "bfloat16"))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
        return model.to(device).eval()

    def _answer(self, number: int) -> str:
        model, messages, sampling = self._models[number], self._conversations[number], self._config.get("sampling", {})
        options = self._config.get("chat_template_kwargs") or {}
        prompt = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **options
        ).to(model.device)
        warm = sampling.get("temperature", 1.0) > 0
        drawn = {"temperature": sampling.get("temperature", 1.0), "top_p": sampling.get("top_p", 1.0), "top_k": 0}
        bare = model.disable_adapter() if self._adapter and number == 0 else contextlib.nullcontext()
        with torch.inference_mode(), bare:
            out = model.generate(
                **prompt, max_new_tokens=sampling.get("max_tokens", 256), do_sample=warm, **(drawn if warm else {}),
                pad_token_id=self._tokenizer.pad_token_id or self._tokenizer.eos_token_id,
            )  # fmt: skip
        text: str = self._tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
        return text


_last: dict[type, tuple[Path, Any]] = {}
