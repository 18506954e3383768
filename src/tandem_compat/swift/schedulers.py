"""ms-swift's multi-turn schedulers: classes of plug-in files that say after each answer whether and how it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from tandem.envs.base import Chat, Split
from tandem.errors import ConfigError, EnvError
from tandem.rollout.chat import EngineChat
from tandem.types import Message, Task
from tandem_compat.swift.datasets import SwiftDataset
from tandem_compat.swift.plugin import schedulers

KIND = f"{__name__}:ScheduledDataset"
"""How a recipe names the environment."""


_BASES = ("RolloutScheduler", "MultiTurnScheduler")
"""ms-swift's own classes, whose ``run`` is what is done here."""


@dataclass(frozen=True, kw_only=True)
class ScheduledDataset(SwiftDataset):
    """Rows whose conversations go on as a scheduler says, by messages after each answer; every answer is trained."""

    scheduler: str
    """Its name in ``multi_turns``."""
    files: tuple[str, ...]
    """The plug-in files, run in order."""
    max_turns: int | None = None
    """Most answers; null: as many as the scheduler wants."""
    model: str = ""
    """Whose tokenizer the scheduler is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files:
            raise ConfigError("files must name the plug-in's files")

    def __getstate__(self) -> dict[str, Any]:
        """The options alone."""
        return {name: value for name, value in vars(self).items() if name != "_made"}

    def tasks(self, split: Split) -> Sequence[Task]:
        """As of any rows; that the scheduler is there is seen now.

        Raises:
            EnvError: no file registers it, or it cannot be made.
        """
        assert self._made is not None
        return super().tasks(split)

    @cached_property
    def _made(self) -> Any:
        known = schedulers(self.files)
        if self.scheduler not in known:
            names = ", ".join(sorted(known)) or "nothing"
            raise EnvError(f"no file registers scheduler {self.scheduler!r}; in multi_turns: {names}")
        made = known[self.scheduler]
        if any("run" in vars(base) for base in getattr(made, "__mro__", ()) if base.__name__ not in _BASES):
            raise EnvError(f"scheduler {self.scheduler} has a run of its own, which asks ms-swift's engine; write step")
        from tandem.model.policy import load_tokenizer

        tokenizer = load_tokenizer(self.model) if self.model else None
        try:
            return made(max_turns=self.max_turns, tokenizer=tokenizer)
        except Exception as error:  # user code; the message carries it
            raise EnvError(f"scheduler {self.scheduler} cannot be made: {type(error).__name__}: {error}") from error

    async def play(self, task: Task, chat: Chat) -> Mapping[str, float]:
        """Answer until the scheduler has had enough; numbers among its ``rollout_infos`` are metrics."""
        request = SimpleNamespace(messages=_plain(chat.messages), data_dict=dict(task.meta), uuid=task.id)
        infos: dict[str, Any] = {}
        await self._made.on_trajectory_start([request])
        self._unchanged(request, chat)
        for turn in range(1, 10**9):
            message = await chat.reply()
            request.messages.append({"role": "assistant", "content": message.content})
            choice = _choice(chat, message.content)
            if await self._ends(request, choice, turn, infos) or not chat.open:
                break
            result = self._made.step(request, choice, turn)
            infos |= result.get("rollout_infos") or {}
            request = result["infer_request"]
            if not all(result.get("response_loss_mask") or ()):
                raise EnvError(f"scheduler {self.scheduler} masks what was sampled; every sampled token is trained")
            added = request.messages[len(chat.messages) :]
            self._unchanged(request, chat, len(added))
            if not added:
                raise EnvError(f"scheduler {self.scheduler} says nothing after the policy's answer, so it cannot go on")
            for new in map(dict, added):
                chat.add(Message(role=new.pop("role"), content=new.pop("content"), fields=new))
        numbers = {name: float(value) for name, value in infos.items() if isinstance(value, int | float)}
        return {**numbers, "num_turns": float(turn)}

    async def _ends(self, request: SimpleNamespace, choice: SimpleNamespace, turn: int, infos: dict[str, Any]) -> bool:
        """Whether an answer was the last."""
        result = await self._made.on_turn_end(request, choice, turn) or {}
        infos |= result.get("rollout_infos") or {}
        ends = bool(result.get("done", self._made.check_finished(request, choice, turn)))
        return ends or (self.max_turns is not None and turn >= self.max_turns)

    def _unchanged(self, request: SimpleNamespace, chat: Chat, new: int = 0) -> None:
        """Raise EnvError where a scheduler rewrites what was said: those tokens were sampled as they are."""
        before = request.messages[: len(request.messages) - new]
        history = [(message["role"], message["content"]) for message in _plain(chat.messages)]
        if [(message["role"], message["content"]) for message in before] != history:
            raise EnvError(f"scheduler {self.scheduler} changes what was said before; it may only add messages")


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.as_dict() for message in messages]


def _choice(chat: Chat, text: str) -> SimpleNamespace:
    """The last answer as a choice of OpenAI's response, as ms-swift has it; logprobs are recorded, and not told."""
    turn = chat.turns[-1].completion if isinstance(chat, EngineChat) else None
    return SimpleNamespace(
        message=SimpleNamespace(content=text, role="assistant"),
        finish_reason=turn.finish if turn else "stop",
        token_ids=list(turn.tokens) if turn else [],
        logprobs=None,
    )
