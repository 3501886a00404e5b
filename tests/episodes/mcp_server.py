"""An MCP server for tests. python mcp_server.py, or python mcp_server.py PORT for HTTP."""

import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


@server.tool()
def fail() -> str:
    raise ValueError("planted")


@server.tool()
def die() -> str:
    import os

    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
