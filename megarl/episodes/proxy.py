"""Serve OpenAI's chat completions and responses, Anthropic's messages and vLLM's token ids to agents. Each episode has
a key of its own, which ends with the episode.

    proxy = Proxy(on_request)
    key = proxy.open(episode)                     # requests with this key belong to the episode
    on_request(episode, messages, asked, request) is called on the server's thread
    proxy.answer(episode, request, completions)   # the reply to the request
    proxy.close(episode)                          # the key is refused from now on

Each request repeats a conversation of its episode and adds messages. Only the new messages are handed on, with the
turn that they continue. A request that continues none begins another conversation. An equal request that an SDK
sends again gets the first request's answer."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from megarl.episodes.answers import Completion, Tool
from megarl.episodes.anthropic_requests import (
    error_body,
    messages_body,
    messages_events,
    read_messages_request,
)
from megarl.episodes.bad_request import BadRequest, refuse_unstorable
from megarl.episodes.chat import Message
from megarl.episodes.environments import Request
from megarl.episodes.chat_requests import MODEL, ChatRequest, chat_body, chat_events, read_chat_request
from megarl.episodes.generate_requests import GenerateRequest, generate_body, read_generate_request
from megarl.episodes.responses_requests import read_responses_request, responses_body, responses_events

_KEY_BYTES = 24
_LARGEST_BODY = 16 << 20
_START_S = 30.0
_MESSAGES = "/v1/messages"
_RETRY_COUNT = "x-stainless-retry-count"
_LONGEST_COUNT = 6
_LOG = logging.getLogger(__name__)

Asked = ChatRequest | GenerateRequest
OnRequest = Callable[[int, list[Message], Asked, Request], None]


@dataclass(eq=False, slots=True)
class _Asked:
    """A request that was handed on."""

    number: int
    asked: Asked
    answer: asyncio.Future[list[Completion]]
    is_delivered: bool = False
    """Whether the client was there when its answer was sent."""
    num_retries: int = 0
    """The highest count of retries with which its client has asked again."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """A turn that later requests may continue."""

    turn: int
    messages: list[Message]
    """The conversation, with the model's answer at its end."""
    tools: list[Tool]


@dataclass(eq=False, slots=True)
class _Conversations:
    """The requests of one episode, and the turns that they were answered by."""

    episode: int
    requests: list[_Asked] = field(default_factory=list)
    turns: list[_Answered] = field(default_factory=list)
    continued: set[int] = field(default_factory=set)
    """Numbers of the turns that a request has continued."""
    num_requests: int = 0
    """Number of requests that were handed on, with those that were refused then."""
    limit: BadRequest | None = None
    """Why every further request is refused."""


