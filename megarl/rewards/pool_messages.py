"""Define the messages between a reward pool and its processes.

A process receives its DataConfig once and then one Request per sample, each framed by
`Connection.send_bytes`. The process sends Replies, one line of JSON each. A reward function may also write
into the pipe, and a line of JSON can be distinguished from that."""

from __future__ import annotations

from typing import Any

import msgspec

from megarl.messages import packable
from megarl.rewards.base import RewardSample


class Request(msgspec.Struct, frozen=True):
    """A sample to judge."""

    number: int
    """Unique number of the request in the pool."""
    data_source: str
    solution: bytes
    """Text of the response in UTF-8 with surrogates, because a model's text may hold lone surrogates."""
    ground_truth: str | None
    extra_info: dict[str, Any]
    sample_id: int | None

    @classmethod
    def of(cls, number: int, sample: RewardSample) -> Request:
        return cls(
            number,
            sample.data_source,
            sample.solution_str.encode("utf-8", "surrogatepass"),
            sample.ground_truth,
            packable(sample.extra_info),
            sample.sample_id,
        )

    @property
    def sample(self) -> RewardSample:
        return RewardSample(
            self.data_source,
            self.solution.decode("utf-8", "surrogatepass"),
            self.ground_truth,
            self.extra_info,
            self.sample_id,
        )


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a process.

    The process reports that it is ready or why it is not, or the reward of a request or why there is none."""

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
    failure: str | None = None
    """Reason why there is no reward."""

    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


def read_replies(lines: bytes) -> list[Reply]:
    """Return the replies of complete lines. Raises: ValueError if a line is not a reply."""
    try:
        return [_REPLY.decode(line) for line in lines.splitlines()]
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


_REPLY = msgspec.json.Decoder(Reply)
