"""An environment for tests whose tools are those of an MCP server."""

from megarl.tools import McpTools, read_calls


class Env:
    async def reset(self, row):
        self.mcp = await McpTools.start(row["server"], timeout_s=row.get("timeout_s", 20))
        self.tools = self.mcp.tools
        return [{"role": "user", "content": "?"}]

    async def step(self, text):
        calls = read_calls(text)
        said = [call["error"] if "error" in call else await self.mcp.call(**call) for call in calls]
        return [{"role": "tool", "content": one} for one in said], None, not calls

    async def close(self):
        await self.mcp.close()
