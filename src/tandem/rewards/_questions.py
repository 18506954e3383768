"""One question to a server with OpenAI's chat completions, asked again until it is answered."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.lazy import aiohttp

_NEVER = (401, 403, 404)
"""Statuses that no other question would change: a wrong key, URL or model."""

_LATER = (408, 409, 425, 429)
"""Statuses below 500 with which the same question may be asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a question."""

    text: str | None = None
    """What the model said; None: nothing."""
    error: str = ""
    """Why it said nothing, to stand behind a reward's name."""
    away: bool = False
    """True if the server could not answer, however often it was asked."""
    costs: Literal["rollout", "run"] = "rollout"
    """What is lost by an error that is not the server's absence."""


class _Later(Exception):
    """Ask again, after ``seconds`` at least."""

    def __init__(self, text: str, seconds: float = 0.0) -> None:
        super().__init__(text)
        self.seconds = seconds


class Server:
    """Where questions go."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, seconds: float, retries: int, backoff: float):
        """Nothing is sent yet.

        Args:
            session: With the headers that authorise.
            url: Base of the API.
            seconds: How long one request may take.
            retries: How often a question is asked again.
            backoff: Seconds before the first time; they double, less a random part of up to a half, so that many
                askers do not come back at once.
        """
        self._session = session
        self._url = url.rstrip("/") + ("" if url.rstrip("/").endswith("/chat/completions") else "/chat/completions")
        self._timeout = aiohttp.ClientTimeout(total=seconds)
        self._retries = retries
        self._backoff = backoff

    async def ask(self, body: Mapping[str, Any]) -> Answer:
        """The answer to a request."""
        for again in range(self._retries + 1):
            try:
                return await self._asked(body)
            except _Later as error:
                if again == self._retries:
                    times = f", asked {again + 1} times" if again else ""
                    return Answer(error=f"had no answer from {self._url}: {error}{times}", away=True)
                pause = self._backoff * 2**again * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(pause, error.seconds))
        raise AssertionError("the last time returns")

    async def _asked(self, body: Mapping[str, Any]) -> Answer:
        """One request; raises _Later."""
        try:
            async with self._session.post(self._url, json=body, timeout=self._timeout) as response:
                said = await response.text(errors="replace")
                status, later = response.status, response.headers.get("Retry-After", "")
        except TimeoutError as error:
            raise _Later(f"no answer within {self._timeout.total:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Later(str(error) or type(error).__name__) from error
        if status >= 500 or status in _LATER:
            raise _Later(f"it said {status}", float(later) if later.isdecimal() else 0.0)
        if status != 200:
            costs: Literal["rollout", "run"] = "run" if status in _NEVER else "rollout"
            return Answer(error=f"was refused by {self._url}: {status} {' '.join(said.split())[:200]}", costs=costs)
        return _read(said)


def _read(said: str) -> Answer:
    """A completion's text; raises _Later if it is no completion at all, as a proxy's page."""
    try:
        choice = json.loads(said)["choices"][0]
        text = choice["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise _Later(f"it said what is no chat completion: {said[:80]!r}") from error
    if not isinstance(text, str) or not text.strip():
        why = f" (finish_reason {choice.get('finish_reason')}; max_tokens may be too small)"
        return Answer(error=f"got an answer without text from the judge{why}")
    return Answer(text=text)
