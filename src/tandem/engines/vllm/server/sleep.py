"""An engine that gives its accelerator's memory back while a step is trained: vLLM's sleep mode, by two routes.

Asleep it is paused as well, so nothing is sampled. Level 1 keeps the weights in the host's memory; level 2 keeps
nothing, and what is there after waking up is garbage: it counts as weights that were written, which are not served
before a publish has been proven and stamped.
"""

from __future__ import annotations

from typing import Any

from tandem.engines.vllm.protocol import messages as wire
from tandem.engines.vllm.protocol.messages import Refused, parsed
from tandem.engines.vllm.server.frontend import Frontend


class Sleeper:
    """The routes /bridge/sleep and /bridge/wake, over ``sleep`` and ``wake_up`` of vLLM's asynchronous engine."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend
        self.level = 0
        """How deep it sleeps; 0: it is awake."""

    async def sleep(self, body: bytes) -> Any:
        """POST /bridge/sleep: release the memory; twice is once."""
        asked = parsed(body, wire.Sleep)
        front = self._frontend
        if front.state not in ("paused", "stopped"):
            raise Refused(409, "/bridge/sleep takes the memory of what is being sampled: pause first")
        if running := front.places.running:
            raise Refused(409, f"{running} requests are in flight, and sleep would lose their keys and values")
        if not getattr(front.client.vllm_config.model_config, "enable_sleep_mode", False):
            raise Refused(409, "this engine cannot sleep: start it with --enable-sleep-mode (engine.sleep)")
        if not self.level:
            front.lease.hold()
            if asked.level > 1:
                front.written = True
            self.level = asked.level
            await front.client.sleep(asked.level)
        return {"level": self.level}

    async def wake(self, body: bytes) -> Any:
        """POST /bridge/wake: have the memory again, and stay paused; an engine that is awake is left alone."""
        asked, front = parsed(body, wire.Wake), self._frontend
        if self.level:
            await front.client.wake_up()
            await front.still()  # some releases begin to schedule as they wake up
            self.level = 0
            front.lease.renew(asked.seconds)
        return {"level": self.level}
