"""Two agents of pydantic-ai, of which the second reads what the first found; both are the policy."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def solve(task: Any, url: str) -> str:
    """A researcher's answer, then an editor's."""
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=None) as client:
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        researcher = Agent(model, instructions="Find out.", model_settings={"max_tokens": 24})
        editor = Agent(model, instructions="Shorten it to one word.", model_settings={"max_tokens": 24})
        found = await researcher.run(task.prompt[-1].content)
        return (await editor.run(found.output or "Nothing was found.")).output
