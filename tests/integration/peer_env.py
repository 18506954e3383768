"""An environment of atroposlib's kind. It runs inside ``.venv-atropos``: ``python peer_env.py serve --env.* ...``.

Each task is a number that is never used twice, so each group is told from every other by its tokens. What is sent, and
what is answered to it, is written to ``--env.record`` as JSON lines.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from typing import Any

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.server_handling.server_manager import APIServerConfig
from pydantic import Field

numbers = itertools.count()


def key_of(group: Any) -> str:
    """What tells a group from others, and from itself if anything of it was changed on its way."""
    fields = [
        group.get(name) or None for name in ("tokens", "masks", "scores", "inference_logprobs", "group_overrides")
    ]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16]


class PeerConfig(BaseEnvConfig):
    style: str = Field(default="managed", description="trajectory, trajectories or managed")
    record: str = Field(default="", description="file of what was sent")
    completion_tokens: int = Field(default=12, description="of each answer")


class Recorded:
    """A post, and a line for its begin and its end."""

    def __init__(self, post: Any, path: str, groups: list[Any]):
        self.post, self.path = post, path
        self.keys = [key_of(group) for group in groups]
        self.answers = [[t for t in mask if t != -100] for group in groups for mask in group["masks"]]

    async def __aenter__(self) -> Any:
        self.write(sent=self.keys, answers=self.answers)
        response = await self.post.__aenter__()
        text = await response.text()
        self.write(answered=self.keys, status=response.status, answer=text)
        return response

    async def __aexit__(self, *about: Any) -> Any:
        return await self.post.__aexit__(*about)

    def write(self, **line: Any) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


class PeerEnv(BaseEnv):
    name = "peer"
    env_config_cls = PeerConfig

    @classmethod
    def config_init(cls) -> tuple[PeerConfig, list[APIServerConfig]]:
        return PeerConfig(), [APIServerConfig(server_type="vllm", base_url="http://127.0.0.1:1/v1", api_key="x")]

    async def setup(self) -> None:
        pass

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def get_next_item(self) -> str:
        return f"{self.config.style} {os.getpid()} {next(numbers)}:"

    async def collect_trajectory(self, item: str) -> tuple[Any, list[Any]]:
        """One answer as text, with no logprobs."""
        answer = await self.server.completion(prompt=item, max_tokens=self.config.completion_tokens, temperature=1.0)
        prompt = self.tokenizer.encode(item)
        tokens = self.tokenizer.encode(answer.choices[0].text)
        masks = [-100] * len(prompt) + tokens
        return {"tokens": prompt + tokens, "masks": masks, "scores": float(sum(tokens) % 7)}, []

    async def collect_trajectories(self, item: str) -> tuple[Any, list[Any]]:
        if self.config.style == "trajectory":
            return await super().collect_trajectories(item)
        if self.config.style == "managed":
            return await self.by_managed_server(item), []
        group = await self.by_tokens(item, self.config.group_size)
        if int(item.split()[-1][:-1]) % 3:
            return group, []
        # Half a group and another half, in one list, each of which says its own size.
        half = self.config.group_size // 2
        halves = [await self.by_tokens(f"{item}{part}", half) for part in "ab"]
        for part in halves:
            part["group_overrides"] = {"group_size": half}
        return halves, []

    async def by_tokens(self, item: str, size: int) -> Any:
        """A group of ``size`` answers by the server's own tokens and logprobs."""
        limit = self.config.completion_tokens
        prompt, answers, logprobs, _ = await self.server.tokens_and_logprobs_completion(
            prompt=item, n=size, max_tokens=limit, temperature=1.0
        )
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for tokens, values in zip(answers, logprobs, strict=True):
            group["tokens"].append(prompt + tokens)
            group["masks"].append([-100] * len(prompt) + tokens)
            group["inference_logprobs"].append([1.0] * len(prompt) + values)
            group["scores"].append(float(sum(tokens) % 7))
        return group

    async def by_managed_server(self, item: str) -> Any:
        """A group by chat, whose tokens ManagedServer kept."""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=[{"role": "user", "content": item}],
                n=self.config.group_size,
                max_tokens=self.config.completion_tokens,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for node in nodes:
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(float(sum(node.tokens) % 7))
        return group

    def _post_json_with_compression(self, session: Any, url: str, payload: Any, **options: Any) -> Any:
        post = super()._post_json_with_compression(session, url, payload, **options)
        return Recorded(post, self.config.record, payload if isinstance(payload, list) else [payload])


if __name__ == "__main__":
    PeerEnv.cli()
