"""Environments that another host serves: calls, failures, lost connections, and clients that are gone.

pytest tests/episodes/test_remote_env.py"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from megarl import env_serve
from megarl.config.environments import EnvSpec
from megarl.config.errors import ConfigError
from megarl.config.schema import EpisodeConfig
from megarl.episodes import remote_env
from megarl.episodes.env_pool import EnvironmentPool
from megarl.episodes.env_server import LARGEST_BODY
from megarl.episodes.probe import probe_environments
from megarl.episodes.remote_env import RemoteEnv
from tests.episodes.test_env_pool import ENVS, steps, wait_for

KEY = "a key of the test, 28 letters"


@contextlib.contextmanager
def served(*flags: str, env: str = "Env") -> Iterator[tuple[str, subprocess.Popen]]:
    """The address of `megarl env-serve`, and its process."""
    command = [sys.executable, "-m", "megarl.cli", "env-serve", f"{ENVS}:{env}", "--port", "0", *flags]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"MEGARL_ENV_KEY": KEY}
    )
    try:
        line = server.stdout.readline()
        yield re.fullmatch(r"serving on (http://127.0.0.1:\d+)\n", line)[1], server
    finally:
        server.terminate()
        assert server.wait(30) == 143


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, subprocess.Popen]]:
    with served("--env-episodes-per-process", "2", "--max-episodes", "8", "--env-timeout-s", "2") as found:
        yield found


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("MEGARL_ENV_KEY", KEY)


def post(url: str, body: bytes, key: str = KEY) -> tuple[int, str]:
    request = urllib.request.Request(f"{url}/call", body, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def num_open(url: str) -> int:
    request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=5) as reply:
        return json.load(reply)["episodes"]


def children(pid: int) -> list[int]:
    found = [
        Path(f"/proc/{pid}/task/{task}/children").read_text() for task in os.listdir(f"/proc/{pid}/task")
    ]
    return [int(child) for child in " ".join(found).split()]


def test_episodes_are_played_and_fail_as_local_ones(server):
    """Each failure is that of its episode, with the cause that it has at the server."""
    url, process = server
    with EnvironmentPool([EnvSpec(None, url)], 30.0, 16) as pool:
        whats = ("plain", "raise", "bad return", "hang", "secret")
        episodes = [pool.open({"what": what}) for what in whats]
        first = wait_for(pool, len(whats))
        assert [first[one].messages[0]["content"] for one in episodes] == [f"start {what}" for what in whats]
        replies = steps(pool, episodes, "é 🙂")
        assert {(r.messages[0]["content"], r.reward, r.done) for r in replies.values()} == {
            ("1 é 🙂", 0.25, False)
        }
        replies = steps(pool, episodes)
        assert [replies[one].cause for one in episodes] == [
            None,
            "raised",
            "malformed",
            "timeout",
            "raised",
        ]
        assert "planted" in replies[episodes[1]].failure and "secret None" in replies[episodes[4]].failure
        assert steps(pool, episodes[:1])[episodes[0]].done
        for one in episodes:
            pool.end(one)
        dead, alive = pool.open({"what": "die"}), pool.open({"what": "plain"})
        wait_for(pool, 2)
        steps(pool, [dead])
        pool.step(dead, "x")
        assert wait_for(pool, 1)[dead].cause == "died" and process.poll() is None
        for one in (dead, alive):
            pool.end(one)
        deadline = time.monotonic() + 20
        while num_open(url):  # the end of an episode is told
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_bad_requests_are_refused_with_a_reason(server):
    url, _ = server
    call = {"op": "reset", "client": "c", "episode": "e1", "call": 1, "row": {"what": "plain"}}
    for wrong in ("another key", "\xff"):  # the second one is no UTF-8 on the wire
        assert post(url, json.dumps(call).encode(), wrong)[0] == 401
    bad = [
        b"", b"{", b"[" * 100_000, b'{"op": "quit", "client": "c"}', b'{"op": "step", "client": 1}', b"\x80\x04}",
        json.dumps(call | {"more": 1}).encode(), json.dumps(call | {"row": "text"}).encode(),
    ]  # fmt: skip
    assert {post(url, body)[0] for body in bad} == {400}
    assert post(url, json.dumps(call | {"op": "step", "text": "x"}).encode())[0] == 410
    assert post(url, json.dumps(call | {"row": None}).encode())[0] == 409
    assert post(url, b" " * (LARGEST_BODY + 1))[0] == 413
    many = [json.dumps(call | {"episode": f"m{i}"}).encode() for i in range(8)]
    try:
        assert {post(url, body)[0] for body in many} == {200}
        status, why = post(url, json.dumps(call | {"episode": "m9"}).encode())
        assert (status, why) == (503, "there are --max-episodes (8) open episodes")
        # The same call again has the same reply, and an earlier one is refused.
        step = json.dumps(
            call | {"op": "step", "episode": "m0", "call": 2, "row": None, "text": "x"}
        ).encode()
        assert post(url, step) == post(url, step)
        assert json.loads(post(url, step)[1])["messages"][0]["content"] == "1 x"
        assert (
            post(url, json.dumps(call | {"op": "step", "episode": "m0", "call": 1, "text": "x"}).encode())[0]
            == 409
        )
    finally:
        for i in range(8):
            assert post(url, json.dumps({"op": "end", "client": "c", "episode": f"m{i}"}).encode())[0] == 200


class Cutting:
    """A TCP proxy that cuts every other connection after the request has been handed on."""

    def __init__(self, port: int) -> None:
        self._target, self.num = port, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._serve, sock=self._socket)
        await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num += 1
        is_cut = self.num % 2 == 1
        other, onward = await asyncio.open_connection("127.0.0.1", self._target)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                onward.write(data)
                await onward.drain()
                reply = await other.read(1 << 16)
                if is_cut or not reply:
                    break
                writer.write(reply)
                await writer.drain()
        writer.transport.abort()
        onward.close()


def test_a_lost_connection_loses_no_reply_and_repeats_no_step(server):
    """Every first connection is cut after its request was run; each answer is counted once all the same."""
    url, _ = server
    proxy = Cutting(int(url.rpartition(":")[2]))
    with EnvironmentPool([EnvSpec(None, f"http://127.0.0.1:{proxy.port}")], 30.0, 16) as pool:
        with pytest.raises(ValueError, match="no server answers"):
            pool.load()  # its first look at the server is cut too, and a server must answer once before training
    with EnvironmentPool([EnvSpec(None, f"http://127.0.0.1:{proxy.port}")], 30.0, 16) as pool:
        episode = pool.open({"what": "plain"})
        assert wait_for(pool, 1)[episode].failure is None
        for count in (1, 2):
            assert steps(pool, [episode])[episode].messages[0]["content"] == f"{count} x"
        assert steps(pool, [episode])[episode].done and proxy.num > 3
        pool.end(episode)


def test_a_call_that_takes_longer_than_tries_go_on_is_sent_again(monkeypatch):
    """The connection is lost at its end. Tries are counted from there."""
    monkeypatch.setattr(remote_env, "_RETRY_S", 0.5)
    posts = []

    async def answer(request: web.Request) -> web.Response:
        posts.append(await request.json())
        if len(posts) == 1:
            await asyncio.sleep(1.0)
            request.transport.abort()
        return web.json_response({"messages": [], "reward": 1.0, "done": True})

    async def call() -> object:
        application = web.Application()
        application.router.add_post("/call", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await RemoteEnv(f"http://127.0.0.1:{runner.addresses[0][1]}").step("x")
        finally:
            await remote_env._session().close()
            remote_env._session.cache_clear()
            await runner.cleanup()

    assert asyncio.run(call()) == ([], 1.0, True)
    assert [post["call"] for post in posts] == [1, 1]


def test_whose_turn_and_whose_reward_it_is_come_from_a_server_too():
    with served(env="Pair") as (url, _), EnvironmentPool([EnvSpec(None, url)], 20.0, 4) as pool:
        episode = pool.open({"what": "second first"})
        first = wait_for(pool, 1)[episode]
        assert (first.actor, first.rewards, first.failure) == ("actor_2", None, None)
        second, third = steps(pool, [episode])[episode], steps(pool, [episode])[episode]
        assert (second.actor, second.reward, second.rewards) == ("actor", None, {"actor_2": 1.0})
        assert (third.actor, third.reward, third.rewards) == ("actor_2", None, {"actor": 2.0})


def test_a_server_that_is_not_there_ends_the_job_before_training(server, monkeypatch):
    url, _ = server
    row = {"--train-data": [{"what": "plain"}]}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match=f"--env .http://127.0.0.1:{port}.: no server answers: .*env-serve"):
        probe_environments(EpisodeConfig(env=(f"http://127.0.0.1:{port}",)), row)
    monkeypatch.setenv("MEGARL_ENV_KEY", "wrong")
    with pytest.raises(ValueError, match="refuses the key in MEGARL_ENV_KEY"):
        probe_environments(EpisodeConfig(env=(url,)), row)
    monkeypatch.setenv("MEGARL_ENV_KEY", KEY)
    probe_environments(EpisodeConfig(env=(url,)), row)


@pytest.mark.parametrize(
    "flags, told",
    [
        (
            ["--port", "70000"],
            "--port (70000): must be a whole number of at least 0 and at most 65535. Try 8100.",
        ),
        (
            ["--host", "no.such.host.invalid"],
            "--host (no.such.host.invalid): must be a name or an address of this",
        ),
        (["--host", "a..b"], "--host (a..b): must be a name or an address of this"),
        (["--host", "203.0.113.7"], "--host (203.0.113.7): must be a name or an address of this"),  # RFC 5737
        (["--port", "{taken}"], "--port ({taken}): cannot listen on 127.0.0.1: "),
    ],
    ids=["port", "unknown host", "malformed host", "another machine's address", "taken port"],
)
def test_where_the_server_cannot_listen_is_told(flags, told, monkeypatch):
    monkeypatch.setattr(EnvironmentPool, "load", lambda pool: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        argv = [flag.format(taken=taken) for flag in flags]
        with pytest.raises(ConfigError) as refused:
            env_serve.main([f"{ENVS}:Env", *argv])
    assert told.format(taken=taken) in str(refused.value)


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_server_that_ends_takes_its_episodes_and_a_client_that_dies_leaves_none():
    with served("--idle-timeout-s", "30") as (url, server):
        with EnvironmentPool([EnvSpec(None, url)], 60.0, 16) as pool:
            episodes = [pool.open({"what": "plain"}) for _ in range(3)]
            wait_for(pool, 3)
        # The pool has killed its process: nobody says that it is alive.
        assert num_open(url) == 3
        deadline = time.monotonic() + 60
        while num_open(url):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        pids = children(server.pid)
        assert pids
        with EnvironmentPool([EnvSpec(None, url)], 60.0, 16) as pool:
            episodes = [pool.open({"what": "plain"}) for _ in range(2)]
            wait_for(pool, 2)
            time.sleep(35)  # longer than --idle-timeout-s: the client says that it is alive
            assert steps(pool, episodes[:1])[episodes[0]].failure is None
            pids += children(server.pid)
            server.send_signal(signal.SIGTERM)
            server.wait(20)
            pool.step(episodes[0], "x")
            assert wait_for(pool, 1)[episodes[0]].cause == "unreachable"
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
