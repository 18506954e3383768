"""Request limits of one engine: context length, vocabulary, and what one request may cost the others.

Looked at before vLLM sees a request. Some of it vLLM finds itself, release by release more of it; the rest would be a
fault of its process, a wait of minutes, or the end of the process that has the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tandem.engines.vllm.protocol import MOST_ANSWERS, Generate, Refusal

CHARACTERS = 256
"""Of the longest token, where the tokenizer does not tell."""
LONG = 20_000
"""Characters of a text from which on it is not made tokens of in the event loop."""


class EngineLimits:
    """Request limits of one engine; ``client`` is vLLM's."""

    def __init__(self, client: Any):
        self._client = client
        self.context = int(client.vllm_config.model_config.max_model_len)
        """Most tokens of a prompt and its answer together."""
        self.vocabulary = int(client.vllm_config.model_config.get_vocab_size())
        """Token ids are below this."""

    async def ids(self, text: str) -> list[int]:
        """A text's tokens.

        Raises:
            Refusal: it is longer than the longest tokens of the whole context.
        """
        tokenizer = self._client.get_tokenizer()
        most = self.context * int(getattr(tokenizer, "max_chars_per_token", CHARACTERS))
        if len(text) > most:
            raise Refusal(
                400,
                f"prompt is longer than the context of {self.context} tokens can be: {len(text)} characters, of which "
                f"{most} would fit at most",
            )
        if len(text) > LONG:
            return list(await asyncio.to_thread(tokenizer.encode, text))
        return list(tokenizer.encode(text))

    def check(self, prompt: Sequence[int], request: Generate) -> None:
        """Raise Refusal unless this may be asked of the engine."""
        self.prompt(prompt)
        self.tokens("stop_token_ids", request.stop_token_ids or ())
        self.length("max_tokens", request.max_tokens)
        if request.min_tokens > request.max_tokens:
            raise Refusal(400, f"min_tokens is {request.min_tokens}, above max_tokens: {request.max_tokens}")

    def prompt(self, tokens: Sequence[int]) -> None:
        """The same, of a prompt."""
        if not tokens:
            raise Refusal(400, "prompt is empty: it needs at least one token")
        if len(tokens) > self.context:
            raise Refusal(400, f"prompt is longer than the engine's context: {len(tokens)} tokens, {self.context} fit")
        self.tokens("prompt", tokens)

    def tokens(self, name: str, tokens: Sequence[int]) -> None:
        """The same, of token ids."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            odd = next(token for token in tokens if not 0 <= token < self.vocabulary)
            raise Refusal(400, f"{name} has token {odd}, which is out of vocabulary: ids are below {self.vocabulary}")

    def length(self, name: str, number: int) -> None:
        """The same, of how long an answer may be."""
        if number > self.context:
            raise Refusal(400, f"{name} is {number}, longer than the engine's context of {self.context} tokens")

    def answers(self, number: int) -> None:
        """The same, of how many answers one request asks for."""
        if number > MOST_ANSWERS:
            raise Refusal(400, f"{number} answers are asked for at once, {MOST_ANSWERS} at most: send several requests")
