"""Implementations of roles have the signatures that the role classes declare. `pytest
tests/workers/test_implements.py`"""

import pytest

import megarl.workers.actor
import megarl.workers.critic
import megarl.workers.data
import megarl.workers.profiler
import megarl.workers.reference
import megarl.workers.reward
import megarl.workers.reward_model
import megarl.workers.reward_training
import megarl.workers.rollout
import megarl.workers.sft  # noqa: F401  importing a class compares it with its declaration
from megarl.flow.job_roles import Metrics
from megarl.flow.role import ROLE_CLASSES, Role, method, methods_of
from megarl.workers.implements import IMPLEMENTATIONS, implements


def test_every_declared_method_is_implemented():
    of_job = {role for role in ROLE_CLASSES.values() if role.__module__ == "megarl.flow.job_roles"}
    assert {*IMPLEMENTATIONS.values()} == of_job and len(of_job) == 9
    for role in of_job:
        classes = [cls for cls, implemented in IMPLEMENTATIONS.items() if implemented is role]
        for name, declared in methods_of(role).items():
            assert any(hasattr(cls, name) for cls in classes), f"{role.kind}.{name}"
            assert declared.optional or all(hasattr(cls, name) for cls in classes), f"{role.kind}.{name}"


class Judge(Role):
    @method(reads=["tokens"], writes=["rewards"])
    def judge(self, rows: list[int], strict: bool = False) -> Metrics: ...

    @method(optional=True)
    def rest(self) -> None: ...


class Right:
    def judge(self, rows: list[int], strict: bool = False) -> dict[str, float]: ...


class Missing:
    def rest(self) -> None: ...


class OtherName(Right):
    def judge(self, row: list[int], strict: bool = False) -> dict[str, float]: ...


class OtherDefault(Right):
    def judge(self, rows: list[int], strict: bool = True) -> dict[str, float]: ...


class KeywordOnly(Right):
    def judge(self, rows: list[int], *, strict: bool = False) -> dict[str, float]: ...


class OtherType(Right):
    def judge(self, rows: "tuple[int]", strict: bool = False) -> dict[str, float]: ...


class OtherValue(Right):
    def judge(self, rows: list[int], strict: bool = False) -> list[float]: ...


class OtherOptional(Right):
    def rest(self, seconds: float) -> None: ...


@pytest.mark.parametrize(
    "cls, error",
    [
        (Missing, "Missing does not implement Judge: method judge is missing."),
        (OtherName, r"judge takes \(row: list\[int\], strict: bool = False\), declared is \(rows: "),
        (OtherDefault, r"judge takes \(rows: list\[int\], strict: bool = True\), declared is "),
        (KeywordOnly, r"judge takes \(rows: list\[int\], \*, strict"),
        (OtherType, r"judge has rows: tuple\[int\], declared is list\[int\]"),
        (OtherValue, r"judge has return: list\[float\], declared is dict\[str, float\]"),
        (OtherOptional, r"rest takes \(seconds: float\), declared is \(\)"),
    ],
)
def test_a_class_with_another_signature_is_refused(cls, error):
    before = dict(IMPLEMENTATIONS)
    with pytest.raises(TypeError, match=error):
        implements(Judge)(cls)
    assert IMPLEMENTATIONS == before


def test_a_class_with_the_declared_signatures_is_bound():
    try:
        assert implements(Judge)(Right) is Right and IMPLEMENTATIONS[Right] is Judge
    finally:
        del IMPLEMENTATIONS[Right]
