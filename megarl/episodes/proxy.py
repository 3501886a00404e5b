"""Serve OpenAI's chat completions and responses and Anthropic's messages to agents. Each episode has a key of its own, which ends with the episode.

    proxy = Proxy(on_request)
    key = proxy.open(episode)            # requests with this key belong to the episode
    on_request(episode, messages, asked) is called on the server's thread
    proxy.answer(episode, completion)    # the reply to the request
    proxy.close(episode)                 # the key is refused from now on

An episode is one conversation: each request repeats it and adds messages. Only the new messages are handed
on. An equal request that an SDK sends again gets the first request's answer."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import web

from megarl.episodes.answers import Completion
from megarl.episodes.anthropic_requests import (
    error_body,
    messages_body,
    messages_events,
    read_messages_request,
)
from megarl.episodes.bad_request import BadRequest
from megarl.episodes.chat import Message
from megarl.episodes.chat_requests import MODEL, ChatRequest, chat_body, chat_events, read_chat_request
from megarl.episodes.responses_requests import read_responses_request, responses_body, responses_events

_KEY_BYTES = 24
_LARGEST_BODY = 16 << 20
_START_S = 30.0
_MESSAGES = "/v1/messages"
_RETRY_COUNT = "x-stainless-retry-count"
_LOG = logging.getLogger(__name__)

OnRequest = Callable[[int, list[Message], ChatRequest], None]


@dataclass(eq=False, slots=True)
class _Conversation:
    """The messages of one episode so far."""

    episode: int
    messages: list[Message] = field(default_factory=list)
    """The conversation with the model's last answer at its end. [] before the first one."""
    asked: ChatRequest | None = None
    """The last request that was handed on."""
    answered: ChatRequest | None = None
    """The last request that was answered."""
    answer: asyncio.Future[Completion] | None = None
    limit: BadRequest | None = None
    """Why every further request is refused."""


