"""Tools of MCP servers in an environment, over stdio and HTTP, with the official SDK on both ends.

pytest tests/episodes/test_mcp_tools.py"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config.environments import EnvSpec
from megarl.episodes.env_pool import EnvironmentPool, Reply
from megarl.tools import mcp, read_calls
from tests.episodes.test_env_pool import wait_for
from tests.launch import command_line

if importlib.util.find_spec("mcp") is None:  # importing it takes 2 s
    pytest.skip("the extra `tools` is not installed", allow_module_level=True)
HERE = Path(__file__).parent
STDIO = command_line(HERE / "mcp_server.py")


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def http() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, HERE / "mcp_server.py", str(port)])
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline and server.poll() is None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait()


def play(server: str, answers: list[str], **row: object) -> tuple[list[Reply], list[int]]:
    """The replies to the answers, and the processes that the environment's had when they came."""
    with EnvironmentPool([EnvSpec(None, f"{HERE / 'mcp_env.py'}:Env")], 90.0, 4) as pool:
        episode = pool.open({"server": server, **row})
        replies = [wait_for(pool, 1)[episode]]
        parent = pool._of_episode[episode]._process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for answer in answers:
            pool.step(episode, answer)
            replies.append(wait_for(pool, 1)[episode])
        pool.end(episode)
        deadline = time.monotonic() + 20
        while any(os.path.exists(f"/proc/{child}") for child in children):  # `close` ends the server
            assert time.monotonic() < deadline
            time.sleep(0.05)
    return replies, [int(child) for child in children]


def told(reply: Reply) -> list[str]:
    assert reply.failure is None, reply.failure
    return [message["content"] for message in reply.messages]


def test_tools_over_stdio():
    """The model's mistakes are told; the server's process ends with the episode."""
    answers = [
        f"{call('add', a=1, b=2)} and {call('add', a=-5, b=5)}", call("add", a="one", b=2), call("subtract", a=1),
        call("fail"), call("wait", seconds=60), "<tool_call>{nonsense</tool_call>", call("add", a=2, b=2), "4",
    ]  # fmt: skip
    (first, *replies), children = play(STDIO, answers, timeout_s=3)
    assert first.failure is None, first.failure
    assert len(children) == 1 and [tool["function"]["name"] for tool in first.tools] == [
        "add",
        "wait",
        "fail",
        "die",
    ]
    assert first.tools[0]["function"]["parameters"]["properties"]["a"]["type"] == "integer"
    assert first.tools[0]["function"]["description"] == "Add two numbers."
    both, wrong, unknown, failed, slow, unread, again, last = replies
    assert told(both) == ["3", "0"]
    assert told(wrong)[0].startswith("error: ") and "integer" in told(wrong)[0]
    assert told(unknown) == ["error: there is no tool 'subtract'; there are add, wait, fail, die"]
    assert told(failed)[0].startswith("error: ") and told(slow) == ["error: wait took longer than 3 s"]
    assert told(unread)[0].startswith("error: a call must be") and told(again) == ["4"] and last.done


@pytest.mark.nightly
def test_tools_over_http(http):
    (first, added, done), children = play(http, [call("add", a=20, b=22), "42"])
    assert first.failure is None, first.failure
    assert told(added) == ["42"] and done.done and children == [] and len(first.tools) == 4


@pytest.mark.nightly
@pytest.mark.parametrize("server", ["no-such-program", "http://127.0.0.1:9/mcp"])
def test_a_server_that_is_not_there_is_a_failure(server):
    (first,), _ = play(server, [])
    assert first.cause == "raised" and first.messages == []


def test_a_server_that_says_nothing_ends_with_the_deadline(monkeypatch, tmp_path):
    monkeypatch.setattr(mcp, "_START_S", 1.0)
    pid_file = tmp_path / "pid"
    program = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    async def start() -> None:
        with pytest.raises(TimeoutError):
            await mcp.McpTools.start(shlex.join([sys.executable, "-c", program]))
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{pid_file.read_text()}"):
            assert time.monotonic() < deadline, "the server is still there"
            await asyncio.sleep(0.05)

    asyncio.run(start())


@pytest.mark.nightly
def test_a_server_that_dies_is_a_failure_and_no_answer():
    (_, died), _ = play(STDIO, [call("die")], timeout_s=15)
    assert died.failure is not None and died.cause == "raised"


def test_calls_that_cannot_be_read_are_told():
    assert read_calls("no call") == []
    assert read_calls(f'x{call("a", b=1)}y<tool_call>{{"name": "c"}}') == [
        {"name": "a", "arguments": {"b": 1}},
        {"name": "c", "arguments": {}},
    ]
    bad = (
        "{",
        "[1]",
        "3",
        '{"arguments": {}}',
        '{"name": 1}',
        '{"name": "a", "arguments": [1]}',
        "[" * 100_000,
        r'{"name": "a", "arguments": {"b": "\ud83d"}}',
        r'{"name": "\ud83d"}',
        '{"name": "a", "arguments": {"b": NaN}}',
        '{"name": "a", "arguments": ' + '{"b":' * 100 + "1" + "}" * 101,
    )
    for text in bad:
        (only,) = read_calls(f"<tool_call>{text}</tool_call>")
        assert only["error"].startswith("error: ")
        only["error"].encode()
    large = f'<tool_call>{{"name": "a", "arguments": {{"b": {2**70}}}}}</tool_call>'
    assert read_calls(large) == [{"name": "a", "arguments": {"b": 2**70}}]
