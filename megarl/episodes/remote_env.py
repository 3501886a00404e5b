"""Play an environment that `megarl env-serve` serves on another host: --env http://HOST:PORT.

It runs in an environment process of the job, so deadlines and failures are those of any environment. A
request whose connection is lost is sent again, and the server does not run it twice."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import aiohttp

from megarl.episodes.failure import EpisodeFailure

KEY = "MEGARL_ENV_KEY"
"""Environment variable with the server's key."""
_RETRY_S = 30.0
"""Seconds for which a server that cannot be reached is tried again."""
ALIVE_S = 10.0
"""Seconds between two messages to a server that this process is alive."""
_LARGEST_REPLY = 16 << 20
_CLIENT = secrets.token_hex(16)
_BEATS: dict[str, asyncio.Task[None]] = {}  # URL -> task
_CAUSE_OF = {400: "malformed", 409: "malformed", 410: "died", 413: "malformed", 422: "refused"}


class RemoteEnv:
    """One episode at a server."""

    @classmethod
    def of(cls, scheme: str, address: str) -> Callable[[], RemoteEnv]:
        """Return what makes an episode. Raises: ValueError if the server does not answer, or refuses the
        key."""
        url = f"{scheme}:{address}".rstrip("/")
        request = urllib.request.Request(f"{url}/health", headers=_headers())
        try:
            urllib.request.urlopen(request, timeout=30).close()
        except urllib.error.HTTPError as error:
            if error.code == 401:
                raise ValueError(
                    f"the server refuses the key in {KEY}. Set it to the one that `megarl env-serve` has"
                ) from None
            raise ValueError(f"is no server of `megarl env-serve`: it answers {error.code}") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"no server answers: {error}. Start `megarl env-serve` there") from None
        return functools.partial(cls, url)

    def __init__(self, url: str) -> None:
        self._url, self._episode, self._num_calls = url, secrets.token_hex(16), 0

    async def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        if self._url not in _BEATS:
            _BEATS[self._url] = asyncio.create_task(_say_alive(self._url))
        reply = await self._ask(op="reset", row=row)
        self.tools, self.next_actor = reply["tools"], reply.get("actor")
        return reply["messages"]

    async def step(self, text: str) -> tuple[list[dict[str, Any]], Any, bool]:
        reply = await self._ask(op="step", text=text)
        self.next_actor = reply.get("actor")
        return reply["messages"], reply.get("rewards", reply["reward"]), reply["done"]

    async def close(self) -> None:
        await self._ask(op="end")

    async def _ask(self, **request: Any) -> dict[str, Any]:
        self._num_calls += 1
        request |= {"call": self._num_calls, "episode": self._episode, "client": _CLIENT}
        body = json.dumps(request).encode()
        give_up, pause = None, 0.05
        while True:
            try:
                return await self._post(body)
            except (aiohttp.ClientError, OSError) as error:
                now = time.monotonic()
                give_up = (
                    give_up or now + _RETRY_S
                )  # from the first failure: a call may take longer than this
                if now > give_up:
                    why = f"{self._url} cannot be reached: {type(error).__name__}: {error}"
                    raise EpisodeFailure("unreachable", why) from None
            await asyncio.sleep(pause)
            pause = min(2.0, 2 * pause)

    async def _post(self, body: bytes) -> dict[str, Any]:
        async with _session().post(f"{self._url}/call", data=body, headers=_headers()) as response:
            text = b""
            async for part in response.content.iter_chunked(1 << 16):
                text += part
                if len(text) > _LARGEST_REPLY:
                    raise EpisodeFailure("malformed", f"the reply is longer than {_LARGEST_REPLY} bytes")
        if response.status in (502, 503, 504):  # busy, or a gateway without its server: worth another try
            raise aiohttp.ClientError(f"{response.status} {text[:300]!r}")
        if response.status != 200:
            cause = _CAUSE_OF.get(response.status, "unreachable")
            raise EpisodeFailure(
                cause, f"{self._url} answers {response.status}: {text[:2000].decode(errors='replace')}"
            )
        try:
            reply = json.loads(text)
            if "failure" in reply:
                raise EpisodeFailure(str(reply["cause"]), str(reply["failure"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise EpisodeFailure("malformed", f"{self._url} sent what is no reply: {error}") from None
        return reply


async def _say_alive(url: str) -> None:
    """Keep the episodes of this process, which may wait long for the model."""
    while True:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            data = json.dumps({"op": "alive", "client": _CLIENT}).encode()
            async with _session().post(f"{url}/call", data=data, headers=_headers()):
                pass
        await asyncio.sleep(ALIVE_S)


def _headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {os.environ.get(KEY, '')}", "Content-Type": "application/json"}


@functools.cache
def _session() -> aiohttp.ClientSession:
    """Return the session of this process. Must first be called in its event loop.

    The deadline of a call is the pool's, so requests have none but for connecting."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