class Proxy:
    """An HTTP server, on a thread of its own, that agents call as the endpoint of a model.

    Args:
        on_request: called on that thread with the episode, its new messages, and the whole request.
        max_length: tokens of a conversation, as /v1/models reports them.
        takes_tools: whether the job finds tool calls in answers.
        host: interface on which it listens; the loopback interface by default."""

    def __init__(
        self, on_request: OnRequest, max_length: int, host: str = "127.0.0.1", takes_tools: bool = False
    ) -> None:
        self._on_request, self._max_length, self._host = on_request, max_length, host
        self._takes_tools = takes_tools
        self._conversations: dict[str, _Conversation] = {}
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
        return f"http://{self._host}:{self.port}/v1"

    def open(self, episode: int) -> str:
        """Start to accept the requests of an episode, and return the API key that its agent must send."""
        key = "megarl-" + secrets.token_urlsafe(_KEY_BYTES)
        self._key_of[episode] = key
        self._conversations[key] = _Conversation(episode)
        return key

    def answer(self, episode: int, completion: Completion) -> None:
        """Reply to the waiting request of an episode with the model's answer."""
        self._in_loop(self._answer, self._conversations[self._key_of[episode]], completion)

    def refuse(self, episode: int, error: BadRequest, is_final: bool) -> None:
        """Reply to the waiting request of an episode with an error.

        Args:
            is_final: refuse all further ones too."""
        self._in_loop(self._refuse, self._conversations[self._key_of[episode]], error, is_final)

    def close(self, episode: int) -> None:
        """Refuse the requests of an episode from now on, and the request that waits."""
        conversation = self._conversations.pop(self._key_of.pop(episode))
        self._in_loop(self._refuse, conversation, BadRequest("the episode has ended", "episode_ended"), True)

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
        self._conversation(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl"}
        model |= {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's
        pages = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        data = [{**model, "max_model_len": self._max_length}]
        return web.json_response({"object": "list", "data": data, **pages})

    async def _chat(self, request: web.Request) -> web.Response:
        conversation = self._conversation(request)
        asked = read_chat_request(await request.read(), self._takes_tools)
        completion = await self._ask(conversation, asked, _is_retry(request))
        if not asked.stream:
            return web.json_response(chat_body(completion))
        events = chat_events(completion, asked.include_usage)
        return web.Response(body=events, content_type="text/event-stream")

    async def _responses(self, request: web.Request) -> web.Response:
        conversation = self._conversation(request)
        asked = read_responses_request(await request.read(), self._takes_tools)
        completion = await self._ask(conversation, asked, _is_retry(request))
        if not asked.stream:
            return web.json_response(responses_body(completion))
        return web.Response(body=responses_events(completion), content_type="text/event-stream")

    async def _messages(self, request: web.Request) -> web.Response:
        conversation = self._conversation(request)
        asked = read_messages_request(await request.read(), self._takes_tools)
        completion = await self._ask(conversation, asked, _is_retry(request))
        if not asked.stream:
            return web.json_response(messages_body(completion))
        return web.Response(body=messages_events(completion), content_type="text/event-stream")

    def _conversation(self, request: web.Request) -> _Conversation:
        """Return the conversation that belongs to a request's API key. Raises: BadRequest (401) for an
        unknown key."""
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (token.strip() if kind.lower() == "bearer" else "")
        found = self._conversations.get(key)
        if found is None:
            raise BadRequest("no open episode has this API key", "invalid_api_key", status=401)
        return found

    async def _ask(self, conversation: _Conversation, asked: ChatRequest, is_retry: bool) -> Completion:
        """Hand a request on, and wait for its answer. Raises: BadRequest if it is refused."""
        if conversation.limit is not None:
            raise conversation.limit
        before = conversation.asked
        if before is not None and conversation.answer is not None and asked.repeats(before):
            if is_retry:
                return await asyncio.shield(conversation.answer)
            raise BadRequest(
                "these messages were answered before: an episode is one conversation, so they are not answered "
                "a second time. Use --num-samples-per-prompt for more answers.",
                "branch_not_supported",
                "messages",
            )
        if conversation.answer is not None and not conversation.answer.done():
            raise BadRequest("another request of this episode is being answered", "request_in_progress")
        if conversation.answered is not None and asked.tools != conversation.answered.tools:
            raise BadRequest(
                "tools is not what it was in this episode's last request: the prompt shows the tools, and an "
                "episode is one conversation. Send the same tools each time, with tool_choice none where "
                "no call is wanted.",
                "branch_not_supported",
                "tools",
            )
        new = _new_messages(conversation.messages, asked.messages)
        conversation.asked, conversation.answer = asked, self._loop.create_future()
        self._on_request(conversation.episode, new, asked)
        return await asyncio.shield(conversation.answer)

    @staticmethod
    def _answer(conversation: _Conversation, completion: Completion) -> None:
        if conversation.answer is None or conversation.answer.done():  # the episode has ended meanwhile
            return
        assert conversation.asked is not None
        conversation.messages = [*conversation.asked.messages, completion.message]
        conversation.answered = conversation.asked
        conversation.answer.set_result(completion)

    @staticmethod
    def _refuse(conversation: _Conversation, error: BadRequest, is_final: bool) -> None:
        if is_final:
            conversation.limit = error
        waiting, conversation.asked, conversation.answer = conversation.answer, None, None
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)
            waiting.exception()  # nobody may wait any more: the client may have gone


def _is_retry(request: web.Request) -> bool:
    """Return whether an SDK says that it has sent this request before."""
    count = request.headers.get(_RETRY_COUNT, "0")
    if not (count.isascii() and count.isdigit()):
        raise BadRequest(f"the header {_RETRY_COUNT} is not a number: {count[:80]!r}", param=_RETRY_COUNT)
    return count.strip("0") != ""


def _new_messages(before: Sequence[Message], asked: Sequence[Message]) -> list[Message]:
    """Return the messages that a request adds. Raises: BadRequest unless it begins with the conversation."""
    for index, message in enumerate(before):
        if index >= len(asked) or not _is_same(message, asked[index]):
            raise BadRequest(
                f"messages[{index}] is not what it was in this episode's last request and answer: an episode is "
                "one conversation, so messages can be added but not changed, and no other conversation begun",
                "branch_not_supported",
                f"messages[{index}]",
            )
    if len(asked) == len(before):
        raise BadRequest("the request adds no message", param="messages")
    return [*asked[len(before) :]]


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
    except (ConnectionError, asyncio.CancelledError):
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
