"""The OpenEnv server of recipes/openenv.yaml, which dies, hangs or floods at its first step."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import create_app
from say_server import Say, SayAction, SayObservation


class Broken(Say):
    def step(self, action: SayAction, timeout_s: float | None = None, **_: Any) -> SayObservation:
        if sys.argv[1] == "dies":
            os._exit(3)
        if sys.argv[1] == "hangs":
            time.sleep(3600)
        return SayObservation(prompt="x" * (80 << 20))


if __name__ == "__main__":
    app = create_app(Broken, SayAction, SayObservation, env_name="say", max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
