"""Run the user's agent, one process per episode, against the endpoint of `proxy.Proxy`.

    with AgentPool("python agent.py", timeout_s=600, num_processes=16, max_length=512) as pool:
        episode = pool.open(row)                 # starts a process, or queues the episode
        for reply in pool.replies(timeout_s=1):  # a request's new messages, the reward at the end, or a failure
            pool.step(reply.episode, text, sampled)
        pool.end(episode)                        # kills the process group

It has the methods of `env_pool.EnvironmentPool`, so `runner.play` does not tell them apart. The agent gets the
row as a line of JSON on stdin, and prints the reward as the last line of stdout."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megarl.episodes.answers import UNREADABLE, AnswerParser, Completion, completion_of
from megarl.episodes.bad_request import BadRequest
from megarl.episodes.chat import Message
from megarl.episodes.chat_requests import ChatRequest
from megarl.episodes.env_pool import ENV_KEY
from megarl.episodes.environments import Reply, Request, Sampled
from megarl.episodes.generate_requests import GenerateRequest
from megarl.files.printed import Printed
from megarl.episodes.proxy import Asked, Proxy
from megarl.runtime.signing import JOB_SECRET

_LOG = logging.getLogger(__name__)
_LONGEST_OUTPUT = 1 << 16  # bytes of stdout that are kept, from the end
_LARGEST_REWARD = 3.4028234663852886e38  # of float32
_WANTED = 'wanted a number or {"reward": number} as the last line of stdout'


class AgentPool:
    """Runs the agents of open episodes as processes, and the HTTP endpoint that the agents call.

    Use a pool on the main thread: the kernel ends the processes with the thread that started them.

    Args:
        command: --agent-command, split like a shell would; no shell runs it.
        timeout_s: deadline of an episode from the start of its process.
        num_processes: processes at a time; further episodes wait.
        max_length: tokens of a conversation.
        host: interface of the endpoint.
        parser: finds reasoning and tool calls in answers. Without one they are text.
        is_judged: whether a rule gives the rewards. The agents then need not print any.
        vocab_size: token ids of requests must be below it."""

    def __init__(
        self,
        command: str,
        timeout_s: float,
        num_processes: int,
        max_length: int,
        host: str = "127.0.0.1",
        parser: AnswerParser | None = None,
        is_judged: bool = False,
        vocab_size: int = 0,
    ) -> None:
        self._parser, self._is_judged = parser, is_judged
        self._command, self._timeout_s, self._num_processes = shlex.split(command), timeout_s, num_processes
        self._agents: dict[int, _Agent] = {}
        self._waiting: dict[int, Mapping[str, Any]] = {}
        self._num_answers: dict[int, int] = {}
        self._num_episodes = 0
        self._num_calls: Counter[int] = Counter()
        self._num_unreadable: Counter[int] = Counter()
        self._asked: dict[tuple[int, int], Asked] = {}  # (episode, request) that an agent waits for
        self._completions: dict[tuple[int, int], list[tuple[int, Completion]]] = {}  # those that are there
        self._requests: deque[tuple[Reply, Asked]] = deque()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        takes_tools = parser is not None and parser.takes_tools
        self.proxy = Proxy(self._on_request, max_length, host, takes_tools, vocab_size)

    def __enter__(self) -> AgentPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes, and stop the endpoint."""
        self._waiting.clear()  # else each end would start the next
        for episode in [*self._num_answers]:
            self.end(episode)
        self.proxy.stop()
        os.close(self._woken)
        os.close(self._wake)

    def open(self, row: Mapping[str, Any]) -> int:
        """Start an episode on a row of the data set, and return its number."""
        episode = self._num_episodes
        self._num_episodes += 1
        self._num_answers[episode] = 0
        self._waiting[episode] = row
        self._start()
        return episode

    def is_open(self, episode: int) -> bool:
        """Return whether an episode has begun, and not ended."""
        return episode in self._agents

    def step(self, episode: int, text: str, sampled: Sampled) -> None:
        """Keep an answer of the model for the agent of an episode. Its request is answered when all answers that it
        asks for are there. `replies` returns the agent's next request."""
        if not self.is_open(episode):
            return
        self._num_answers[episode] += "schema" not in self._asked[episode, sampled.request].how
        where = episode, sampled.request
        found = self._completions.setdefault(where, [])
        found.append((sampled.turn, self._completion(episode, text, sampled)))
        if len(found) == self._asked[where].count:
            del self._completions[where], self._asked[where]
            self.proxy.answer(episode, sampled.request, sorted(found, key=lambda one: one[0]))

    def _completion(self, episode: int, text: str, sampled: Sampled) -> Completion:
        """Return the model's answer in the form that the agent asked for, with reasoning and tool calls
        separated from the text."""
        asked = self._asked[episode, sampled.request]
        if isinstance(asked, GenerateRequest):
            return Completion("", sampled.usage, token_ids=(*sampled.ids,), log_probs=(*sampled.log_probs,))
        if self._parser is None:
            return Completion(text, sampled.usage).until(asked.how.get("stop", ()))
        try:
            content, reasoning, calls = self._parser.parse(
                sampled.prompt, sampled.ids, asked.tools, asked.wants_calls
            )
        except Exception:  # a foreign parser on what a model wrote: the model's mistake must not end the job
            content, reasoning, calls = None, None, UNREADABLE
        calls = calls[:1] if asked.is_single_call else calls
        parsed, num_calls = (content, reasoning, calls), self._num_calls[episode]
        completion = completion_of(parsed, text, sampled.usage, num_calls)
        self._num_calls[episode] += len(calls)
        if calls and not completion.tool_calls:
            if not self._num_unreadable:
                _LOG.warning(
                    "calls of tools cannot be read: %.200r is given as text. Others are counted", text
                )
            self._num_unreadable[episode] += 1
        return completion.until(asked.how.get("stop", ()))

    def refuse(self, reply: Reply, code: str, message: str, is_final: bool = False) -> bool:
        """Refuse an agent's request. The agent may go on, unless the episode is at a limit; in both cases it may
        print a reward."""
        assert reply.request is not None
        number = reply.request.number
        del self._asked[reply.episode, number]
        self.proxy.refuse(reply.episode, number, BadRequest(message, code, "messages"), is_final)
        return True

    def extend(self, seconds: float) -> None:
        """Give all agents that run so much more time: the engine stood still."""
        for agent in self._agents.values():
            agent.deadline += seconds

    def end(self, episode: int) -> None:
        """Kill an episode's processes, and forget it."""
        self._num_answers.pop(episode, None)
        self._waiting.pop(episode, None)
        self._num_calls.pop(episode, None)
        for waiting in (self._asked, self._completions):
            for where in [where for where in waiting if where[0] == episode]:
                del waiting[where]
        agent = self._agents.pop(episode, None)
        if agent is not None:
            agent.kill()
            self.proxy.close(episode)
            self._start()

    def replies(self, timeout_s: float) -> list[Reply]:
        """Return the requests that have arrived and the agents that have ended. Waits at most `timeout_s`
        seconds."""
        ended = self._endings(0.0 if self._requests else timeout_s)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._woken, 4096):
                pass
        found = []
        while self._requests:  # after the look at the processes: an agent's last request comes before its end
            reply, asked = self._requests.popleft()
            if self.is_open(reply.episode) and reply.request is not None:
                self._asked[reply.episode, reply.request.number] = asked
                found.append(reply)
        return found + [replace(one, num_unreadable=self._num_unreadable[one.episode]) for one in ended]

    def _endings(self, timeout_s: float) -> list[Reply]:
        """Return the last replies of agents that have ended or are late. Waits at most so long, or until there is
        a request."""
        now = time.monotonic()
        first = min((agent.deadline for agent in self._agents.values()), default=now + timeout_s)
        readable = self._wait(
            [descriptor for agent in self._agents.values() for descriptor in agent.descriptors],
            max(0.0, min(timeout_s, first - now)),
        )
        ended = [self._ending(episode, agent, readable) for episode, agent in self._agents.items()]
        return [reply for reply in ended if reply is not None]

    def _wait(self, descriptors: Iterable[int], timeout_s: float) -> set[int]:
        """Return which of the descriptors are readable. Waits at most so long, or until there is a request."""
        poll = select.poll()  # `select.select` cannot watch descriptors above 1023
        for descriptor in (self._woken, *descriptors):
            poll.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll(timeout_s * 1000)}

    def _start(self) -> None:
        """Start agents for waiting episodes while fewer than `num_processes` agents run."""
        while self._waiting and len(self._agents) < self._num_processes:
            episode = next(iter(self._waiting))
            row = self._waiting.pop(episode)
            key = self.proxy.open(episode)
            self._agents[episode] = _Agent(self._command, row, self.proxy.url, key, self._timeout_s)

    def _on_request(self, episode: int, messages: list[Message], asked: Asked, request: Request) -> None:
        """Queue a request. Runs on the endpoint's thread."""
        tools = asked.tools if isinstance(asked, ChatRequest) else []
        reply = Reply(
            episode,
            messages,
            max_tokens=asked.max_tokens,
            tools=tools,
            request=request,
            how=asked.how,
        )
        self._requests.append((reply, asked))
        with contextlib.suppress(BlockingIOError):  # the pool is awake already
            os.write(self._wake, b"\0")

    def _ending(self, episode: int, agent: _Agent, readable: set[int]) -> Reply | None:
        """Return the final reply of an agent that has ended or missed its deadline, and None for any other
        agent."""
        if agent.has_replied:
            return None
        if readable.intersection(agent.descriptors):
            agent.read()
            code = agent.exit_code()
            if code is not None:
                agent.has_replied = True
                return self._judge(episode, agent.output, code)
        if time.monotonic() < agent.deadline:
            return None
        agent.has_replied = True
        why = f"the agent took longer than --agent-timeout-s ({self._timeout_s:g})"
        return Reply(episode, failure=why, cause="timeout")

    def _judge(self, episode: int, output: bytes, code: int) -> Reply:
        if code:
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return Reply(episode, failure=f"the agent {how}", cause="died")
        if not self._num_answers[episode]:
            why = "the agent ended without an answer of the model that can be trained on"
            return Reply(episode, failure=why, cause="malformed")
        if self._is_judged:
            return Reply(episode, done=True)
        try:
            return Reply(episode, reward=read_reward(output), done=True)
        except ValueError as error:
            return Reply(episode, failure=str(error), cause="malformed")


