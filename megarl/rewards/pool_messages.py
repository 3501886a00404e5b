"""Define the messages between a reward pool and its processes.

A process receives its DataConfig once and then one Request per sample, each framed by
`Connection.send_bytes`. The process sends Replies, one line of JSON each. A reward function may also write
into the pipe, and a line of JSON can be distinguished from that."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec

from megarl.messages import packable
from megarl.rewards.base import RewardSample


class Request(msgspec.Struct, frozen=True):
    """Message to a reward process: score this sample."""

    number: int
    """Unique number of the request in the pool."""
    written: RewardSample
    """The sample with its response as JSON, because a model's text may hold lone surrogates."""

    @classmethod
    def of(cls, number: int, sample: RewardSample) -> Request:
        of_row = {"ground_truth": packable(sample.ground_truth), "extra_info": packable(sample.extra_info)}
        return cls(number, replace(sample, solution_str=json.dumps(sample.solution_str), **of_row))

    @property
    def sample(self) -> RewardSample:
        return replace(self.written, solution_str=json.loads(self.written.solution_str))


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Message of a reward process: that it is ready or why not, or the reward of a request or why there is
    none."""

    pid: int | None = None
    """Id of the writing process, which may be a child of the process that was asked."""
    ready: bool = False
    error: str | None = None
    """Reason why the reward function cannot be loaded."""
    request: int | None = None
    """Number of the request."""
    digest: int | None = None
    """Digest of the judged text, see `RewardSample.digest`."""
    reward: float | None = None
    answer: str | None = None
    """Answer that the reward function found in the text, see `Score`."""
    scores: dict[str, float] | None = None
    """Unweighted scores by name, if the reward function returned several."""
    failure: str | None = None
    """Reason why there is no reward."""
    waits: bool = False
    """Whether the call has mostly waited, so that further calls may run beside it."""

    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


def read_replies(lines: bytes) -> list[Reply]:
    """Return the replies of complete lines. Raises: ValueError if a line is not a reply."""
    try:
        return [_REPLY.decode(line) for line in lines.splitlines()]
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


_REPLY = msgspec.json.Decoder(Reply)
