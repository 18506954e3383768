"""An MCP server with one tool, over its standard streams or over HTTP."""

from __future__ import annotations

import sys

from mcp.server import MCPServer

server = MCPServer("words")


@server.tool()
def double(number: int) -> str:
    """Double a number."""
    return str(2 * number)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
