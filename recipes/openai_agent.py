"""An agent of OpenAI's Agents SDK with a tool; it knows nothing of Tandem but the base URL."""

from __future__ import annotations

from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def letters(word: str) -> int:
    """Count the letters of a word.

    Args:
        word: which
    """
    return len(word)


async def solve(task: Any, url: str) -> str:
    """Ask once; the SDK itself calls the tool as often as the policy asks for it.

    By OpenAIResponsesModel an answer that max_tokens cut is an error to the SDK, which costs the rollout.
    """
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=None) as client:
        model = OpenAIChatCompletionsModel("policy", client)
        settings = ModelSettings(max_tokens=24)
        agent = Agent(
            name="Geographer", instructions="Be brief.", model=model, model_settings=settings, tools=[letters]
        )
        return str((await Runner.run(agent, task.prompt[-1].content, max_turns=3)).final_output)