class Proxy:
    """An HTTP server, on a thread of its own, that agents call as the endpoint of a model.

    Args:
        on_request: called on that thread with the episode, the new messages, the whole request, and its place
            among the episode's turns.
        max_length: tokens of a conversation, as /v1/models reports them.
        takes_tools: whether the job finds tool calls in answers.
        host: interface on which it listens; the loopback interface by default.
        vocab_size: token ids of requests must be below it."""

    def __init__(
        self,
        on_request: OnRequest,
        max_length: int,
        host: str = "127.0.0.1",
        takes_tools: bool = False,
        vocab_size: int = 0,
    ) -> None:
        self._on_request, self._max_length, self._host = on_request, max_length, host
        self._vocab_size = vocab_size
        self.check: Callable[[dict[str, Any]], None] = lambda how: None
        """Raises ValueError for a way of sampling that the engine cannot, see `how_of`."""
        self._takes_tools = takes_tools
        self._conversations: dict[str, _Conversations] = {}
        self._key_of: dict[int, str] = {}
        self._loop = asyncio.new_event_loop()
        self._started, self._error, self.port = threading.Event(), None, 0
        self._thread = threading.Thread(target=self._run, name="agent proxy", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_S) or not self.port:
            raise RuntimeError(f"the endpoint of the agents cannot listen on {host}: {self._error}")

    @property
    def url(self) -> str:
        """Base URL of the endpoint, which agents give to their SDK."""
        host = f"[{self._host}]" if ":" in self._host else self._host  # IPv6
        return f"http://{host}:{self.port}/v1"

    def open(self, episode: int) -> str:
        """Start to accept the requests of an episode, and return the API key that its agent must send."""
        key = "megarl-" + secrets.token_urlsafe(_KEY_BYTES)
        self._key_of[episode] = key
        self._conversations[key] = _Conversations(episode)
        return key

    def answer(self, episode: int, request: int, completions: Sequence[tuple[int, Completion]]) -> None:
        """Reply to a waiting request of an episode with the model's answers.

        Args:
            completions: number of the turn and completion, for each answer that the request asks for."""
        self._in_loop(self._answer, self._conversations[self._key_of[episode]], request, completions)

    def refuse(self, episode: int, request: int, error: BadRequest, is_final: bool) -> None:
        """Reply to a waiting request of an episode with an error.

        Args:
            is_final: refuse all later ones too."""
        self._in_loop(self._refuse, self._conversations[self._key_of[episode]], request, error, is_final)

    def close(self, episode: int) -> None:
        """Refuse the requests of an episode from now on, and those that wait."""
        conversations = self._conversations.pop(self._key_of.pop(episode))
        ended = BadRequest("the episode has ended", "episode_ended")
        self._in_loop(self._refuse, conversations, None, ended, True)

    def stop(self) -> None:
        """Close all connections, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        application = web.Application(client_max_size=_LARGEST_BODY, middlewares=[_report])
        application.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/responses", self._responses),
                web.post(_MESSAGES, self._messages),
                web.post("/inference/v1/generate", self._generate),
                web.get("/v1/models", self._models),
            ]
        )
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.0)
        try:
            loop.run_until_complete(runner.setup())
            loop.run_until_complete(web.TCPSite(runner, self._host, 0).start())
            self.port = runner.addresses[0][1]
            self._started.set()
            loop.run_forever()
        except OSError as error:
            self._error = error
            self._started.set()
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(runner.cleanup())
            loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        self._of_key(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl"}
        model |= {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's
        pages = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        data = [{**model, "max_model_len": self._max_length}]
        return web.json_response({"object": "list", "data": data, **pages})

    async def _chat(self, request: web.Request) -> web.Response:
        conversations = self._of_key(request)
        asked = read_chat_request(await request.read(), self._takes_tools)
        completions = await self._ask(conversations, asked, request)
        if not asked.stream:
            return web.json_response(chat_body(completions))
        events = chat_events(completions, asked.include_usage)
        return web.Response(body=events, content_type="text/event-stream")

    async def _responses(self, request: web.Request) -> web.Response:
        conversations = self._of_key(request)
        asked = read_responses_request(await request.read(), self._takes_tools)
        (completion,) = await self._ask(conversations, asked, request)
        if not asked.stream:
            return web.json_response(responses_body(completion))
        return web.Response(body=responses_events(completion), content_type="text/event-stream")

    async def _messages(self, request: web.Request) -> web.Response:
        conversations = self._of_key(request)
        asked = read_messages_request(await request.read(), self._takes_tools)
        (completion,) = await self._ask(conversations, asked, request)
        if not asked.stream:
            return web.json_response(messages_body(completion))
        return web.Response(body=messages_events(completion), content_type="text/event-stream")

    async def _generate(self, request: web.Request) -> web.Response:
        conversations = self._of_key(request)
        asked = read_generate_request(await request.read(), self._vocab_size)
        return web.json_response(generate_body(await self._ask(conversations, asked, request)))

    def _of_key(self, request: web.Request) -> _Conversations:
        """Return the conversations that belong to a request's API key. Raises: BadRequest (401) for an unknown
        key."""
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (token.strip() if kind.lower() == "bearer" else "")
        found = self._conversations.get(key)
        if found is None:
            raise BadRequest("no open episode has this API key", "invalid_api_key", status=401)
        return found

    async def _ask(self, conversations: _Conversations, asked: Asked, http: web.Request) -> list[Completion]:
        """Hand a request on, and wait for its answers. Raises: BadRequest if it is refused."""
        if conversations.limit is not None:
            raise conversations.limit
        try:
            self.check(asked.how)
        except ValueError as error:
            raise BadRequest(str(error), "unsupported_parameter") from error
        num_retries = _num_retries(http)
        before = _asked_before(conversations.requests, asked, num_retries) if num_retries else None
        if before is None:
            new, request = _placed(conversations, asked)
            before = _Asked(request.number, asked, self._loop.create_future())
            conversations.requests.append(before)
            conversations.num_requests += 1
            self._on_request(conversations.episode, new, asked, request)
        before.num_retries = max(before.num_retries, num_retries)
        found = await asyncio.shield(before.answer)
        before.is_delivered = before.is_delivered or (
            http.transport is not None and not http.transport.is_closing()
        )
        return found

    @staticmethod
    def _answer(
        conversations: _Conversations, request: int, completions: Sequence[tuple[int, Completion]]
    ) -> None:
        of_number = (one for one in conversations.requests if one.number == request)
        found = next(of_number, None)
        if found is None or found.answer.done():  # the episode has ended meanwhile
            return
        for turn, completion in completions if isinstance(found.asked, ChatRequest) else ():
            messages = [*found.asked.messages, completion.message]
            conversations.turns.append(_Answered(turn, messages, found.asked.tools))
        found.answer.set_result([completion for _, completion in completions])

    @staticmethod
    def _refuse(
        conversations: _Conversations, request: int | None, error: BadRequest, is_final: bool
    ) -> None:
        if is_final:
            conversations.limit = error
        for waiting in [one for one in conversations.requests if request in (None, one.number)]:
            conversations.requests.remove(waiting)
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
                waiting.answer.exception()  # nobody may wait any more: the client may have gone


def _asked_before(requests: Sequence[_Asked], asked: Asked, num_retries: int) -> _Asked | None:
    """Return the request that an SDK sends once more; None if there is no equal one.

    Several equal requests may be open. Their clients' retries are given to one each, if possible."""
    equal = [one for one in requests if asked.repeats(one.asked)]
    lost = [one for one in equal if not one.is_delivered and one.num_retries < num_retries]
    return lost[0] if lost else equal[-1] if equal else None


