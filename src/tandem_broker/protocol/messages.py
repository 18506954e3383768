"""The messages of the protocol as types: what trainers and environments send, and what they are answered.

``-100`` and the logprob 1.0 exist on this wire alone. Bounds keep values within what every reader of JSON, SQLite and
float32 can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MOST = 1e12
"""Largest score, advantage or teacher's logprob. Its square, and sums of such, are finite in float32 as well."""
LEAST_LOGPROB = -1e4
"""Lowest logprob of a token that was sampled; vLLM writes minus infinity as -9999."""
MOST_STEP = 2**53
"""Policy steps are below this: within the ints of SQLite, which have a sign, and of JSON readers that have floats."""

Real = Annotated[float, Meta(ge=-MOST, le=MOST)]
Logprob = Annotated[float, Meta(ge=LEAST_LOGPROB, le=MOST)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
MaskToken = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Meta(ge=1, lt=2**53)]
Signed = Annotated[int, Meta(ge=-1, lt=2**53)]
Text = Annotated[str, Meta(max_length=4096)]


class RunParameters(msgspec.Struct, kw_only=True, frozen=True):
    """Body of ``POST /register``: what the trainer says of its run."""

    wandb_group: Text
    wandb_project: Text
    batch_size: Count
    max_token_len: Signed
    """Most tokens of one sequence; zero or less: no limit."""
    checkpoint_dir: Text
    """Where the trainer keeps checkpoints; environments keep theirs beneath."""
    save_checkpoint_interval: Signed
    starting_step: Annotated[int, Meta(ge=0, lt=MOST_STEP)]
    num_steps: Signed


class EnvRegistration(msgspec.Struct, kw_only=True, frozen=True):
    """Body of ``POST /register-env``."""

    max_token_length: Annotated[int, Meta(ge=0, lt=2**53)]
    desired_name: Text
    weight: Annotated[float, Meta(ge=0, le=MOST)]
    group_size: Count
    min_batch_allocation: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Least share of each batch, 0 to 1; null: none."""


class EnvAccepted(msgspec.Struct, kw_only=True, frozen=True):
    """Answer to ``POST /register-env`` once the trainer has started."""

    status: str = "success"
    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int


class EnvStatus(msgspec.Struct, kw_only=True, frozen=True):
    """Answer to ``GET /status-env``; sizes in groups of the environment's own size."""

    current_step: int
    """The trainer's step if it tells its steps, else batches served; counted from its starting step."""
    queue_size: int
    """Own groups queued, and those of others as far as they count against it."""
    self_queue_size: int = 0
    max_group_size: int = 1
    """Largest group queued, in sequences."""
    unallocated_fraction: float = 1.0
    """Share of each batch that no connected environment has reserved."""
    env_weight: float = 1.0


class EnvName(msgspec.Struct, kw_only=True, frozen=True):
    """Body of ``GET /status-env`` and ``POST /disconnect-env``."""

    env_id: Annotated[int, Meta(ge=-(2**53), lt=2**53)]


class BatchQuery(msgspec.Struct, kw_only=True, frozen=True):
    """Parameters of ``GET /batch``, none of which Atropos knows."""

    lease: Annotated[float, Meta(gt=0, lt=2**53)] | None = None
    """Seconds after which it is served again unless it was acknowledged; null: it counts as trained."""
    policy: Annotated[int, Meta(ge=0, lt=2**53)] | None = None
    """The trainer's step."""
    max_lag: Annotated[int, Meta(ge=0, lt=2**53)] | None = None
    """Groups sampled more steps ago are dropped."""


class BatchName(msgspec.Struct, kw_only=True, frozen=True):
    """Body of ``POST /ack`` and ``POST /release``."""

    batch: Text


class Info(msgspec.Struct, kw_only=True, frozen=True):
    """Answer to ``GET /info``; both -1 before a trainer registered."""

    batch_size: int
    max_token_len: int


class ScoredGroup(msgspec.Struct, kw_only=True):
    """A group on the wire: n sequences of one task in parallel lists, unpadded and unshifted.

    Of an optional list, null and ``[]`` both mean that it is absent.
    """

    tokens: list[list[Token]]
    """Prompt and completion ids of each sequence."""
    masks: list[list[MaskToken]]
    """``-100`` where a token is not trained, else the token."""
    scores: list[Real]
    advantages: Sequence[list[Real] | Real] | None = None
    """Per token; or one for a sequence, as some clients send it, which is spread over its tokens."""
    ref_logprobs: list[list[Real]] | None = None
    """Per token, a reference model's."""
    messages: list[list[dict[str, Any]]] | None = None
    """Per sequence a chat, whose messages have role and content."""
    generation_params: dict[str, Any] | None = None
    """How it was sampled, such as ``{"temperature": 1.0}``."""
    inference_logprobs: list[list[Logprob]] | None = None
    """Per token, the behaviour policy's; 1.0 where nothing was sampled."""
    overrides: list[dict[str, Any]] | None = None
    """Per sequence: set_advantage_to_zero, temperature, sft."""
    group_overrides: dict[str, Any] | None = None
    """Per group: group_size, temperature, sft, and what Tandem adds: tandem_version, tandem_task, ..."""
    images: Any = None
    env_id: Annotated[int, Meta(ge=0, lt=2**53)] | None = None
    """Id of the environment that made it; null: anonymous."""
    distill_token_ids: list[list[list[Token]]] | None = None
    """Per sequence, position and rank: a teacher's tokens."""
    distill_logprobs: list[list[list[Real]]] | None = None


FIELDS = tuple(field.name for field in msgspec.structs.fields(ScoredGroup))
"""The 14 keys of a group, in the order in which answers give them."""
