"""The agent of recipes/agent.yaml: it thinks aloud first and then answers, and knows nothing but the OpenAI API."""

from __future__ import annotations

import aiohttp

from tandem.types import Task


async def solve(task: Task, url: str) -> None:
    """Two questions to the policy; whatever it said to both is trained on."""
    messages = [{"role": message.role, "content": message.content} for message in task.prompt]
    async with aiohttp.ClientSession() as api:
        for more in ("", "Now the name of the city and nothing else."):
            if more:
                messages.append({"role": "user", "content": more})
            body = {"model": "policy", "messages": messages, "max_tokens": 24}
            async with api.post(f"{url}/chat/completions", json=body, raise_for_status=True) as answer:
                messages.append((await answer.json())["choices"][0]["message"])
