"""A taskset of verifiers 0.4, whose agent is asked twice."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["TwiceHarness", "WordTaskset"]


class WordData(vf.TaskData):
    answer: str


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class TwiceHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # type: ignore[no-untyped-def]
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        messages = [{"role": "user", "content": data.prompt}]
        for again in (True, False):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            if again:
                messages.append({"role": "user", "content": "Sure?"})
        await client.close()
        return ProgramResult(exit_code=0, stdout="", stderr="")


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self) -> Iterator[WordTask]:
        for word in ("ab", "cd", "no", "we", "at", "go", "if", "by", "us", "me"):
            data = WordData(prompt=f"Write {word} backwards.", answer=word[::-1])
            yield WordTask(data, self.config.task)
