"""Environments of the verifiers package, as the process of a package plays them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import Any

STANDARD = frozenset({"advantage", "example_id", "is_completed", "reward"})
"""What every state has; other numbers in one are the environment's own."""
MOST_TASKS = 1000
"""Of a taskset that never ends."""


class TasksetEpisodes:
    """A taskset of verifiers 0.4 and the agent that plays it; ``args`` are what a file of its own has under ``env``."""

    def __init__(self, id: str, args: Mapping[str, Any]) -> None:
        from verifiers.v1.utils import loaders

        options = {**args, "taskset": {"id": id, **args.get("taskset", {})}}
        self.env = loaders.load_environment(loaders.resolve_env_config(options))
        self.serving: asyncio.Future[None] | None = None

    @functools.cached_property
    def tasks(self) -> list[Any]:
        """All of its tasks, or the first of those that never end."""
        taskset = self.env.taskset
        return list(taskset if taskset.bounded else taskset.take(MOST_TASKS))

    def rows(self, split: str) -> dict[str, Any]:
        """All tasks, as there is no split; and what of their own tells them apart, such as a game's seed."""
        import verifiers.v1 as vf

        rows = [_row(task.data) for task in self.tasks]
        own = {name for row in rows for name in row} - vf.TaskData.model_fields.keys()
        differ = [name for name in sorted(own) if any(row.get(name) != rows[0].get(name) for row in rows)]
        return {"of": "train", "rows": rows, "shared": True, "differ": differ}

    async def play(self, key: str, split: str, row: int, url: str) -> dict[str, Any]:
        """Play one task with the policy at a URL."""
        import verifiers.v1 as vf

        if self.serving is None:
            self.serving = asyncio.get_running_loop().create_future()
            self.server = asyncio.ensure_future(self._serve(self.serving))
        await asyncio.shield(self.serving)
        client = vf.EvalClientConfig(base_url=url, api_key_var="TANDEM_API_KEY")
        (slot,) = self.env.slots(self.tasks[row])
        episode = await self.env.run_slot(slot, vf.ModelContext(model="policy", client=client))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(
                "; ".join(f"{error.type}: {error.message}" for error in errors) or "it was not completed"
            )
        (trace,) = episode.traces  # of one agent, whose turns are the rollout's
        scores = {f"rubric/{name}": reward.score for name, reward in trace.rewards.items() if reward is not None}
        numbers = {f"state/{name}": value for name, value in trace.metrics.items() if value is not None}
        return {"metrics": {**numbers, **scores}, "reward": trace.reward, "turn_rewards": []}

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """Hold what its episodes share, in a task of its own, for as long as the process lives."""
        try:
            async with self.env.serving():
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:  # each episode that waits for it gets the error
            if not ready.done():
                ready.set_exception(error)


def _row(data: Any) -> dict[str, Any]:
    row = data.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    prompt = row.get("prompt") or ""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if system := row.get("system_prompt"):
        messages = [{"role": "system", "content": system}, *messages]
    return {**row, "prompt": messages}


class Played:
    """An environment of ``vf.load_environment`` (verifiers 0.1), its rows, and the states that wait for siblings."""

    def __init__(self, id: str, args: Mapping[str, Any]) -> None:
        import openai
        import verifiers

        self.env = verifiers.load_environment(id, **args)
        # An answer of the policy has no limit here: the trainer has its own for the whole episode.
        self.openai = openai.AsyncOpenAI(api_key="none", base_url="http://none", timeout=None, max_retries=0)
        self.waiting: dict[str, Any] = {}

    @functools.cached_property
    def data(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of each split that the environment has."""
        built = {"train": self.env.build_dataset(), "test": self.env.build_eval_dataset()}
        return {split: [dict(row) for row in rows] for split, rows in built.items() if rows is not None}

    def rows(self, split: str) -> dict[str, Any]:
        """The rows of a split, or where the environment has but one, all; and which they are of."""
        of = split if split in self.data else next(iter(self.data))
        return {"of": of, "rows": self.data[of], "shared": len(self.data) == 1, "differ": []}

    async def play(self, key: str, split: str, row: int, url: str) -> dict[str, Any] | None:
        """Play one row with the policy at a URL; None if its siblings are needed to score it."""
        from verifiers.clients import OpenAIChatCompletionsClient

        client = OpenAIChatCompletionsClient(self.openai.with_options(base_url=url))
        state = await self.env.rollout(self.data[split][row], client, "policy", dict(self.env.sampling_args))
        if state.get("error") is not None:
            raise state["error"]
        turns = [(step["reward"], step["advantage"]) for step in state["trajectory"]]
        if self.env.requires_group_rollouts:
            self.waiting[key] = state, turns
            return None
        await self.env.rubric.score_rollout(state)
        await self.env.rubric.cleanup(state)
        return self._outcome(state, turns)

    async def score(self, keys: list[str]) -> list[dict[str, Any]]:
        """Score siblings together."""
        siblings = [self.waiting.pop(key) for key in keys]
        await self.env.rubric.score_group([state for state, _ in siblings])
        for state, _ in siblings:
            await self.env.rubric.cleanup(state)
        return [self._outcome(state, turns) for state, turns in siblings]

    def _outcome(self, state: Any, turns: list[tuple[float | None, float | None]]) -> dict[str, Any]:
        own = {name: value for name, value in state.items() if name not in STANDARD}
        numbers = {f"state/{name}": float(value) for name, value in own.items() if isinstance(value, int | float)}
        scores = {f"rubric/{name}": value for name, value in (state["metrics"] or {}).items()}
        return {
            "metrics": {**numbers, **scores},
            "reward": state["reward"],
            "turn_rewards": [reward for reward, _ in turns],
        }


def load(id: str, args: Mapping[str, Any]) -> Played | TasksetEpisodes:
    """The environment, by the line of verifiers that is installed."""
    import verifiers

    return (Played if hasattr(verifiers, "load_environment") else TasksetEpisodes)(id, args)
