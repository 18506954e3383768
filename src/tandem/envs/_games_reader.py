"""Environments of gymnasium, TextArena and OpenEnv, as the process of a package plays them: reset, step, close."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

Seen = dict[str, Any]
"""What the policy sees next (``text``), the reward of its last move, and whether the episode is ``done``."""


class Episodes:
    """Episodes that are under way, by the rollouts' ids."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.playing = make, dict[str, Any]()

    async def reset(self, key: str, seed: int) -> Seen:
        """Begin an episode."""
        self.playing[key] = episode = self.make()
        return await episode.reset(seed)  # type: ignore[no-any-return]

    async def step(self, key: str, move: str) -> Seen:
        """Make a move in one."""
        return await self.playing[key].step(move)  # type: ignore[no-any-return]

    async def close(self, key: str) -> None:
        """End one."""
        if (episode := self.playing.pop(key, None)) is not None:
            await episode.close()


class GymnasiumEpisode:
    """Moves are texts, or the number that a reply ends with where actions are numbered."""

    def __init__(self, id: str, args: Mapping[str, Any]) -> None:
        import gymnasium

        self.env = gymnasium.make(id, **args)
        self.space = self.env.action_space
        self.numbered = isinstance(self.space, gymnasium.spaces.Discrete)

    async def reset(self, seed: int) -> Seen:
        """Begin it."""
        return self._seen(self.env.reset(seed=seed)[0], 0.0, False)

    async def step(self, move: str) -> Seen:
        """Make the policy's move."""
        action: Any = move.strip()
        if self.numbered:
            least, most = int(self.space.start), int(self.space.start + self.space.n - 1)
            numbers = [int(number) for number in re.findall(r"-?\d{1,9}", move)]
            if not numbers or not least <= numbers[-1] <= most:
                return {"text": f"Reply with a number from {least} to {most}.", "reward": 0.0, "done": False}
            action = numbers[-1]
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return self._seen(observation, float(reward), bool(terminated or truncated))

    async def close(self) -> None:
        """End it."""
        self.env.close()

    def _seen(self, observation: Any, reward: float, done: bool) -> Seen:
        drawn = self.env.render() if self.env.render_mode == "ansi" else observation
        return {"text": str(drawn), "reward": reward, "done": done}


class TextArenaEpisode:
    """A game for one player. Its dice are Python's own, which each episode has to itself here."""

    def __init__(self, id: str, args: Mapping[str, Any]) -> None:
        import textarena

        self.env = textarena.make(id, **args)
        self.dice: Any = None

    async def reset(self, seed: int) -> Seen:
        """Begin it."""
        self.env.reset(num_players=1, seed=seed)
        return self._seen(False)

    async def step(self, move: str) -> Seen:
        """Make the policy's move."""
        random.setstate(self.dice)
        return self._seen(self.env.step(action=move)[0])

    async def close(self) -> None:
        """Nothing is held."""

    def _seen(self, done: bool) -> Seen:
        player, observation = self.env.get_observation()
        if not isinstance(observation, str):  # what was said since, the player's own moves among it
            observation = "\n".join(text for speaker, text, *_ in observation if speaker != player)
        reward = float((self.env.close()[0] or {}).get(player, 0.0)) if done else 0.0
        self.dice = random.getstate()
        return {"text": observation, "reward": reward, "done": done}


class OpenEnvEpisode:
    """A session on a server."""

    def __init__(self, server: OpenEnvServer, action: str, observation: str) -> None:
        self.server, self.action, self.observation = server, action, observation

    async def reset(self, seed: int) -> Seen:
        """Begin it."""
        from openenv.core.generic_client import GenericEnvClient

        self.client = GenericEnvClient(await self.server.reached())
        await self.client.connect()
        return self._seen(await self.client.reset(seed=seed))

    async def step(self, move: str) -> Seen:
        """Make the policy's move."""
        return self._seen(await self.client.step({self.action: move}))

    async def close(self) -> None:
        """End it."""
        await self.client.close()

    def _seen(self, result: Any) -> Seen:
        seen = result.observation
        text = seen[self.observation] if self.observation else json.dumps(seen)
        return {"text": str(text), "reward": float(result.reward or 0.0), "done": bool(result.done)}


class OpenEnvServer:
    """A server at a URL, or one that a command starts, and starts again where it has ended."""

    def __init__(self, url: str, command: str) -> None:
        self.url, self.command = url, command
        self.process: subprocess.Popen[bytes] | None = None

    async def reached(self) -> str:
        """Its URL, once it listens."""
        if not self.command:
            return self.url
        if self.process is None or self.process.poll() is not None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
            self.process = subprocess.Popen(shlex.split(self.command.replace("{port}", str(self.port))))
        while self.process.poll() is None:
            try:
                (await asyncio.open_connection("127.0.0.1", self.port))[1].close()
                return f"http://127.0.0.1:{self.port}"
            except OSError:
                await asyncio.sleep(0.1)
        raise RuntimeError(f"{self.command} ended with status {self.process.returncode}")


def load(package: str, **options: Any) -> Episodes:
    """Episodes of a package's environment."""
    if package != "openenv":
        kind = {"gymnasium": GymnasiumEpisode, "textarena": TextArenaEpisode}[package]
        return Episodes(lambda: kind(**options))
    server = OpenEnvServer(options["url"], options["command"])
    return Episodes(lambda: OpenEnvEpisode(server, options["action"], options["observation"]))
