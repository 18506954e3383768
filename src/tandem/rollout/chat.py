"""Message space to token space and back. What was sampled is never tokenised again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from tandem.agents.tool_calls import Speech, as_template, speech
from tandem.engines.base import Engine
from tandem.errors import EnvError
from tandem.observability import waits
from tandem.types import TEXT, Json, Message, Sampling, Task, Turn

_MARK = "\u2042tandem\u2042"
"""Stands for the policy's words while a template is rendered around them."""


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
    def speech(self) -> Speech:
        """What the template knows of tools."""
        return speech(self._render)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Json] = ()) -> list[int]:
        """Token ids of a conversation, up to where the policy speaks; ``tools`` are those that it may call."""
        if len(messages) == 1 and messages[0].role == TEXT:
            return self.text(messages[0].content)
        return self._encode(self._render(messages, tools))

    def bridge(
        self, opening: Sequence[Message], reply: Sequence[Message], last: int, tools: Sequence[Json] = ()
    ) -> list[int]:
        """Token ids between a sampled completion and the policy's next words.

        Args:
            opening: the conversation before the completion; templates may look at it.
            reply: what the environment says.
            last: the last sampled token; if it is the end-of-turn token the template writes, it is not repeated.
            tools: those that the policy may call.
        """
        text = self._render([*opening, Message(role="assistant", content=_MARK), *reply], tools)
        after = text.rpartition(_MARK)[2]
        # A model may end a turn with another token than the tokenizer's eos, so the token itself is compared.
        tokens = self._encode(after)
        return tokens[1:] if self.ends(last) and tokens[:1] == [last] else tokens

    def ends(self, token: int) -> bool:
        """True if a token has no text, as those that end a turn."""
        return not self.decode([token])

    def text(self, text: str) -> list[int]:
        """Token ids of text that begins a prompt, with the tokens that the tokenizer begins all text with."""
        tokens: list[int] = self._tokenizer.encode(text)
        first = self._tokenizer.bos_token_id
        # A text of somebody who writes templates by hand has that token already.
        return tokens[1:] if tokens[:2] == [first, first] else tokens

    def more(self, text: str) -> list[int]:
        """Token ids of text that goes on after other tokens."""
        return self._encode(text)

    @property
    def vocabulary(self) -> int:
        """Token ids that have a text are below this."""
        return len(self._tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of sampled tokens, special ones left out."""
        if (quick := self._quick) is not None:
            return quick.decode(list(tokens), skip_special_tokens=True)  # type: ignore[no-any-return]
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)  # type: ignore[no-any-return]

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

    def _render(self, messages: Sequence[Message], tools: Sequence[Json] = ()) -> str:
        if any(message.role == TEXT for message in messages):
            raise EnvError("a text that the policy goes on with has no chat template, so no message can follow it")
        plain = [as_template(message) for message in messages]
        options = {**self._options, "tools": list(tools)} if tools else self._options
        try:
            with waits.blocking(waits.actor("rollouts"), "messages as text", on="the chat template"):
                return self._tokenizer.apply_chat_template(  # type: ignore[no-any-return]
                    plain, tokenize=False, add_generation_prompt=True, **options
                )
        except Exception as error:
            roles = ", ".join(m.role for m in messages)
            raise EnvError(f"the chat template refuses messages of roles {roles}: {error}") from error

    def _encode(self, text: str) -> list[int]:
        # The template writes special tokens itself.
        if (quick := self._quick) is not None and quick.truncation is None and quick.padding is None:
            return quick.encode_batch_fast([text], add_special_tokens=False)[0].ids  # type: ignore[no-any-return]
        return self._tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]


answered: WeakKeyDictionary[Engine, float] = WeakKeyDictionary()
"""When each engine last answered any conversation, on the monotonic clock."""


class EngineChat:
    """One conversation on an engine; the environment sees messages, the record holds tokens. An ``envs.base.Chat``."""

    def __init__(
        self,
        engine: Engine,
        template: Template,
        task: Task,
        sampling: Sampling,
        stream: str,
        prompt: Sequence[int] | None = None,
    ):
        """Nothing is asked yet.

        Args:
            engine: samples.
            template: turns messages into tokens.
            task: begins the conversation.
            sampling: how answers are sampled.
            stream: names this conversation's random stream: the same name draws the same tokens.
            prompt: the task's messages as tokens, where they are known.
        """
        self._engine = engine
        self._task = task.id
        self._template = template
        self._sampling = sampling
        self._stream = stream
        self._messages: list[Message] = list(task.prompt)
        self._turns: list[Turn] = []
        self._pending: list[Message] = []
        self._tokens = template.prompt(task.prompt) if prompt is None else list(prompt)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything said so far, the task's prompt first."""
        return tuple(self._messages)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The token-exact record."""
        return tuple(self._turns)

    @property
    def open(self) -> bool:
        """False once the last answer was cut, or the context has no room for another."""
        cut = bool(self._turns) and self._turns[-1].completion.finish == "length"
        return not cut and len(self._tokens) < self._engine.context

    def add(self, *messages: Message) -> None:
        """Append the environment's messages."""
        self._messages.extend(messages)
        self._pending.extend(messages)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """An OpenAI-compatible API while the block lasts; what is said there takes this conversation's place."""
        from tandem.agents.server import Proxy  # which is made of this module's parts

        proxy = Proxy(self._engine, self._template, self._sampling, model="policy")
        name, session = proxy.create(self._stream)
        try:
            with session.played():
                async with proxy.serving() as url:
                    yield f"{url}/{name}/v1"
        finally:
            self._turns = list(session.turns)
            self._messages = list(session.messages or self._messages)

    async def reply(self) -> Message:
        """Let the policy speak.

        Raises:
            EngineError: the engine failed.
            EnvError: the conversation fills the context, or the environment asked twice without saying anything in
                between. Either is a matter of this one conversation.
        """
        if self._turns:
            self._close_turn()
        if len(self._tokens) >= self._engine.context:
            raise EnvError(
                f"the conversation of task {self._task} has {len(self._tokens)} tokens and the context is "
                f"{self._engine.context}, so no room is left for an answer; shorten it, or raise context"
            )
        key = _key(self._stream, len(self._turns))
        asked = self._engine.generate(self._tokens, self._sampling, key)
        completion = await waits.wait(asked, owner=waits.actor("rollouts"), reason="an answer", on="engine")
        waits.progress()
        answered[self._engine] = time.monotonic()
        self._turns.append(
            Turn(prompt=tuple(self._tokens), completion=completion, temperature=self._sampling.temperature or 1.0)
        )
        message = Message(role="assistant", content=self._template.decode(completion.tokens))
        self._messages.append(message)
        return message

    def _close_turn(self) -> None:
        """Join the last completion and the environment's reply to the prompt of the next turn."""
        if not self._pending:
            raise EnvError(
                "the environment let the policy speak twice without a message in between; call chat.add first"
            )
        last = self._turns[-1]
        reply = tuple(self._pending)
        self._turns[-1] = Turn(
            prompt=last.prompt, completion=last.completion, temperature=last.temperature, reply=reply
        )
        opening = self._messages[: len(self._messages) - len(reply) - 1]
        self._tokens += last.completion.tokens
        self._tokens += self._template.bridge(opening, reply, last=last.completion.tokens[-1])
        self._pending.clear()


def _key(stream: str, turn: int) -> int:
    """64 bits that name one completion's random stream."""
    return int.from_bytes(hashlib.blake2b(f"{stream}/{turn}".encode(), digest_size=8).digest(), "big")
