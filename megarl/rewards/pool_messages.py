"""Messages between a reward pool and its processes.

To a process go, each framed by `Connection.send_bytes`, its DataConfig once and then one Request per sample. Back
come Replies, one line of JSON each: a reward function may write into the pipe too, and a line can be told from
that."""

from __future__ import annotations

from typing import Any

import msgspec

from megarl.messages import packable
from megarl.rewards.base import RewardSample


class Request(msgspec.Struct, frozen=True):
    """A sample to judge."""

    number: int
    """No other request of the pool has it."""
    data_source: str
    solution: bytes
    """UTF-8, but a model's text may hold halves of characters."""
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
    """What a process says: that it is ready or why it is not, or the reward of a request or why there is none."""

    pid: int | None = None
    """Of the process that writes, which may be a child of the one that was asked."""
    ready: bool = False
    error: str | None = None
    """Why the reward function cannot be loaded."""
    request: int | None = None
    """Number of the request."""
    digest: int | None = None
    """Of the text that was judged, see `RewardSample.digest`."""
    reward: float | None = None
    failure: str | None = None
    """Why there is no reward."""

    def line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"


def read_replies(lines: bytes) -> list[Reply]:
    """Return the replies of whole lines. Raises: ValueError if a line is not a reply."""
    try:
        return [_REPLY.decode(line) for line in lines.splitlines()]
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


_REPLY = msgspec.json.Decoder(Reply)
