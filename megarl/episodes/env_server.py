"""Serve environments over HTTP to jobs on other hosts: `megarl env-serve`.

A request is a line of env_messages.py as the body of POST /call, and the response is the reply to it. The
episode's name is the client's, and its calls are numbered, so a request that is sent again because its
connection was lost gets the reply of the first one."""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Literal

import msgspec
from aiohttp import web

from megarl.episodes.env_pool import EnvironmentPool
from megarl.episodes.environments import Reply

LARGEST_BODY = 16 << 20
_LOOK_S = 0.2  # interval between two looks at deadlines


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a call."""

    op: Literal["reset", "step", "end", "alive"]
    client: str
    """Name of the client's process, which says every few seconds that it is alive."""
    episode: str = ""
    call: int = 0
    row: dict[str, Any] | None = None
    text: str | None = None


_DECODER = msgspec.json.Decoder(_Request)


@dataclass(eq=False, slots=True)
class _Episode:
    """An open episode of a client."""

    number: int
    """Its number in the pool."""
    call: int
    """Number of its last call."""
    reply: asyncio.Future[Mapping[str, Any]]
    """Reply to the last call."""
    client: str


class EnvServer:
    """The endpoint of a pool. Use it on the main thread, as the pool.

    Args:
        key: every request must have it as its bearer token.
        max_episodes: open episodes at a time; a further one is refused.
        idle_timeout_s: the episodes of a client that has not been heard for so long are ended."""

    def __init__(self, pool: EnvironmentPool, key: str, max_episodes: int, idle_timeout_s: float) -> None:
        self._pool, self._key = pool, key
        self._max_episodes, self._idle_timeout_s = max_episodes, idle_timeout_s
        self._episodes: dict[str, _Episode] = {}
        self._of_number: dict[int, _Episode] = {}
        self._heard: dict[str, float] = {}  # client -> time.monotonic() of its last request
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    async def run(self, host: str, port: int, is_up: Any = lambda port: None) -> None:
        """Serve until the task is cancelled.

        Args:
            is_up: called with the port when the endpoint listens.
        Raises: OSError if it cannot listen; ValueError if a process cannot load its environment."""
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_post("/call", self._call)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            is_up(runner.addresses[0][1])
            await self._pump()
        finally:
            await runner.cleanup()

    async def _pump(self) -> None:
        """Hand the pool's replies to the requests that wait for them."""
        loop = asyncio.get_running_loop()
        while True:
            for reply in self._pool.replies(0.0):
                episode = self._of_number.get(reply.episode)
                if episode is not None and not episode.reply.done():
                    episode.reply.set_result(_body(reply))
            self._end_abandoned()
            watched = [self._woken, *self._pool.descriptors]
            await loop.run_in_executor(None, wait, watched, _LOOK_S)
            with suppress(BlockingIOError):
                os.read(self._woken, 4096)

    def _end_abandoned(self) -> None:
        """End the episodes of clients that have not been heard for long."""
        last = time.monotonic() - self._idle_timeout_s
        gone = {client for client, heard in self._heard.items() if heard < last}
        for name in [name for name, episode in self._episodes.items() if episode.client in gone]:
            self._end(name)
        for client in gone:
            del self._heard[client]

    def _begin(self, asked: _Request, row: Mapping[str, Any]) -> _Episode:
        number = self._pool.open(row)
        episode = _Episode(number, asked.call, asyncio.get_running_loop().create_future(), asked.client)
        self._episodes[asked.episode] = self._of_number[number] = episode
        return episode

    def _end(self, name: str) -> None:
        episode = self._episodes.pop(name, None)
        if episode is not None:
            del self._of_number[episode.number]
            self._pool.end(episode.number)
            if not episode.reply.done():
                episode.reply.set_result({"failure": "the episode has been ended", "cause": "died"})

    async def _health(self, request: web.Request) -> web.Response:
        self._check_key(request)
        return web.json_response({"episodes": len(self._episodes)})

    async def _call(self, request: web.Request) -> web.Response:
        self._check_key(request)
        try:
            asked = _DECODER.decode(await request.read())
        except (msgspec.MsgspecError, RecursionError) as error:
            raise web.HTTPBadRequest(text=f"the body is no call: {error}") from None
        self._heard[asked.client] = time.monotonic()
        if asked.op == "end":
            self._end(asked.episode)
        if asked.op in ("end", "alive"):
            return web.json_response({})
        episode = self._asked(asked)
        with suppress(BlockingIOError):  # the pump is awake already
            os.write(self._wake, b"\0")
        reply = await asyncio.shield(episode.reply)  # a lost connection must not lose the reply
        return web.json_response({"call": asked.call, **reply})

    def _asked(self, asked: _Request) -> _Episode:
        """Start what a request asks for, unless it has been asked before. Returns its episode."""
        episode = self._episodes.get(asked.episode)
        if episode is not None and asked.call == episode.call:
            return episode
        if asked.op == "reset":
            if episode is not None or asked.row is None:
                raise web.HTTPConflict(text="an episode is reset once, with a row")
            if len(self._episodes) >= self._max_episodes:
                raise web.HTTPServiceUnavailable(
                    text=f"there are --max-episodes ({self._max_episodes}) open episodes"
                )
            try:
                return self._begin(asked, asked.row)
            except ValueError as error:
                raise web.HTTPUnprocessableEntity(text=str(error)) from None
        if episode is None:
            raise web.HTTPGone(text="the episode is not open: the server was started anew, or has ended it")
        if asked.call < episode.call or not episode.reply.done() or asked.text is None:
            raise web.HTTPConflict(text="a step has a text, and follows the reply to the call before")
        episode.call, episode.reply = asked.call, asyncio.get_running_loop().create_future()
        self._pool.step(episode.number, asked.text)
        return episode

    def _check_key(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="surrogateescape"), self._key.encode()):
            raise web.HTTPUnauthorized(text="the key is wrong")


def _body(reply: Reply) -> Mapping[str, Any]:
    if reply.failure is not None:
        return {"failure": reply.failure, "cause": reply.cause}
    of_actors = {"actor": reply.actor, "rewards": reply.rewards}
    return {
        "messages": reply.messages,
        "tools": reply.tools,
        "reward": reply.reward,
        "done": reply.done,
        **{name: value for name, value in of_actors.items() if value is not None},
    }
