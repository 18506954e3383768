"""Chat template: messages to token ids and back. What was sampled is never tokenised again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tandem.agents.tool_calls import ToolSyntax, speech
from tandem.errors import ConfigError, EnvError
from tandem.observability import waits
from tandem.types import TEXT, Json, Message, Task

_USUAL = ("system", "user", "assistant", "tool")
"""Roles that chat templates know; what they make of others, those of a few models alone is certain to be read."""

_MARK = "\u2042tandem\u2042"
"""Stands for the policy's words while a template is rendered around them."""
_NONE: Mapping[str, Json] = {}


class Template:
    """A tokenizer's chat template, rendered so that sampled tokens stay as they are."""

    def __init__(self, tokenizer: Any, options: dict[str, Json]):
        self._tokenizer = tokenizer
        self._options = options
        self._piece: dict[int, str] = {}

    @cached_property
    def _quick(self) -> Any:
        """The tokenizer itself, without what transformers does for every call; None where that changes texts."""
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if self._tokenizer.clean_up_tokenization_spaces else fast

    @cached_property
    def speech(self) -> ToolSyntax:
        """What the template knows of tools."""
        return speech(self._render)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Json] = (), options: Mapping[str, Json] = _NONE
    ) -> list[int]:
        """Token ids of a conversation, up to where the policy speaks.

        Args:
            messages: the conversation.
            tools: those that the policy may call.
            options: of the template, beside the run's.
        """
        if len(messages) == 1 and messages[0].role == TEXT:
            return self.more(messages[0].content)
        return self.more(self._render(messages, tools, options))

    def bridge(
        self,
        opening: Sequence[Message],
        reply: Sequence[Message],
        last: int,
        tools: Sequence[Json] = (),
        options: Mapping[str, Json] = _NONE,
    ) -> list[int]:
        """Token ids between a sampled completion and the policy's next words.

        Args:
            opening: the conversation before the completion; templates may look at it.
            reply: what the environment says.
            last: the last sampled token; if it is the end-of-turn token the template writes, it is not repeated.
            tools: those that the policy may call.
            options: of the template, beside the run's.
        """
        text = self._render([*opening, Message(role="assistant", content=_MARK), *reply], tools, options)
        after = text.rpartition(_MARK)[2]
        # A model may end a turn with another token than the tokenizer's eos, so the token itself is compared.
        tokens = self.more(after)
        return tokens[1:] if self.ends(last) and tokens[:1] == [last] else tokens

    def demonstrated(
        self, messages: Sequence[Message], tools: Sequence[Json] = ()
    ) -> list[tuple[list[int], list[int]]]:
        """Of each assistant's message the token ids before it, and its own up to the token that ends a turn.

        A message's ids continue those of the message before it, unless the template writes that one anew.

        Args:
            messages: a conversation; what the policy is to say are the assistant's.
            tools: those that it may call.

        Raises:
            EnvError: the template does not write a message where it asks for one.
        """
        turns: list[tuple[list[int], list[int]]] = []
        written = ""
        for place, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = messages[:place]
            if before[0].role == TEXT:
                opening, whole = before[0].content, before[0].content + message.content
            else:
                opening = self._render(before, tools)
                whole = self._render([*before, message], tools, asks=False).rstrip()
            if not whole.startswith(opening):
                raise EnvError("the chat template does not write an assistant's message where it asks for one")
            goes_on = bool(turns) and opening.startswith(written)
            prompt = [*turns[-1][0], *turns[-1][1], *self.more(opening[len(written) :])] if goes_on else None
            reply = self.more(whole[len(opening) :])
            if not reply or not self.ends(reply[-1]):
                reply.append(self._tokenizer.eos_token_id)
            turns.append((self.more(opening) if prompt is None else prompt, reply))
            written = whole
        return turns

    def ends(self, token: int) -> bool:
        """True if a token has no text, as those that end a turn."""
        return not self.decode([token])

    def text(self, text: str) -> list[int]:
        """Token ids of text that begins a prompt, with the tokens that the tokenizer begins all text with."""
        tokens: list[int] = self._tokenizer.encode(_unicode(text))
        first = self._tokenizer.bos_token_id
        # A prompt that was rendered by hand has that token already.
        return tokens[1:] if tokens[:2] == [first, first] else tokens

    def rendered(self, messages: Sequence[Message]) -> str:
        """The template's own marker that ends a user's message, if the words of the last message have it already."""
        if messages[-1].role != "user":
            return ""
        after = self._render([*messages[:-1], Message(role="user", content=_MARK)]).rpartition(_MARK)[2].split()
        return after[0] if after and after[0] in messages[-1].content else ""

    @property
    def vocabulary(self) -> int:
        """Token ids that have a text are below this."""
        return len(self._tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of sampled tokens, special ones left out."""
        text: str = (self._quick or self._tokenizer).decode(list(tokens), skip_special_tokens=True)
        return text

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Text of each token on its own, for people; each is decoded once, and new ones without Python's lock."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._piece]
        fast = self._quick
        if fast is None:
            texts = [self._tokenizer.decode([token]) for token in new]
        else:
            texts = fast.decode_batch([[token] for token in new], skip_special_tokens=False)
        self._piece.update(zip(new, texts, strict=True))
        return [self._piece[token] for token in tokens]

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] = (),
        options: Mapping[str, Json] = _NONE,
        *,
        asks: bool = True,
    ) -> str:
        if any(message.role == TEXT for message in messages):
            raise EnvError("a text that the policy goes on with has no chat template, so no message can follow it")
        plain = [message.as_dict() for message in messages]
        options = {**self._options, **options, **({"tools": list(tools)} if tools else {})}
        try:
            with waits.blocking(waits.actor("rollouts"), "messages as text", on="the chat template"):
                options |= {"tokenize": False, "add_generation_prompt": asks}
                text: str = self._tokenizer.apply_chat_template(plain, **options)
        except Exception as error:
            roles = ", ".join(m.role for m in messages)
            raise EnvError(f"the chat template refuses messages of roles {roles[:500]}: {error}") from error
        for message in messages:
            if message.role not in _USUAL and message.content.strip() not in text:
                raise EnvError(f"the chat template leaves out messages of role {message.role}; give them another role")
            calls = message.fields.get("tool_calls", ())
            if any(str(call.get("function", call)["name"]) not in text for call in calls):
                raise EnvError("the chat template leaves out tool_calls; give one that writes them")
        return text

    def more(self, text: str) -> list[int]:
        """Token ids of text that goes on after other tokens, or that the template has rendered."""
        # The template writes special tokens itself.
        text = _unicode(text)
        if (quick := self._quick) is not None and quick.truncation is None and quick.padding is None:
            return quick.encode_batch_fast([text], add_special_tokens=False)[0].ids  # type: ignore[no-any-return]
        return self._tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]


def _unicode(text: str) -> str:
    """Text for a tokenizer: a question mark for half of a surrogate pair (data sets hold such), as in the records."""
    return text.encode("utf-8", "replace").decode("utf-8")


FIRST_PROMPTS = 64
"""Tasks whose prompts are measured before a run: enough to see that the context is too small for the data."""


def longest_prompt(tasks: Sequence[Task], template: Template, context: int) -> int:
    """Tokens of the longest prompt, before anything is played.

    Raises:
        ConfigError: it leaves no room for an answer, or was rendered by the chat template already.
        EnvError: the chat template refuses a prompt.
    """
    lengths = []
    for task in tasks:
        try:
            lengths.append(len(template.prompt(task.prompt)))
        except EnvError as error:
            raise EnvError(f"the prompt of task {task.id} ({task.env}): {error}") from error
    for env in dict.fromkeys(task.env for task in tasks):
        markers = [template.rendered(task.prompt) for task in tasks if task.env == env]
        if all(markers):
            known = f"the prompts of {env} were rendered by a chat template already: they have {markers[0]!r}"
            raise ConfigError(f"{known}; give the question alone, or set chat: false of the data set")
    most = max(lengths)
    if most >= context:
        longest = f"the prompt of task {tasks[lengths.index(most)].id} has {most} tokens"
        raise ConfigError(f"{longest} and the context is {context}; raise context, or shorten prompts")
    return most


def shortfall(prompt_tokens: int, context: int, max_tokens: int) -> str:
    """Warning where the context cuts answers before ``sampling.max_tokens`` does; else empty."""
    room = context - prompt_tokens
    if room >= max_tokens:
        return ""
    return f"leaves {room} for answers, fewer than sampling.max_tokens ({max_tokens}): longer answers are cut there"
