"""What requests gave so far, each token with the era it was sampled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Answer:
    """One completion in the making."""

    tokens: list[int] = field(default_factory=list)
    """Sampled so far."""
    told: list[Any] = field(default_factory=list)
    """What vLLM said of their logprobs, piece by piece; empty where nobody asked."""
    eras: list[int] = field(default_factory=list)
    """The era that each token was sampled in."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """Eras that ended while it was sampled, each with the number of tokens there were by then."""
    text: str = ""
    """The tokens as text; empty where that was spared."""
    finish: str = "abort"
    """Why it ended: stop or length; abort until it did."""

    @property
    def logprobs(self) -> list[dict[int, float]]:
        """Of each token: its logprob, and those of the likeliest ones where they were asked for."""
        return [_plain(position) for piece in self.told for position in piece]

    @property
    def own_logprobs(self) -> list[float]:
        """Of each token: its own, without an object for each."""
        found: list[float] = []
        for piece in self.told:
            starts = getattr(piece, "start_indices", None)
            if starts is None:
                tokens = self.tokens[len(found) : len(found) + len(piece)]
                found += [position[token].logprob for token, position in zip(tokens, piece, strict=True)]
            else:  # vLLM's FlatLogprobs; what was sampled is the first of its position
                logprobs = piece.logprobs
                found += [logprobs[start] for start in starts]
        return found


@dataclass(slots=True)
class Answers:
    """What one request gave."""

    completions: list[Answer]
    """As many as were asked for."""
    prompt: list[int]
    """Its token ids."""
    prompt_logprobs: list[dict[int, float] | None] | None
    """Of each prompt token but the first; None where nobody asked."""
    cached: int
    """Prompt tokens that came from the prefix cache."""

    def add(self, output: Any, era: int) -> None:
        """File what vLLM sampled since the last time: in this era, but for what its marks say."""
        if output.prompt_logprobs and self.prompt_logprobs is None:
            self.prompt_logprobs = [_plain(p) if p else None for p in output.prompt_logprobs]
        self.cached = max(self.cached, output.num_cached_tokens or 0)
        for part in output.outputs:
            answer = self.completions[part.index]
            # Ended from without, it may lack the logprobs of its last tokens, which the scheduler still had.
            told = len(part.logprobs) if part.finish_reason == "abort" and part.logprobs is not None else None
            answer.tokens.extend(part.token_ids[:told])
            for ended, count in answer.marks:
                answer.eras.extend([ended] * (min(count, len(answer.tokens)) - len(answer.eras)))
            answer.eras.extend([era] * (len(answer.tokens) - len(answer.eras)))
            if part.logprobs:
                answer.told.append(part.logprobs)
            answer.text += part.text or ""
            answer.finish = part.finish_reason or answer.finish


def _plain(logprobs: Mapping[int, Any]) -> dict[int, float]:
    return {token: value.logprob for token, value in logprobs.items()}
