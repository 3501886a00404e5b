"""What the messages between driver and ranks can hold, and what they say of what they cannot.
`pytest tests/runtime/test_messages.py`"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from megarl.flow.role import ROLE_CLASSES, methods_of, role_class
from megarl.packing import Sample
from megarl.runtime import messages
from megarl.runtime.messages import (
    CannotSend,
    Failure,
    decode_arguments,
    decode_result,
    encode,
    encode_arguments,
)

DECLARED = [(cls, name) for cls in ROLE_CLASSES.values() for name in methods_of(cls)]


@pytest.mark.parametrize("cls, name", DECLARED, ids=lambda value: getattr(value, "__name__", value))
def test_every_declared_method_has_types_that_messages_hold(cls, name):
    declared = methods_of(cls)[name]
    for parameter in ("return", *declared.signature.parameters):
        messages._decoder(declared.function, parameter)


def test_a_result_has_the_declared_type():
    data = encode([Sample(1, 20, 8, owners=(0, 1))])
    assert decode_result(role_class("rollout"), "generate", data) == [Sample(1, 20, 8, owners=(0, 1))]
    assert decode_result(None, "generate", data)[0]["owners"] == [0, 1]
    assert decode_result(role_class("rollout"), "of_its_own", data)[0]["sample_id"] == 1
    with pytest.raises(TypeError, match=r"^its result is not of the declared type: .*float"):
        decode_result(role_class("rollout"), "sync", encode({"sync/bytes": "many"}))


def test_counts_stay_integers():
    metrics = decode_result(role_class("rollout"), "sync", encode({"bytes": 3, "seconds": 3.0}))
    assert [type(value) for value in metrics.values()] == [int, float]


def test_numbers_of_numpy_paths_and_long_integers_arrive():
    sent = [np.int64(3), np.float32(0.5), Path("/a/b"), 2**70, {"a": -(2**80)}]
    assert decode_result(None, "", encode(sent[:3])) == [3, 0.5, "/a/b"]
    assert decode_result(None, "", encode(sent[3:])) == sent[3:]


class Role:
    def call(self, first: int, *more: str, last: float = 0.0, **others: list[int]): ...

    def unresolvable(self, value: Nowhere): ...  # noqa: F821

    def impossible(self, value: threading.Thread): ...


def arguments(*args, **kwargs):
    return decode_arguments(Role().call, encode_arguments("role", "call", args, kwargs))


def test_every_kind_of_parameter_has_its_type():
    bound = arguments(1, "a", "b", last=2, x=(3, 4))
    assert (bound.args, bound.kwargs) == ((1, "a", "b"), {"last": 2.0, "x": [3, 4]})
    assert type(bound.kwargs["last"]) is float


@pytest.mark.parametrize(
    "args, kwargs, name",
    [(("1",), {}, "first"), ((1, 2), {}, "more"), ((1,), {"last": "0"}, "last"), ((1,), {"x": ["y"]}, "x")],
)
def test_an_argument_of_another_type_is_named(args, kwargs, name):
    with pytest.raises(TypeError, match=f"^argument {name} is not of the declared type: Expected"):
        arguments(*args, **kwargs)


def test_annotations_that_no_message_can_follow_are_named():
    data = encode_arguments("role", "method", (1,), {})
    with pytest.raises(TypeError, match="annotations of Role.unresolvable cannot be read: .*Nowhere"):
        decode_arguments(Role().unresolvable, data)
    with pytest.raises(TypeError, match="argument value .*Thread"):
        decode_arguments(Role().impossible, data)


def test_what_cannot_be_sent_is_named_with_its_type():
    with pytest.raises(
        CannotSend, match=r"^\[actor\] update: argument 1 \(dict\) cannot be sent: numpy.ndarray"
    ):
        encode_arguments("actor", "update", ({"batch": np.zeros(3)},), {})


def test_a_failure_may_name_a_file_that_is_no_text():
    try:
        raise OSError("cannot open \udcff.json")
    except OSError as error:
        failure = Failure.of(error, "actor", "setup", None)
    assert failure.error == "OSError: cannot open \\udcff.json" and encode(failure)
