"""Conversations with the tools of MCP servers, as the process of a package plays them."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

MOST_AT_ONCE = 512
"""Conversations whose requests are under way."""


class Conversations:
    """Conversations of a policy that may call the tools of servers; each has sessions of its own."""

    def __init__(self, servers: list[dict[str, Any]], max_turns: int) -> None:
        self.servers, self.max_turns = servers, max_turns
        self.threads = ThreadPoolExecutor(MOST_AT_ONCE)
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def tools(self) -> list[str]:
        """Names of the tools that there are."""
        async with AsyncExitStack() as stack:
            return list(await self._connect(stack))

    async def play(self, messages: list[dict[str, Any]], url: str) -> dict[str, float]:
        """Let the policy at a URL answer, with the tools, until it calls none."""
        calls = errors = 0
        async with AsyncExitStack() as stack:
            tools = await self._connect(stack)
            offered = [{"type": "function", "function": function} for function, _ in tools.values()]
            for turn in range(1, self.max_turns + 1):
                body = {"model": "policy", "messages": messages, "tools": offered}
                message = await self._ask(url, body)
                messages.append(message)
                called = message.get("tool_calls") or []
                if not called or turn == self.max_turns:
                    break
                for call in called:
                    text, failed = await self._called(tools, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
                    calls, errors = calls + 1, errors + failed
        return {"turns": float(turn), "tool_calls": float(calls), "tool_errors": float(errors)}

    async def _connect(self, stack: AsyncExitStack) -> dict[str, tuple[Any, Any]]:
        """Sessions with all servers: the function of each tool, and whose it is."""
        from mcp import Client, StdioServerParameters

        tools = {}
        for server in self.servers:
            client = Client(server["url"] if "url" in server else StdioServerParameters(**server))
            await stack.enter_async_context(client)
            for tool in (await client.list_tools()).tools:
                function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                tools[tool.name] = function, client
        return tools

    async def _called(self, tools: dict[str, tuple[Any, Any]], function: dict[str, str]) -> tuple[str, bool]:
        """What a tool says, and whether that is an error; the policy reads both."""
        from mcp import MCPError

        try:
            _, client = tools[function["name"]]
            result = await client.call_tool(function["name"], json.loads(function["arguments"]))
        except (LookupError, ValueError, MCPError) as error:  # no such tool, or not with these arguments
            return f"{type(error).__name__}: {error}", True
        return "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content), bool(result.is_error)

    async def _ask(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        def post() -> Any:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
            with self.opener.open(request) as answer:
                return json.load(answer)["choices"][0]["message"]

        message: dict[str, Any] = await asyncio.get_running_loop().run_in_executor(self.threads, post)
        return message


load = Conversations
