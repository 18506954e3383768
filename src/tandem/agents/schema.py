"""Request bodies of OpenAI's chat completions and completions.

An option that cannot be obeyed, or that would make the sampled tokens untrainable, is left out and the log says so
once: agents and their libraries send such options unasked. What an agent could not go on without is refused.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Self

import msgspec

from tandem.agents.tool_calls import ToolCall, ToolOffer, ToolSyntax
from tandem.rollout.turns import OF_THE_RUN, untrainable_option
from tandem.types import Json, Message, Sampling

log = logging.getLogger(__name__)

MOST = 128
"""Most answers of one request."""
UNREAD = frozenset(("model", "user", "metadata", "store", "service_tier", "prompt_cache_key"))
"""Fields that no answer depends on."""
REFUSED = frozenset(("functions", "function_call", "suffix", "echo"))
"""Fields without which an agent could not go on."""
_TEXTS = ("text", "input_text", "output_text")
"""Types of parts that are text."""


class BadRequest(Exception):
    """An HTTP error: ``status``, and ``param``, the field that is wrong."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param = param
        self.status = status


class CompletionRequest(msgspec.Struct, kw_only=True):
    """Fields common to both routes."""

    n: int | None = None
    """Answers."""
    max_tokens: int | None = None
    """Most tokens of one answer."""
    temperature: float | None = None
    """As in ``Sampling``; with the exception of greedy it may be any, since every turn records its own."""
    top_p: float | None = None
    """As in the run's ``Sampling``, and so are those that follow."""
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    """Texts that end an answer, and are no part of it."""
    stream: bool | None = None
    """Answer in events; they come when all is sampled."""
    stream_options: dict[str, Any] | None = None
    """``include_usage``: the last event counts tokens."""
    return_token_ids: bool | None = None
    """Tell the sampled token ids, as vLLM does."""

    @classmethod
    def read(cls, body: bytes) -> Self:
        """A request.

        Raises:
            BadRequest: it is none, or asks for what cannot be done.
        """
        try:
            fields = msgspec.json.decode(body, type=dict[str, Any])
            made = msgspec.convert(fields, cls, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"the body cannot be read: {error}") from error
        for name, value in fields.items():
            if value in (None, False, "", [], {}) or name in UNREAD or name in cls.__struct_fields__:
                continue  # null, false and nothing in a list ask for nothing
            if name in REFUSED:
                raise BadRequest(f"{name} cannot be obeyed: the policy answers in plain text", param=name)
            _tell(f"{name[:80]} is left out of agents' requests: it cannot be obeyed here")
        if not 1 <= made.answers <= MOST:
            raise BadRequest(f"n must be from 1 to {MOST}", param="n")
        return made

    @property
    def answers(self) -> int:
        """How many of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def counted(self) -> bool:
        """Whether a stream ends with counts of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self, defaults: Sampling, *, trained: bool) -> Sampling:
        """``defaults``, but for what the request says; ``trained``: and for what training could not account for.

        Raises:
            BadRequest: a number is out of range.
        """
        changes: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        changes |= {name: getattr(self, name) for name in OF_THE_RUN}
        if self.top_k == -1:  # as vLLM says it
            changes["top_k"] = 0
        if self.stop is not None:
            changes["stop"] = tuple(text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text)
        made = replace(defaults, **{name: value for name, value in changes.items() if value is not None})
        for name, fine in (("max_tokens", made.max_tokens >= 1), ("temperature", 0 <= made.temperature < math.inf)):
            if not fine:
                raise BadRequest(f"{name} is out of range", param=name)
        while trained and (odd := untrainable_option(defaults, made)) is not None:
            run = getattr(defaults, odd)
            _tell(f"{odd} is left out of agents' requests; the run's is {run:g} (sampling.{odd} in the recipe)")
            made = replace(made, **{odd: getattr(defaults, odd)})
        return made


class _Function(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any] = ""


class _RequestCall(msgspec.Struct, kw_only=True):
    function: _Function
    id: str | None = None


