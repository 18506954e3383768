"""What engines that run elsewhere are asked, and what they answer: Tandem's own, Atropos' example server, stock vLLM.

Each turns a prompt into a request and an answer into a ``Completion``. Token ids and logprobs are always the engine's:
an engine that does not tell them cannot be trained from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from tandem.engines.vllm.protocol import messages as wire
from tandem.errors import EngineError
from tandem.types import Completion, Finish, Json, Sampling

UNKNOWN_VERSION = -1
"""Of tokens whose engine does not say which policy sampled them."""
_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length"}


class Dialect(Protocol):
    """How one kind of engine is spoken to."""

    @property
    def path(self) -> str:
        """Route that samples."""
        ...

    def request(self, prompt: Sequence[int], sampling: Sampling, limit: int, ends: Sequence[int]) -> bytes:
        """The body that asks for one completion of at most ``limit`` tokens."""
        ...

    def completion(self, body: bytes) -> Completion:
        """What the answer says.

        Raises:
            EngineError: it lacks token ids or logprobs.
        """
        ...


@dataclass(frozen=True, slots=True)
class Tandem:
    """An engine started by ``tandem serve engine`` or by a trainer."""

    path: str = "/generate"
    """Route that samples."""

    def request(self, prompt: Sequence[int], sampling: Sampling, limit: int, ends: Sequence[int]) -> bytes:
        """As the trainer's own client asks."""
        return msgspec.json.encode(wire.asked(prompt, sampling, limit=limit, ends=ends))

    def completion(self, body: bytes) -> Completion:
        """Token ids, logprobs and the policy step of each token."""
        try:
            found = msgspec.json.decode(body, type=wire.Generated)
            tokens = found.token_ids[0]
            logprobs = [p[0][t] for t, p in zip(tokens, (found.logprobs or [[]])[0], strict=True)]
            # Before its first publish an engine holds the model as loaded, which is version 0.
            versions = [max(0, step) for step in wire.steps(found.versions[0])]
            finish = found.finish_reasons[0]
        except (msgspec.DecodeError, LookupError, ValueError) as error:
            raise EngineError(f"/generate answers with something else than was asked for: {error}") from error
        return _completion(tokens, logprobs, finish, versions)


@dataclass(frozen=True, slots=True)
class Generate:
    """A server with /generate as Atropos' example has it, which tells no policy step."""

    path: str = "/generate"
    """Route that samples."""

    def request(self, prompt: Sequence[int], sampling: Sampling, limit: int, ends: Sequence[int]) -> bytes:
        """Only what is asked for is sent: what such a server does not know, it answers with an error."""
        prompt_ids = {"prompt_token_ids": list(prompt)}
        return msgspec.json.encode({"prompt": prompt_ids, "logprobs": 0, **_asked(sampling, limit, ends)})

    def completion(self, body: bytes) -> Completion:
        """Of each position the first entry of the first mapping: the sampled token and its logprob."""
        try:
            found = msgspec.json.decode(body)
            firsts = [_first(place) for place in found["logprobs"][0]]
            finish = found["finish_reasons"][0]
        except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
            raise EngineError(f"/generate answers without the logprobs that were asked for ({error!r})") from error
        return _completion([token for token, _ in firsts], [logprob for _, logprob in firsts], finish)


@dataclass(frozen=True, slots=True)
class OpenAi:
    """Stock vLLM's /v1/completions, which takes and tells token ids."""

    model: str
    """What the server calls the model."""
    path: str = "/v1/completions"
    """Route that samples."""

    def request(self, prompt: Sequence[int], sampling: Sampling, limit: int, ends: Sequence[int]) -> bytes:
        """Token ids are asked for in both ways that vLLM's releases know."""
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        # Here what is off is said: where nothing is, vLLM takes what the model's own generation_config.json recommends.
        asked = {**_OFF, **_asked(sampling, limit, ends)}
        asked |= {"model": self.model, "prompt": list(prompt), "logprobs": 1, **ids}
        return msgspec.json.encode(asked)

    def completion(self, body: bytes) -> Completion:
        """Token ids beside the choice, or in the texts of its tokens."""
        try:
            choice = msgspec.json.decode(body)["choices"][0]
            told = choice["logprobs"] or {}
            tokens = choice.get("token_ids") or [int(t.removeprefix("token_id:")) for t in told["tokens"]]
            logprobs, finish = told["token_logprobs"], choice["finish_reason"]
        except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"/v1/completions answers without token ids or logprobs ({error!r}), and text cannot be trained on; "
                "use vLLM, or an engine started by: tandem serve engine RECIPE"
            ) from error
        return _completion(tokens, logprobs, finish)


_OFF: Mapping[str, float] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
"""What leaves sampling as it is."""


def _asked(sampling: Sampling, limit: int, ends: Sequence[int]) -> Mapping[str, Json]:
    """Sampling under vLLM's names, without what is off."""
    ends = [*ends, *sampling.stop_token_ids]
    stop = {"stop": list(sampling.stop), "include_stop_str_in_output": True} if sampling.stop else {}
    given = {name: getattr(sampling, name) for name in _OFF}
    given["min_tokens"] = min(sampling.min_tokens, limit)
    return {
        "n": 1,
        "max_tokens": limit,
        "temperature": sampling.temperature,
        **{name: value for name, value in given.items() if value != _OFF[name]},
        **({"stop_token_ids": list(ends)} if ends else {}),
        **stop,
    }


def _first(place: Any) -> tuple[int, float]:
    mapping = place[0] if isinstance(place, list) else place
    token, logprob = next(iter(mapping.items()))
    return int(token), float(logprob)


def _completion(
    tokens: Sequence[int], logprobs: Sequence[float | None], finish: str | None, versions: Sequence[int] = ()
) -> Completion:
    if not tokens:
        raise EngineError("the engine sampled not a single token")
    if len(logprobs) != len(tokens) or not all(p is not None and math.isfinite(p) for p in logprobs):
        raise EngineError(
            f"the engine gave {len(logprobs)} logprobs, not all of them numbers, for {len(tokens)} tokens"
        )
    return Completion(
        tokens=tuple(tokens),
        logprobs=tuple(p for p in logprobs if p is not None),
        versions=tuple(versions) or (UNKNOWN_VERSION,) * len(tokens),
        finish=_FINISH.get(finish or "", "abort"),
    )
