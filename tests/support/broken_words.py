"""The MCP server of recipes/words_server.py, whose tool dies, hangs or floods."""

from __future__ import annotations

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("words")


@server.tool()
def double(number: int) -> str:
    if sys.argv[1] == "dies":
        os._exit(3)
    if sys.argv[1] == "hangs":
        time.sleep(3600)
    return "x" * (2 << 20)


server.run("stdio")
