"""Agent environment: a program that solves tasks of a data set over the OpenAI API."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tandem import processes
from tandem.envs._package import Package
from tandem.envs.base import Chat, Split
from tandem.envs.dataset import Dataset, imported
from tandem.errors import ConfigError, EnvError, bounded
from tandem.types import Message, Task

_FUNCTION = re.compile(r"[\w.]+:[A-Za-z_]\w*$")


@dataclass(frozen=True, kw_only=True)
class Agent(Dataset):
    """Tasks of a data set, each solved by a program that asks the policy over the OpenAI API."""

    agent: str
    """``pkg.mod:fn``, awaited with the task and the API's base URL, or a command, which has OPENAI_BASE_URL and reads
    the task as JSON. The text that the one returns and the other prints is the last message that rewards see."""
    python: str = ""
    """Interpreter that has the packages of ``pkg.mod:fn``, which a process of it imports; empty: this process does."""
    timeout_seconds: float = bounded(600.0, above=0)
    """How long one task may take."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            words = shlex.split(self.agent)
        except ValueError as error:
            raise ConfigError(f"agent must be an import path or a command, got {self.agent!r}: {error}") from error
        if self.python and not _FUNCTION.match(self.agent):
            raise ConfigError(f"python is for an agent that is pkg.module:function; {self.agent!r} is a command")
        if not words:
            raise ConfigError("agent must be an import path such as my_agent:solve, or a command, got an empty text")

    def tasks(self, split: Split) -> Sequence[Task]:
        """As of any data set; that the agent is there is seen now, and not when the first task is played.

        Raises:
            EnvError: it cannot be imported, is not async, or there is no such command.
        """
        if self._package is not None:
            self._package.read("ready")
        elif _FUNCTION.match(self.agent):
            _function(self.agent)
        elif shutil.which(command := shlex.split(self.agent)[0]) is None:
            raise EnvError(f"agent {self.agent!r}: there is no command {command!r}; write its path, or pkg.module:fn")
        return super().tasks(split)

    async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
        limit = asyncio.timeout(self.timeout_seconds)
        try:
            async with chat.serve() as url, limit:
                call = self._call(task, url, chat.id) if _FUNCTION.match(self.agent) else self._run(task, url)
                last_message = await call
        except TimeoutError:
            if not limit.expired():  # one of the agent's own
                raise
            raise EnvError(
                f"agent {self.agent!r} took longer than {self.timeout_seconds:g} s; raise timeout_seconds"
            ) from None
        turns = sum(message.role == "assistant" for message in chat.messages)
        if not turns:
            raise EnvError(f"agent {self.agent!r} never asked the policy; it must use the base URL that it is given")
        # An agent that returns the policy's own last words adds nothing.
        if last_message.strip() not in ("", chat.messages[-1].content.strip()):
            chat.add(Message(role="assistant", content=last_message.strip()))
        return {"turns": float(turns)}

    async def _call(self, task: Task, url: str, id: str) -> str:
        if self._package is None:
            last_message = await _function(self.agent)(task, url)
        else:
            fields = {"id": task.id, "env": task.env, "answer": task.answer, "meta": task.meta}
            prompt = [message.as_dict() for message in task.prompt]
            play = {"task": {**fields, "prompt": prompt}, "url": url}
            last_message = await self._package.answer(self.timeout_seconds, f"rollout {id}", "play", **play)
        if last_message is not None and not isinstance(last_message, str):
            raise EnvError(f"agent {self.agent!r} returned {type(last_message).__name__}, expected text or None")
        return last_message or ""

    @cached_property
    def _package(self) -> Package | None:
        """The process that imports the agent; None: it is imported here, or is a command."""
        return Package(self.python, "agent", self.agent, agent=self.agent) if self.python else None

    async def _run(self, task: Task, url: str) -> str:
        messages = [message.as_dict() for message in task.prompt]
        task_json = {"id": task.id, "messages": messages, "meta": task.meta}
        child = await asyncio.create_subprocess_exec(
            *shlex.split(self.agent),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **_addresses(url)},
            start_new_session=True,
        )
        try:
            out, err = await child.communicate(json.dumps(task_json, default=str).encode())
        finally:
            # With all that it started: nothing of it may ask the policy after its rollout has ended.
            processes.kill_group(child.pid)
            await child.wait()
        if child.returncode:
            last = err.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise EnvError(f"agent {self.agent!r} ended with status {child.returncode}: {last[0]}")
        return out.decode(errors="replace")


def _addresses(url: str) -> dict[str, str]:
    """Environment variables by which clients of OpenAI and of Anthropic, which adds /v1 itself, find the policy."""
    openai = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
    return {**openai, "ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": "none"}


def _function(path: str) -> Callable[[Task, str], Awaitable[Any]]:
    """Import the agent.

    Raises:
        EnvError: it cannot be imported, or is not async.
    """
    function = imported("agent", path)
    unwrapped: Any = inspect.unwrap(function)
    if not inspect.iscoroutinefunction(unwrapped) and not inspect.iscoroutinefunction(unwrapped.__call__):
        raise EnvError(
            f"agent {path!r} is not async; write it with async def, since the policy cannot answer one that blocks"
        )
    return function