class _RequestMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[_RequestCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class ChatRequest(CompletionRequest, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[_RequestMessage]
    max_completion_tokens: int | None = None
    """``max_tokens`` by its newer name."""
    tools: list[Any] | None = None
    """What the policy may call."""
    tool_choice: Any = None
    """auto: the policy decides; none: it is offered no tools."""
    parallel_tool_calls: bool | None = None
    """False: one call per answer at most."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Options of the chat template, such as ``enable_thinking``."""
    logprobs: bool | None = None
    """Tell the logprob of each sampled token."""

    def __post_init__(self) -> None:
        """Refuse what cannot be done.

        Raises:
            BadRequest: says what.
        """
        if not self.messages:
            raise BadRequest("messages are empty", param="messages")
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.tool_choice not in (None, "auto", "none"):
            _tell("tool_choice is taken for auto in agents' requests; ask for the call in a message")
        for tool in self.tools or ():
            _refuse_odd(tool)

    def offer(self, speech: ToolSyntax) -> ToolOffer:
        """The tools that are offered; the conversation's template knows ``speech``.

        Raises:
            BadRequest: the template would leave them out of the prompt.
        """
        options = self.chat_template_kwargs or {}
        if not self.tools or self.tool_choice == "none":
            return ToolOffer(template_options=options)
        if not speech.shown:
            why = "tools cannot be offered: the chat template writes none into the prompt; use one that does"
            raise BadRequest(why, param="tools")
        return ToolOffer(tools=self.tools, single=self.parallel_tool_calls is False, template_options=options)

    def conversation(self) -> tuple[Message, ...]:
        """The conversation in our words.

        Raises:
            BadRequest: a message has parts that are no text.
        """
        return tuple(_spoken(message) for message in self.messages)


def _refuse_odd(tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest('each of tools must be {"type": "function", "function": {"name": ..., ...}}', param="tools")
    if function.get("strict"):
        _tell("a tool is strict, which is not enforced: the arguments of a call may not fit its schema")


@lru_cache(256)  # once is enough
def _tell(text: str) -> None:
    log.warning("%s", text)


def _spoken(message: _RequestMessage) -> Message:
    if message.function_call:
        raise BadRequest("function_call cannot be read; give tool_calls", param="messages")
    calls = [call.written(call.value()) for call in map(_called, message.tool_calls or ())]
    fields = {"tool_calls": calls, "tool_call_id": message.tool_call_id, "name": message.name}
    present = {name: value for name, value in fields.items() if value}
    return Message(role=message.role, content=text_of(message.content, "messages"), fields=present)


def _called(call: _RequestCall) -> ToolCall:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(name=call.function.name, arguments=text, id=call.id or "")


def text_of(content: Json, param: str) -> str:
    """The text of a content, or of its parts; raises BadRequest where one is no text."""
    if not isinstance(content, list):
        return content or ""
    if other := [part.get("type") for part in content if part.get("type") not in _TEXTS]:
        raise BadRequest(f"a part has the type {other[0]}, and the policy reads text alone", param=param)
    return "".join(str(part.get("text", "")) for part in content)


class TextRequest(CompletionRequest, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[Any]
    """Text or token ids, or a list of such."""
    logprobs: int | None = None
    """Tell the logprob of each sampled token, and of no other, however many are asked for."""

    def prompts(self, vocabulary: int) -> list[str | list[int]]:
        """Each prompt; token ids must be below ``vocabulary``.

        Raises:
            BadRequest: one is neither text nor token ids, or there are too many.
        """
        whole: Any = self.prompt
        several = isinstance(whole, list) and not all(isinstance(part, int) for part in whole)
        prompts = whole if several else [whole]
        for prompt in prompts:
            ids = prompt if isinstance(prompt, list) else (None,)
            fine = isinstance(prompt, str) or all(type(id) is int and 0 <= id < vocabulary for id in ids)
            if not fine or not prompt:
                raise BadRequest(
                    f"prompt must be text, token ids below {vocabulary}, or a list of such", param="prompt"
                )
        if len(prompts) * self.answers > MOST:
            raise BadRequest(f"prompts times n must be {MOST} at most", param="n")
        return list(prompts)
