"""The servers of recipes/openenv.yaml and, without a port, mcp.yaml, which die, hang or flood when they are asked."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import uvicorn
from mcp.server import MCPServer
from openenv.core.env_server import create_app
from say_server import Say, SayAction, SayObservation


def fail() -> str:
    if sys.argv[1] == "dies":
        os._exit(3)
    if sys.argv[1] == "hangs":
        time.sleep(3600)
    return "x" * (2 << 20)


class Broken(Say):
    def step(self, action: SayAction, timeout_s: float | None = None, **_: Any) -> SayObservation:
        return SayObservation(prompt=fail())


def double(number: int) -> str:
    return fail()


if __name__ == "__main__":
    if sys.argv[2:]:
        app = create_app(Broken, SayAction, SayObservation, env_name="say", max_concurrent_envs=8)
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
    else:
        server = MCPServer("words")
        server.tool()(double)
        server.run("stdio")
