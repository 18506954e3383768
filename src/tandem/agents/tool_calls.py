"""Tool calls: offered to the policy by its chat template, and parsed out of its replies."""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tandem.errors import EnvError
from tandem.types import Json, Message

_UNREADABLE = (ValueError, RecursionError)
"""Errors of what is no JSON, is nested too deep, as by a policy that repeats itself, or names half a character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: str
    """JSON of what it is called with, or whatever text an agent says it was."""
    id: str = ""
    """What the agent calls it; no part of what was said, so agents may change it."""

    def written(self, arguments: Json) -> dict[str, Json]:
        """The call as OpenAI writes it, with its arguments as text or as a value."""
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": arguments}}

    def value(self) -> Json:
        """The arguments as chat templates take them."""
        try:
            return json.loads(self.arguments)
        except _UNREADABLE:
            return self.arguments


def spoken(content: str, calls: Sequence[ToolCall]) -> Message:
    """An assistant's message, with its calls as chat templates take them."""
    fields = {"tool_calls": [call.written(call.value()) for call in calls]} if calls else {}
    return Message(role="assistant", content=content, fields=fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOffer:
    """What a request adds to the prompt: tools, and options of the chat template."""

    tools: Sequence[Json] = ()
    """Each as JSON in OpenAI's form."""
    single: bool = False
    """One call per answer at most."""
    template_options: Mapping[str, Json] = field(default_factory=dict)
    """What the request gives the chat template beside the run's options."""

    @property
    def key(self) -> bytes:
        """The same for the same prompt: tools stand at its head, so other ones begin another conversation."""
        return json.dumps([self.tools, self.template_options], sort_keys=True).encode()

    @property
    def names(self) -> frozenset[str]:
        """What may be called."""
        return frozenset(tool["function"]["name"] for tool in self.tools)


class Form(ABC):
    """Syntax in which a model writes tool calls."""

    stop: str = ""
    """Text with which every call ends, if there is one."""

    @abstractmethod
    def read(self, text: str, names: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
        """The text beside the calls, and the calls.

        A call that cannot be read leaves all of the text as text: the agent sees what the policy wrote.

        Args:
            text: an answer.
            names: tools that were offered.
        """


class Tagged(Form):
    """``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, once for each call: Hermes, Qwen and others."""

    stop = "</tool_call>"
    _CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

    def read(self, text: str, names: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
        thought, closed, reply = text.rpartition("</think>")
        calls = [_call(written) for written in self._CALL.findall(reply)]
        if not calls or None in calls:
            return text, ()
        return (thought + closed + self._CALL.sub("", reply)).strip(), tuple(call for call in calls if call)


class BareCalls(Form):
    """``{"name": ..., "parameters": ...}`` as the whole answer, several divided by semicolons: Llama."""

    def read(self, text: str, names: Collection[str]) -> tuple[str, tuple[ToolCall, ...]]:
        rest, calls, decoder = text.strip().removeprefix("<|python_tag|>").lstrip(), [], json.JSONDecoder()
        while rest:
            try:
                _, end = decoder.raw_decode(rest)
            except _UNREADABLE:
                return text, ()
            call, rest = _call(rest[:end]), rest[end:].lstrip().removeprefix(";").lstrip()
            # An answer may be JSON without being a call: what it names tells.
            if call is None or call.name not in names:
                return text, ()
            calls.append(call)
        return ("", tuple(calls)) if calls else (text, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSyntax:
    """Tool syntax that a chat template supports, found by probing it."""

    shown: bool
    """It writes the tools that are offered into the prompt."""
    form: Form | None
    """How it writes calls; None: in no way that is known here, so calls stay text."""


Render = Callable[[Sequence[Message], Sequence[Json]], str]
"""Text of messages and tools, by a chat template."""

_QUESTION = Message(role="user", content="?")
_PROBE = ToolCall(name="tandem_probe", arguments='{"tandem_key": "tandem_value"}', id="tandem000")
_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE.name,
        "description": "?",
        "parameters": {"type": "object", "properties": {"tandem_key": {"type": "string", "description": "?"}}},
    },
}


def speech(render: Render) -> ToolSyntax:
    """Find out what a chat template knows, by what it makes of a tool and of a call of it."""
    shown, form = False, None
    with suppress(EnvError):
        shown = _PROBE.name in render([_QUESTION], [_TOOL])
        form = _form(render([_QUESTION, spoken("", [_PROBE])], [_TOOL]))
    return ToolSyntax(shown=shown, form=form)


def _form(text: str) -> Form | None:
    """The form of the last call in a text."""
    tagged, start = Tagged(), text.rfind("<tool_call>")
    if start >= 0 and _is_probe(tagged.read(text[start:], ())[1]):
        return tagged
    for match in re.finditer(r'\{\s*"name":\s*"tandem_probe"', text):
        try:
            _, end = json.JSONDecoder().raw_decode(text, match.start())
        except ValueError:
            continue
        call = text[match.start() : end]
        if '"parameters"' in call and _is_probe(BareCalls().read(call, {_PROBE.name})[1]):
            return BareCalls()
    return None


def _is_probe(calls: Sequence[ToolCall]) -> bool:
    return [(call.name, call.value()) for call in calls] == [(_PROBE.name, _PROBE.value())]


def read(form: Form | None, offer: ToolOffer, text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """An answer as agents get it: its text and its calls, each with an id of its own.

    Where there is no form, where calls cannot be read, or where there are more than asked for, all of it is text.
    """
    rest, calls = (text, ()) if form is None else form.read(text, offer.names)
    if offer.single and len(calls) > 1:
        return text, ()
    return rest, tuple(replace(call, id=f"call_{secrets.token_hex(12)}") for call in calls)


def _call(text: str) -> ToolCall | None:
    """A call as its model wrote it; None if it is none."""
    try:
        call = json.loads(text)
        json.dumps(call, ensure_ascii=False).encode()
    except _UNREADABLE:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name=call["name"], arguments=json.dumps(arguments, ensure_ascii=False))


def as_text(message: Message) -> Message:
    """A message for graders and people, who read text: calls that the policy did not write itself follow as JSON."""
    written = [json.dumps(call["function"], ensure_ascii=False) for call in message.fields.get("tool_calls", ())]
    return Message(role=message.role, content="\n".join(part for part in (message.content, *written) if part))


def alike(message: Message) -> Message:
    """A message reduced to what agents send back unchanged, to compare two messages by.

    Many agents strip what the policy said, or write the arguments of its calls anew, before they send it back.
    """
    if message.role != "assistant":
        return message
    same = [json.dumps(call["function"], sort_keys=True) for call in message.fields.get("tool_calls", ())]
    return Message(role="assistant", content=message.content.strip(), fields={"tool_calls": same})
