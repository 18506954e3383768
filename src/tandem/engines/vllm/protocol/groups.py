"""What an engine is told of a broadcast group: who meets where, and which tensors come."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from tandem.engines.vllm.protocol.fields import Dtype, Seconds, Shape, Text, shallow
from tandem.engines.vllm.protocol.messages import Body, Entry

MOST_MEMBERS = 1024
"""Most members of a group: each keeps a record of all others."""


class Metadata(msgspec.Struct, kw_only=True):
    """One tensor that will be sent."""

    shape: Shape
    dtype: Dtype


class Listed(Body):
    """All tensors that will be sent, as Atropos' example trainer says it."""

    param_names: list[Text]
    """In the order in which they come."""
    param_shapes: dict[Text, Shape]
    param_dtypes: dict[Text, Dtype]
    num_params: int | None = None
    """How many; checked."""


class StartReceiver(Body):
    """POST /nccl/start_receiver."""

    init_method: Text
    """tcp://host:port of rank 0."""
    world_size: Annotated[int, msgspec.Meta(ge=2, le=MOST_MEMBERS)]
    param_metadata: msgspec.Raw = msgspec.Raw(b"{}")
    """What comes with each publish, in this order, as ``Metadata`` by name or as ``Listed``; otherwise every
    /nccl/receive says it. Read once it is known which form it has, so that another makes no objects first."""
    param_mappings: dict[Text, msgspec.Raw] = msgspec.field(default_factory=dict)
    """The engine's names of it; checked, for the engine knows where its tensors lie."""
    first_rank: Annotated[int, msgspec.Meta(ge=1, lt=MOST_MEMBERS)] = 1
    """Rank of this engine's first worker."""
    backend: Literal["nccl", "gloo"] | None = None
    """nccl or gloo; by default what the device has."""
    name: Text = "tandem"
    seconds: Seconds = 120.0
    """Deadline of joining and of each transfer."""


class Receive(Body):
    """POST /nccl/receive."""

    manifest: list[Entry] = msgspec.field(default_factory=list)
    """Each tensor, in the order in which they come; by default what came last, or what start_receiver announced."""
    bucket_bytes: Annotated[int, msgspec.Meta(gt=0, le=2**40)] = 64 << 20
    """Most bytes of one transfer, as rank 0 sends them."""
    config: dict[str, Any] | None = None
    """PEFT's configuration, where it is an adapter that comes."""

    def __post_init__(self) -> None:
        shallow(self.config or {})
