"""Talking to a trained model, with the model as it was before training beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from tandem.api import targets
from tandem.model.policy import load_tokenizer
from tandem.observability.report.folder import load


class Replies(NamedTuple):
    """What two models say to one message."""

    before: str
    """The model that training began with."""
    after: str
    """The trained one."""

    def __repr__(self) -> str:
        return f"before: {self.before}\nafter:  {self.after}"


class BeforeAndAfter:
    """A run's model before and after training, each with a conversation of its own."""

    def __init__(self, run: Path, step: int | None) -> None:
        """Load both; those that were loaded last stay in memory.

        Args:
            run: its folder.
            step: the checkpoint; None: the newest.

        Raises:
            CheckpointError: there is no such checkpoint.
        """
        targets.recipe_of(run)  # which says what else is near, where it is no run
        weights, self._config = targets.weights_of(run, step), load(run).config
        self._adapter = weights.name == "adapter"
        before = weights if self._adapter else self._config["model"]
        options = (self._config.get("chat_template"), self._config.get("dtype", "bfloat16"))
        self._models = [_loaded(str(model), self._config["model"], *options) for model in (before, weights)]
        self._conversations: list[list[dict[str, str]]] = [[], []]

    def reply(self, message: str) -> Replies:
        """Answers to a message, each in its own conversation."""
        for messages in self._conversations:
            messages.append({"role": "user", "content": message})
        return Replies(*(self._answer(number) for number in (0, 1)))

    def converse(self, tell: Callable[[str], object]) -> None:
        """Answer what a person says until an empty line, or the end of the input."""
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while message := input("you:    ").strip():
                tell(str(self.reply(message)))

    def _answer(self, number: int) -> str:
        model, messages, sampling = self._models[number], self._conversations[number], self._config.get("sampling", {})
        if self._adapter:
            (model.model.enable_adapters if number else model.model.disable_adapters)()
        drawn = {"do_sample": True, "top_k": 0} | {name: sampling.get(name, 1.0) for name in ("temperature", "top_p")}
        (answer,) = model(
            messages, return_full_text=False, max_new_tokens=sampling.get("max_tokens", 256),
            tokenizer_encode_kwargs=self._config.get("chat_template_kwargs") or {},
            **(drawn if drawn["temperature"] else {"do_sample": False}),
        )  # fmt: skip
        messages.append({"role": "assistant", "content": answer["generated_text"]})
        return messages[-1]["content"]


@lru_cache(maxsize=2)
def _loaded(path: str, base: str, chat_template: str | None, dtype: str) -> Any:
    return transformers.pipeline(
        "text-generation", model=path, tokenizer=load_tokenizer(base, chat_template=chat_template), dtype=dtype,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
