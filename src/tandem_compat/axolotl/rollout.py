"""Axolotl's ``rollout_func``: a function that plays a prompt with ``model.generate``, which the engine answers."""

from __future__ import annotations

import asyncio
import copy
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tandem.envs.base import Chat, Split
from tandem.envs.dataset import imported
from tandem.errors import EnvError
from tandem.lazy import torch
from tandem.rewards.function import Function
from tandem.rewards.grading.calls import Called
from tandem.types import Json, Message, Rollout, Task
from tandem_compat.axolotl.datasets import AxolotlDatasets, tokenizer_of

ENV = f"{__name__}:RolloutFunction"
"""How a recipe names the environment."""
REWARD = f"{__name__}:ReturnedText"
"""How a recipe names a reward function of what was returned."""

_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Options of ``generate`` that are handed on; others than the run's are refused where a sample cannot record them."""
_IDLE = frozenset(("do_sample", "pad_token_id", "eos_token_id", "bos_token_id", "use_cache"))
"""Options of ``generate`` that change nothing here, but ``do_sample=False``."""


@dataclass(frozen=True, kw_only=True)
class RolloutFunction(AxolotlDatasets):
    """An Axolotl file's rows, each played by its ``rollout_func``; every token that ``generate`` sampled is trained."""

    rollout_func: str
    """Import path of the function."""
    chat_template: str = ""
    """The policy's, where it is not the tokenizer's own."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """As of the rows; that the function is there is seen now.

        Raises:
            EnvError: it cannot be imported.
        """
        imported("rollout_func", self.rollout_func)
        return super().tasks(split)

    async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
        """Let the function answer, in a thread of its own; what it returns is the message that rewards see."""
        async with chat.serve() as url:
            text = await asyncio.get_running_loop().run_in_executor(_threads(), self._call, task, url)
        turns = sum(message.role == "assistant" for message in chat.messages)
        if not turns:
            raise EnvError(f"rollout_func {self.rollout_func} never called model.generate: nothing to train")
        if text != chat.messages[-1].content:
            chat.add(Message(role="assistant", content=text))
        return {"turns": float(turns)}

    def _call(self, task: Task, url: str) -> str:
        function = imported("rollout_func", self.rollout_func)
        tokenizer = tokenizer_of(str(self.cfg["base_model"]), self.chat_template)
        messages = [message.as_dict() for message in task.prompt]
        arguments = {
            "model": FunctionModel(url, tokenizer),
            "processing_class": _for_functions(tokenizer),
            "prompts": [{**task.meta, "messages": messages}],
        }
        try:
            texts = function(**arguments)
        except Exception as error:  # user code; the message carries it
            raise EnvError(f"rollout_func {self.rollout_func} raised {type(error).__name__}: {error}") from error
        if not (isinstance(texts, list | tuple) and len(texts) == 1 and isinstance(texts[0], str)):
            raise EnvError(f"rollout_func {self.rollout_func} returned {texts!r:.200}, expected a text for each prompt")
        return texts[0]


@dataclass(frozen=True, kw_only=True)
class ReturnedText(Function):
    """A reward function whose completions are the texts that ``rollout_func`` returned."""

    def called(self) -> Called:
        return replace(super().called(), text=True, more=_returned)


def _returned(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return {"completions": [rollout.final_message for rollout in rollouts]}


def _for_functions(tokenizer: Any) -> Any:
    """A tokenizer to which ``processing_class=False`` is ``tokenize=False``, as Axolotl's example writes it."""

    def apply_chat_template(messages: Sequence[Mapping[str, str]], **options: Any) -> Any:
        if options.pop("processing_class", None) is False:
            options.setdefault("tokenize", False)
        return tokenizer.apply_chat_template(messages, **options)

    tokenizer_here = copy.copy(tokenizer)
    tokenizer_here.apply_chat_template = apply_chat_template
    return tokenizer_here


class FunctionModel:
    """Stand-in for the model: ``generate`` samples from the engine; there are no weights to compute with."""

    def __init__(self, url: str, tokenizer: Any) -> None:
        """``url`` is of an OpenAI-compatible API that records what is sampled."""
        self._url = url
        self._tokenizer = tokenizer
        self.device = torch.device("cpu")

    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        max_new_tokens: int | None = None,
        generation_config: Any = None,
        **options: Any,
    ) -> Any:
        """Prompts (rows x tokens) and what was sampled after each, padded on the right, int64.

        Raises:
            EnvError: the engine refuses, or an option is none of the run's.
        """
        config = {name: getattr(generation_config, name, None) for name in ("max_new_tokens", *_SAMPLED)}
        settings = {**config, **({"max_new_tokens": max_new_tokens} if max_new_tokens else {}), **options}
        if settings.pop("do_sample", None) is False:
            settings["temperature"] = 0.0
        if odd := set(settings) - {"max_new_tokens", *_SAMPLED} - _IDLE:
            raise EnvError(f"model.generate: {', '.join(sorted(odd))} cannot be had; options are max_new_tokens and "
                           f"{', '.join(_SAMPLED)}")  # fmt: skip
        body = {name: settings[name] for name in _SAMPLED if settings.get(name) is not None}
        if settings["max_new_tokens"]:
            body["max_tokens"] = settings["max_new_tokens"]
        rows = []
        for row, ids in enumerate(input_ids):
            seen = ids if attention_mask is None else ids[attention_mask[row].bool()]
            rows.append((ids, torch.tensor(self._sampled(seen.tolist(), body), dtype=ids.dtype)))
        pad = self._tokenizer.pad_token_id
        filler = pad if pad is not None else self._tokenizer.eos_token_id
        return torch.nn.utils.rnn.pad_sequence([torch.cat(row) for row in rows], True, filler)

    def _sampled(self, prompt: list[int], body: Mapping[str, Json]) -> list[int]:
        data = {"model": "policy", "prompt": prompt, "return_token_ids": True, **body}
        request = urllib.request.Request(
            f"{self._url}/completions", json.dumps(data).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as answer:
                ids: list[int] = json.loads(answer.read())["choices"][0]["token_ids"]
        except urllib.error.HTTPError as error:
            raise EnvError(f"model.generate: {json.loads(error.read())['error']['message']}") from error
        return ids


@cache
def _threads() -> ThreadPoolExecutor:
    """Of their own: asyncio's few would be taken by functions that wait for an engine that needs one."""
    return ThreadPoolExecutor(max_workers=256, thread_name_prefix="rollout_func")
