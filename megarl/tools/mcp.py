"""Call the tools of an MCP server, with the official SDK: `pip install "megarl[tools]"`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import Mapping
from typing import Any

_NEED = 'McpTools needs the package mcp, version 2: pip install "megarl[tools]", or mcp in the Python of --env-python'
_MODELS_FAULT = (-32600, -32601, -32602)  # JSON-RPC: invalid request, no such method, invalid params
_START_S = 60.0
_CLOSE_S = 5.0


class McpTools:
    """The tools of one MCP server, for an environment whose methods are `async`.

        mcp = await McpTools.start("python server.py")          # stdio: a process of its own
        mcp = await McpTools.start("http://127.0.0.1:8000/mcp") # streamable HTTP
        mcp.tools                                               # in OpenAI's form, for the chat template
        await mcp.call("add", {"a": 1, "b": 2})                 # "3", or "error: ..."
        await mcp.close()

    A wrong call is the model's mistake, so it is told. A server that cannot be reached raises, so that the
    episode fails and is masked."""

    def __init__(self) -> None:
        self.tools: list[dict[str, Any]] = []
        """The server's tools in OpenAI's form."""
        self._client: Any = None
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timeout_s = 0.0

    @classmethod
    async def start(
        cls, server: str, *, timeout_s: float = 30.0, env: Mapping[str, str] | None = None
    ) -> McpTools:
        """Connect to a server.

        Args:
            server: a command line, or the http:// or https:// address of a server.
            timeout_s: deadline of each call.
            env: further environment variables of the command. It has few of this process's.
        Raises: ImportError without the SDK; what the SDK raises if the server cannot be reached."""
        try:
            from mcp import Client, StdioServerParameters
        except ImportError as error:
            raise ImportError(_NEED) from error
        where: Any = server
        if not server.startswith(("http://", "https://")):
            command, *arguments = shlex.split(server)
            where = StdioServerParameters(command=command, args=arguments, env=dict(env or {}))
        tools = cls()
        tools._timeout_s = timeout_s
        is_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The SDK's contexts must be left in the task that has entered them, and each call of an environment has its own.
        tools._task = asyncio.create_task(tools._hold(Client(where), is_up))
        try:
            await asyncio.wait_for(asyncio.shield(is_up), _START_S)
        except BaseException:
            tools._task.cancel()  # or the server would live until this process ends
            raise
        return tools

    async def _hold(self, client: Any, is_up: asyncio.Future[None]) -> None:
        """Keep the connection open until `close`."""
        try:
            async with client:
                self._client, cursor = client, None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    self.tools += [_openai_form(tool) for tool in page.tools]
                    cursor = page.next_cursor
                    if cursor is None:
                        break
                is_up.set_result(None)
                await self._ended.wait()
        except BaseException as error:
            if is_up.done():
                raise
            is_up.set_exception(error if isinstance(error, Exception) else RuntimeError("was cancelled"))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return what a tool replied as text for the model, or `error: ...`."""
        from mcp import MCPError

        if name not in (known := [tool["function"]["name"] for tool in self.tools]):
            return f"error: there is no tool {name!r}; there are {', '.join(known)}"
        try:
            result = await asyncio.wait_for(self._client.call_tool(name, dict(arguments)), self._timeout_s)
        except TimeoutError:
            return f"error: {name} took longer than {self._timeout_s:g} s"
        except MCPError as error:
            if error.code not in _MODELS_FAULT:
                raise
            return f"error: {error}"
        text = _text_of(result)
        return f"error: {text.removeprefix('error: ')}" if result.is_error else text

    async def close(self) -> None:
        """End the connection, and a server that `start` has started."""
        self._ended.set()
        if self._task is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._task, _CLOSE_S)


def _openai_form(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text_of(result: Any) -> str:
    """Return the texts of a result. What is no text is named."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