def read_reward(output: bytes) -> float:
    """Return the reward in the last line that an agent has printed. Raises: ValueError without one."""
    lines = output.decode(errors="backslashreplace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        value = json.loads(last)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        value = value.get("reward")  # true is 1
    elif isinstance(value, bool):
        value = None
    if not isinstance(value, int | float) or not abs(value) <= _LARGEST_REWARD:
        raise ValueError(f"the agent printed {last[:300]!r} last; {_WANTED}")
    return float(value)


class _Agent:
    """The agent's process in one episode."""

    def __init__(
        self, command: list[str], row: Mapping[str, Any], url: str, key: str, timeout_s: float
    ) -> None:
        self.deadline = time.monotonic() + timeout_s
        self.output = b""
        """The end of what the agent has printed."""
        self.has_replied = False
        """Whether the last reply of the episode was given."""
        self._is_stdout_open = True
        variables = {name: value for name, value in os.environ.items() if name not in (JOB_SECRET, ENV_KEY)}
        host = urlsplit(url).hostname  # IPv6 without brackets, as httpx and requests read it
        local = ",".join(filter(None, (variables.get("NO_PROXY"), host)))
        variables |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "NO_PROXY": local, "no_proxy": local}
        # Anthropic's SDK appends the /v1 itself, and sends a token beside the key.
        variables |= {"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
        for name in ("ANTHROPIC_AUTH_TOKEN", "PYTHONSAFEPATH"):
            variables.pop(name, None)
        paths = variables.get("PYTHONPATH"), os.getcwd()
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._printed = Printed("agent")
        with tempfile.TemporaryFile() as stdin:  # a pipe may be too small for the row
            stdin.write(json.dumps(row, default=str).encode() + b"\n")
            stdin.seek(0)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(Path(__file__).with_name("agent_process.py"))),
                    *(str(os.getpid()), *command),
                ],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=self._printed.writer,
                start_new_session=True,
                env=variables,
                bufsize=0,
            )
        self._printed.follow()
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._pid_descriptor = os.pidfd_open(self._process.pid)

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that become readable when the agent prints or ends; none after its last reply.

        A stdout that the agent has closed stays readable, so nothing could wait for it."""
        if self.has_replied:
            return []
        return [self._pid_descriptor, *([self._stdout.fileno()] if self._is_stdout_open else [])]

    def read(self) -> None:
        """Read what the agent has printed."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._stdout.fileno(), _LONGEST_OUTPUT):
                self.output = (self.output + data)[-_LONGEST_OUTPUT:]
            self._is_stdout_open = False

    def exit_code(self) -> int | None:
        """Return the exit code of an agent that has ended, after everything that it printed was read."""
        code = self._process.poll()
        if code is not None:
            self.read()
        return code

    def kill(self) -> None:
        """Kill the agent and all processes that it has started."""
        self._process.terminate()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:  # it has a child that this user may not kill, or is stopped
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._printed.close()
        self._stdout.close()
        os.close(self._pid_descriptor)