def _num_retries(request: web.Request) -> int:
    """Return how often an SDK has sent this request before."""
    count = request.headers.get(_RETRY_COUNT, "0")
    if not (count.isascii() and count.isdigit() and len(count) <= _LONGEST_COUNT):
        raise BadRequest(f"the header {_RETRY_COUNT} is not a number: {count[:80]!r}", param=_RETRY_COUNT)
    return int(count)


def _placed(conversations: _Conversations, asked: Asked) -> tuple[list[Message], Request]:
    """Return the new messages of a request, and its place among the episode's turns. Raises: BadRequest for new
    messages that cannot be stored."""
    number = conversations.num_requests
    if isinstance(asked, GenerateRequest):
        return [], Request(number, count=asked.count, token_ids=asked.token_ids)
    parent = _continued(conversations, asked)
    new = asked.messages if parent is None else asked.messages[len(parent.messages) :]
    refuse_unstorable(new, "messages")
    if parent is None:
        return new, Request(number, count=asked.count)
    conversations.continued.add(parent.turn)
    return new, Request(number, parent.turn, asked.count)


def _continued(conversations: _Conversations, asked: ChatRequest) -> _Answered | None:
    """Return the turn with the longest conversation that a request repeats and adds messages to; None if the
    request begins another conversation. A prompt shows the tools, so other tools are another conversation.

    Of turns with equal conversations the latest is meant, or one that no request has continued yet."""
    fitting = [
        turn
        for turn in conversations.turns
        if len(turn.messages) < len(asked.messages)
        and turn.tools == asked.tools
        and all(map(_is_same, turn.messages, asked.messages))
    ]
    is_new = conversations.continued.isdisjoint
    return max(fitting, key=lambda turn: (len(turn.messages), is_new({turn.turn}), turn.turn), default=None)


def _is_same(one: Message, other: Message) -> bool:
    """Return whether two messages agree, apart from blanks around an answer and the ids of its tool calls,
    which clients may change."""
    if one["role"] == other["role"] == "assistant":
        calls = [[call["function"] for call in of.get("tool_calls", ())] for of in (one, other)]
        return one["content"].strip() == other["content"].strip() and calls[0] == calls[1]
    return one == other


@web.middleware
async def _report(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn every refusal into the error form of the request's dialect."""
    try:
        return await handler(request)
    except BadRequest as error:
        refused = error
    except web.HTTPRequestEntityTooLarge:
        why = f"the body is longer than {_LARGEST_BODY} bytes"
        refused = BadRequest(why, "request_too_large", status=413)
    except web.HTTPException as error:
        refused = BadRequest(f"{request.method} {request.path[:200]}: {error.reason}", "not_found")
        refused.status = error.status
    except ConnectionError:  # the agent is gone in the middle of its request: nobody reads an answer
        return web.Response(status=400)
    except asyncio.CancelledError:
        raise
    except Exception:
        _LOG.exception("a request of an agent failed")
        refused = BadRequest("internal error", "server_error", status=500)
    is_anthropic = request.path.startswith(_MESSAGES)
    return web.Response(
        body=json.dumps(error_body(refused) if is_anthropic else refused.body).encode(),
        status=refused.status,
        content_type="application/json",
        headers={"x-should-retry": "false"},
    )
