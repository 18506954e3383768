"""The default engine's options: the policy's own module, sampled in process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tandem.engines.base import Engine, EngineRequirements, EngineSpec, ExportsWeights
from tandem.errors import Bounded, bounded

if TYPE_CHECKING:
    from tandem.model.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Embedded(Bounded, EngineSpec):
    """transformers in process; needs nothing but the base install."""

    capabilities: ClassVar[frozenset[type]] = frozenset({ExportsWeights})
    tells_experts: ClassVar[bool] = True

    max_rows: int = bounded(64, least=1)
    """Most requests sampled at once; more wait."""
    prefill_tokens: int = bounded(4096, least=1)
    """Most prompt tokens computed in one forward pass."""

    @asynccontextmanager
    async def open(
        self, policy: Policy, *, context: int, requirements: EngineRequirements | None = None
    ) -> AsyncIterator[Engine]:
        """Start the sampling task; it ends with the block."""
        from tandem.engines.embedded.engine import EmbeddedEngine  # which needs torch

        tells_experts = requirements is not None and requirements.router_replay
        engine = EmbeddedEngine(policy, context, self, tells_experts=tells_experts)
        try:
            yield engine
        finally:
            await engine.close()
