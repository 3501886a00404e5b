"""Values that a log or a checkpoint cannot hold are refused where they enter, and all others come back as they were.

pytest tests/episodes/test_json_values.py"""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.environments import EnvSpec
from megarl.episodes.env_pool import EnvironmentPool
from megarl.episodes.environments import Reply
from megarl.episodes.json_values import json_problem
from megarl.messages import decode, encode
from megarl.rollout.replay_log import Turns, text_of
from megarl.workers.open_episode import fields_of
from tests.episodes.test_env_pool import steps, wait_for

ENVS = Path(__file__).with_name("envs.py")
DEEP = json.loads("[" * 70 + "]" * 70)
ITSELF: list = []
ITSELF.append([ITSELF, ITSELF])
BAD = {
    "a large integer": ({"n": 2**64}, "x.n is an integer of 65 bits; -2^63 to 2^64 - 1 can be stored"),
    "a small integer": ([-(2**63) - 1], "x[0] is an integer of 64 bits"),
    "an integer that has no text": (10**5000, "x is an integer of 16610 bits"),
    "no number": ([{"a": math.nan}], "x[0].a is nan, which JSON cannot hold"),
    "no end": (-math.inf, "x is -inf, which JSON cannot hold"),
    "bytes": ({"a": b"\xff"}, "x.a is b'\\xff' (bytes), which JSON cannot hold"),
    "a set": ([{1, 2}], "x[0] is {1, 2} (set), which JSON cannot hold"),
    "a number as a key": ({"a": {1: "x"}}, "x.a has the key 1; keys must be text"),
    "half a character": (["é \ud800"], "x[0] has half of a surrogate pair"),
    "half a character as a key": ({"\ud800": 1}, "x has the key '\\ud800'; keys must be text"),
    "a depth": ({"a": DEEP}, "x is nested deeper than 64 levels"),
    "itself": (ITSELF, "x is nested deeper than 64 levels"),
}
LIMITS = [2**64 - 1, -(2**63), 1.7e308, 5e-324, -0.0, "é 🙂\0", True, None, (1, [2]), {"": {}}, [[]] * 3]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats() | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()) | st.integers(), inner),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_stored_is_named(what):
    value, wanted = BAD[what]
    problem = json_problem(value, "x")
    assert problem is not None and problem.startswith(wanted), problem
    problem.encode()  # for a log


def stored(value: object) -> list[object]:
    """Return the value as it comes out of a checkpoint, the replay log and the log of rollouts."""
    reply = Reply(0, [{"role": "tool", "content": value}])
    record = Turns(step=1, replies=(("train/1", fields_of(reply)),))
    again = msgspec.json.decode(text_of(record), type=Turns)
    assert decode(encode([reply]), list[Reply]) == [reply]
    return [
        decode(encode([reply]), list[Reply])[0].messages[0]["content"],
        again.replies[0][1]["messages"][0]["content"],
        json.loads(json.dumps(value)),
    ]


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_everything_else_comes_back_as_it_was(value):
    """NaN is no value here, as json_problem names it, so values can be compared."""
    if json_problem(value, "x") is None:
        assert stored(value) == [value] * 3


@pytest.fixture(scope="module")
def environments():
    with EnvironmentPool([EnvSpec(None, f"{ENVS}:Says")], 30.0, 64) as pool:
        yield pool


def test_an_environment_that_gives_such_a_value_fails_and_says_which(environments):
    """Only its episode fails, as a failure of the infrastructure; the others of its process go on."""
    sources = [
        "2**64",
        "-2**63 - 1",
        "10**5000",
        "float('nan')",
        "float('inf')",
        "b'x'",
        "{1}",
        "{1: 2}",
        "'\\ud800'",
        "deep(70)",
        "itself()",
    ]
    wanted = [
        *("65 bits", "64 bits", "16610 bits", "is nan", "is inf", "(bytes)", "(set)", "the key 1"),
        *("surrogate", "messages is nested deeper than 64", "messages is nested deeper than 64"),
    ]
    bad = [environments.open({"says": source}) for source in sources]
    good = [environments.open({"says": source}) for source in ("(1, 'é 🙂')", "2**64 - 1", "deep(60)")]
    assert not any(reply.failure for reply in wait_for(environments, 14).values())
    replies = steps(environments, [*bad, *good])
    for episode, expected in zip(bad, wanted, strict=True):
        reply = replies[episode]
        assert (reply.cause, reply.reward, reply.messages) == ("malformed", None, []), reply
        assert expected in reply.failure and f"{ENVS}:Says gave a value" in reply.failure, reply.failure
    assert [replies[one].messages[0]["content"] for one in good[:2]] == [[1, "é 🙂"], 2**64 - 1]
    for episode in good:
        assert len(stored(replies[episode].messages)) == 3
    tools = environments.open({"says": "'x'", "tools": "2**70"})
    (reply,) = wait_for(environments, 1).values()
    assert (
        reply.cause == "malformed"
        and "tools[0].function.parameters is an integer of 71 bits" in reply.failure
    )
    for episode in (*bad, *good, tools):
        environments.end(episode)
