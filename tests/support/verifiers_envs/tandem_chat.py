"""A harness of verifiers 0.4 that sends the conversation as it is: ``null`` without the program, which uv makes."""

from __future__ import annotations

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # type: ignore[no-untyped-def]
        said = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        messages = [*system, *(each if isinstance(each, dict) else message_to_wire(each) for each in said)]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(exit_code=0, stdout="", stderr="")
