"""Tools for the environments of agents (--env), each in a file of its own.

    from megarl.tools import McpTools, Search, calculate, read_calls, run_python

They take text that a model wrote, and return text for the model: the result, or a line that begins with
`error:`. Importing them imports no torch, and no package of an optional extra."""

from megarl.tools.calls import read_calls
from megarl.tools.mcp import McpTools
from megarl.tools.programs import calculate, run_python
from megarl.tools.search import Search

__all__ = ["McpTools", "Search", "calculate", "read_calls", "run_python"]
