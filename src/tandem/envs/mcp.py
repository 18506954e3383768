"""Rows of a data set, answered with the tools of MCP servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tandem.envs._package import Package
from tandem.envs.base import Chat, Split
from tandem.envs.dataset import Dataset
from tandem.errors import ConfigError, bounded
from tandem.types import Json, Task


@dataclass(frozen=True, kw_only=True)
class Mcp(Dataset):
    """Tasks of a data set; the policy may call the tools of MCP servers, as its chat template writes calls."""

    servers: list[dict[str, Json]] = field(default_factory=list)
    """Each ``{command: ..., args: [...]}``, with ``env`` and ``cwd`` if it needs them, or ``{url: ...}``. Every rollout
    has sessions of its own, and of a command a process of its own."""
    python: str = ""
    """Interpreter that has the mcp package; empty: this one."""
    max_turns: int = bounded(5, least=1)
    """Most times the policy speaks; calls in the last turn are not answered."""
    timeout_seconds: float = bounded(600.0, above=0)
    """How long one task may take."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.servers or any(("url" in server) == ("command" in server) for server in self.servers):
            raise ConfigError(f"servers must be a list, each with a command or a url, got {self.servers}")

    def tasks(self, split: Split) -> Sequence[Task]:
        """As of any data set; the servers are asked for their tools now.

        Raises:
            EnvError: a server cannot be reached, or the mcp package is missing.
        """
        self._package.read("tools")
        return super().tasks(split)

    async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
        messages = [message.as_dict() for message in task.prompt]
        owner = f"rollout {chat.id}"
        async with chat.serve() as url:
            metrics = await self._package.answer(self.timeout_seconds, owner, "play", messages=messages, url=url)
        return dict(metrics)

    @cached_property
    def _package(self) -> Package:
        return Package(self.python, "mcp", self.name, servers=self.servers, max_turns=self.max_turns)
