"""A taskset of verifiers 0.4, and an agent that says the conversation: verifiers' ``null`` without uv's process."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness", "WordTaskset"]


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # type: ignore[no-untyped-def]
        conversation = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
        messages = [message_to_wire(message) for message in (*system, *conversation)]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(exit_code=0, stdout="", stderr="")


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self) -> Iterator[WordTask]:
        for word in ("ab", "cd", "no", "we", "at", "go", "if", "by", "us", "me"):
            data = WordData(prompt=f"Write {word} backwards.", answer=word[::-1])
            yield WordTask(data, self.config.task)
