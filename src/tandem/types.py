"""Every noun of Tandem. Standard library only: importing this module costs nothing.

Frozen and keyword-only. What goes to graders by the thousand has no slots: pickle takes longer with them. A token is an
``int``; a logprob is a natural-log probability under the *sampled distribution* (after penalties, temperature, top-p,
top-k and min-p).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Json = Any
"""A JSON value: None, bool, int, float, str, list or dict of such."""

UNKNOWN_LOGPROB = math.inf
"""Stands for a logprob that the sampler did not tell; no probability has this one. The policy's own stands in."""

UNKNOWN_VERSION = -1
"""Policy step of tokens, or of weights, whose version was never told."""

MASKED = -100
"""In masks of Atropos' wire, a position that is not trained."""
NO_LOGPROB = 1.0
"""In logprobs of Atropos' wire, a position that was not sampled."""

TEXT = "text"
"""The role of a prompt that is no conversation: the policy goes on with the text itself, without a chat template."""

Finish = Literal["stop", "length", "abort"]
Status = Literal["ok", "error"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PolicyVersion:
    """Version of the weights: the optimizer step that made them, and a digest of their bytes. Ordered by step."""

    step: int
    """Optimizer steps taken; 0 is the model as loaded."""
    digest: str = field(compare=False)
    """Hex digest of the published bytes; empty until they were digested."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One chat message.

    Example:
        >>> import tandem
        >>> tandem.Message(role="user", content="What is 3 + 4?").role
        'user'
    """

    role: str
    """system | developer | user | assistant | tool; ``TEXT`` for a prompt that is this one text and no conversation."""
    content: str
    """Its text."""
    fields: dict[str, Json] = field(default_factory=dict, hash=False)
    """What else the chat template may read, such as tool_calls or reasoning_content."""

    def as_dict(self) -> dict[str, Json]:
        """The message as chat templates take it."""
        return {"role": self.role, "content": self.content, **self.fields}

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise TypeError(f"the content of a message must be a text, not a {type(self.content).__name__}")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem an environment poses.

    Example:
        >>> import tandem
        >>> question = tandem.Message(role="user", content="What is 3 + 4?")
        >>> task = tandem.Task(id="train/1", env="sums", prompt=(question,), answer="7", meta={"terms": 2})
        >>> task.answer
        '7'
    """

    id: str
    """Unique within its environment and stable from run to run; resume and the ledger rely on it."""
    env: str
    """Name of the environment it belongs to."""
    prompt: tuple[Message, ...]
    """The opening messages."""
    answer: str
    """The gold answer, as the environment's rewards read it; may be empty."""
    meta: dict[str, Json] = field(default_factory=dict)
    """Whatever else the environment or a reward needs (every column of a data set row)."""

    def __post_init__(self) -> None:
        # Authors of environments make these: a mistake raises where it was made.
        messages: Iterable[object] = self.prompt
        if wrong := [message for message in messages if not isinstance(message, Message)]:
            raise TypeError(
                f"the prompt of task {self.id} must be messages, such as (tandem.Message(role='user', "
                f"content='...'),), not a {type(wrong[0]).__name__}"
            )
        if not isinstance(self.answer, str):
            raise TypeError(
                f"the answer of task {self.id} must be a text, which may be empty, not a {type(self.answer).__name__}"
            )


def column(columns: Mapping[str, Json], name: str) -> Json:
    """A column by its name, or one within another by their names with dots between them; raises KeyError."""
    if name in columns:
        return columns[name]
    value: Json = columns
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(name)
        value = value[part]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling options: temperature, cut-offs, penalties and limits of a completion.

    Example:
        >>> import tandem
        >>> tandem.Sampling(temperature=0.7, top_p=0.95, max_tokens=64).penalised
        False
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy (logprobs are then those of temperature 1)."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in the prompt or the answer so far, multiplies the others; 1 is off."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that is in the answer so far; 0 is off."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token as often as it is in the answer so far; 0 is off."""
    min_tokens: int = 0
    """Tokens of a completion before which nothing ends it; end tokens have probability 0 until then."""
    max_tokens: int = 256
    """Most tokens of one completion."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; the text stays in it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion beside the model's own; the token stays in it."""
    regex: str = ""
    """Regular expression that a whole completion matches, by the engine's grammar; empty: none. Where it leaves one
    token alone, that is not trained; elsewhere the policy's logprobs are of the whole vocabulary."""

    @property
    def penalised(self) -> bool:
        """True if the tokens before a token change its probability by more than the model does."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or self.min_tokens > 0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine sampled for one prompt: token ids, logprobs and versions have one entry per token.

    Example:
        >>> import tandem
        >>> reply = tandem.Completion(tokens=(55, 2), logprobs=(-0.1, -0.7), versions=(4, 5), finish="stop")
        >>> reply.version_min, reply.version_max
        (4, 5)
    """

    tokens: tuple[int, ...]
    """Sampled token ids, the end-of-sequence token included if it was sampled."""
    logprobs: tuple[float, ...]
    """Logprob of each token under the distribution it was drawn from; ``UNKNOWN_LOGPROB`` where it was not noted."""
    versions: tuple[int, ...]
    """Policy step that sampled each token."""
    finish: Finish
    """stop: an end token or a stop text; length: cut at max_tokens or the context; abort: the engine gave up."""
    experts: bytes = field(default=b"", repr=False)
    """Experts that each token but the last was routed to, the prompt's first: for each layer top_k numbers of one byte,
    or of two where there are more than 256; empty: not told."""

    @property
    def version_min(self) -> int:
        """Oldest policy step that sampled a token of this completion."""
        return min(self.versions)

    @property
    def version_max(self) -> int:
        """Newest policy step that sampled a token of this completion."""
        return max(self.versions)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One exchange: the token ids the engine was given, and what it sampled."""

    prompt: tuple[int, ...]
    """Every token id before the completion (of a later turn: the whole conversation so far)."""
    completion: Completion
    """What was sampled after the prompt."""
    temperature: float
    """Temperature the tokens were sampled at."""
    reward: float | None = None
    """What the environment gave this turn alone, beside the rollout's reward; ``advantage: turn_returns`` reads it."""
    trained: bool = True
    """False leaves its tokens out of the loss."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One episode: a task, the policy's completions in it, and its rewards.

    Example:
        >>> import tandem
        >>> question = tandem.Message(role="user", content="What is 3 + 4?")
        >>> rollout = tandem.Rollout(
        ...     id="train/1@0/0",
        ...     task=tandem.Task(id="train/1", env="sums", prompt=(question,), answer="7"),
        ...     turns=(),
        ...     messages=(question, tandem.Message(role="assistant", content="7")),
        ...     status="ok",
        ...     rewards={"number": 1.0},
        ...     reward=1.0,
        ... )
        >>> rollout.text, rollout.num_tokens
        ('7', 0)
    """

    id: str
    """``<group id>/<sibling>``."""
    task: Task
    """The problem."""
    turns: tuple[Turn, ...]
    """Token-exact record; empty if the rollout failed before its first completion."""
    messages: tuple[Message, ...]
    """The conversation as text, for graders and people."""
    status: Status
    """error: the environment or a grader failed; such a rollout has no reward and is never trained on."""
    error: str = ""
    """What failed, for a person."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Unweighted reward of each function that gave one."""
    reward: float | None = None
    """Weighted sum of rewards; None leaves this rollout out of its group."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers the environment wants to see averaged."""
    trained: bool = True
    """False leaves its tokens out of the loss; its reward still counts in its group's baseline."""
    advantages: tuple[float, ...] | None = None
    """Of each sampled token over all turns, where the environment gave them; None: the recipe's advantage."""

    @property
    def truncated(self) -> bool:
        """True if the last completion was cut by a length limit."""
        return bool(self.turns) and self.turns[-1].completion.finish == "length"

    @cached_property
    def num_tokens(self) -> int:
        """Sampled tokens over all turns."""
        return sum(len(turn.completion.tokens) for turn in self.turns)

    @property
    def text(self) -> str:
        """Everything the policy said, turns joined by a newline."""
        return "\n".join(self._replies())

    @property
    def final_message(self) -> str:
        """The policy's last message; empty if it never spoke."""
        return next(iter(reversed(self._replies())), "")

    def _replies(self) -> list[str]:
        return [m.content for m in self.messages[len(self.task.prompt) :] if m.role == "assistant"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rollouts of one task; their advantages share one baseline.

    Example:
        >>> import tandem
        >>> group = tandem.Group(id="train/1@0", index=0, env="sums", rollouts=())
        >>> group.scored, group.zero_variance
        ((), True)
    """

    id: str
    """``<task id>@<visit>``: the same task drawn again is another group."""
    index: int
    """Place in the order of admission, from 0; batches are formed in this order."""
    env: str
    """Name of the environment."""
    rollouts: tuple[Rollout, ...]
    """The siblings, failed ones included."""
    replayed: int = 0
    """How often it was trained before, where it takes the place of a zero-variance one."""

    @cached_property
    def scored(self) -> tuple[Rollout, ...]:
        """The rollouts that count: those with a reward and at least one sampled token."""
        return tuple(r for r in self.rollouts if r.reward is not None and r.num_tokens)

    @property
    def version_min(self) -> int:
        """Oldest policy step that sampled a token of a scored rollout."""
        return min(turn.completion.version_min for r in self.scored for turn in r.turns if turn.completion.tokens)

    @property
    def zero_variance(self) -> bool:
        """True if the rewards cannot rank the siblings: fewer than two, or all equal."""
        scored = self.scored
        rewards = {(r.reward, *(turn.reward for turn in r.turns if turn.reward is not None)) for r in scored}
        return len(scored) < 2 or len(rewards) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trainable sequence. All sequences have one entry per token of it; nothing is shifted yet."""

    rollout: str
    """Id of its rollout."""
    temperature: float = 1.0
    """Temperature of every sampled token."""
    tokens: tuple[int, ...] = ()
    """Prompt and completion ids."""
    mask: tuple[bool, ...] = ()
    """True exactly on sampled tokens that are trained."""
    logprobs: tuple[float, ...] = ()
    """The behaviour policy's, 0 where mask is false."""
    advantages: tuple[float, ...] = ()
    """0 where mask is false."""
    begins: tuple[int, ...] = ()
    """Place of the first token of each completion in it, ascending."""
    ends: tuple[int, ...] = ()
    """Place after the last token of each."""
    experts: bytes = b""
    """Experts that its tokens were routed to, as in ``Completion``, as far as they are known."""
