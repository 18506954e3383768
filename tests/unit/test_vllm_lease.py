"""A pause's lease on a served engine."""

from __future__ import annotations

import asyncio

from tandem.engines.vllm.server.frontend import PauseLease


def test_a_renewal_counts_from_now() -> None:
    async def stop(reason: str) -> None:
        raise AssertionError(reason)

    async def go() -> None:
        lease = PauseLease(stop)
        lease.renew(30.0, "a trainer")
        lease.renew(600.0)
        assert lease.report is not None
        assert lease.report["by"] == "a trainer"
        assert lease.report["seconds_left"] > 500.0
        lease.end()
        assert lease._timer is None

    asyncio.run(go())
