"""Request limits of one engine: context length and vocabulary.

Looked at before vLLM sees a request: token ids that the model does not have would end its process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tandem.engines.vllm.protocol import Generate, Refusal


class EngineLimits:
    """Request limits of one engine; ``client`` is vLLM's."""

    def __init__(self, client: Any):
        self._client = client
        self.context = int(client.vllm_config.model_config.max_model_len)
        """Most tokens of a prompt and its answer together."""
        self.vocabulary = int(client.vllm_config.model_config.get_vocab_size())
        """Token ids are below this."""

    async def ids(self, text: str) -> list[int]:
        """A text's tokens."""
        return list(await asyncio.to_thread(self._client.get_tokenizer().encode, text))

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
