"""What the tests of this folder share: how many cases are drawn, how long one may take, and which errors are
clear ones.

pytest tests/fuzz              up to 30 cases each, the same every time
pytest tests/fuzz -m nightly -rP  most of them 5,000 others each, drawn anew; -rP prints how many

A failure prints how to repeat it."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

QUICK, FULL = 25, 5000
CASE_S = 10.0
"""Of the processor, that one case may take: hundreds of times what it takes, so no other load reaches it, and
no hang stays below it."""

hypothesis.configuration.set_hypothesis_home_dir(
    Path(tempfile.gettempdir()) / "megarl_hypothesis"
)  # not into the working tree


def fuzz(*strategies: st.SearchStrategy, quick: int = QUICK, full: int = FULL) -> Callable:
    """Make a test of `check(folder, *drawn)`; folder: for files, shared by all cases of the test. quick 0:
    only among the slow ones."""

    def decorate(check: Callable) -> Callable:
        @pytest.mark.parametrize(
            "cases",
            [quick] * (quick > 0)
            + [pytest.param(full, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
        )
        def test(cases: int, tmp_path: Path) -> None:
            ran, slowest = 0, 0.0

            def case(drawn: tuple) -> None:
                nonlocal ran, slowest
                ran, start = ran + 1, time.process_time()
                check(tmp_path, *drawn)
                slowest = max(slowest, time.process_time() - start)
                assert slowest < CASE_S

            # Health checks are about speed and about inputs that are drawn in vain; the cases here read and
            # write files.
            settings(
                max_examples=cases,
                deadline=None,
                database=None,
                print_blob=True,
                derandomize=cases == quick,
                suppress_health_check=list(HealthCheck),
                phases=set(Phase) - {Phase.explain},
            )(given(st.tuples(*strategies))(case))()
            print(f"{ran} cases, the slowest took {slowest:.3f} s of the processor")

        test.__module__, test.__name__, test.__qualname__, test.__doc__ = (
            check.__module__,
            check.__name__,
            check.__qualname__,
            check.__doc__,
        )
        return test

    return decorate


@contextlib.contextmanager
def may_refuse(*clear: type[Exception], naming: str = "") -> Iterator[None]:
    """Exactly these errors are clear ones, if they say something, and name what is at fault. Not their
    subclasses: a UnicodeDecodeError is a ValueError, and so is json's."""
    try:
        yield
    except Exception as error:
        if type(error) not in clear:
            raise
        assert str(error).strip() and naming in str(error), (
            f"{type(error).__name__} does not name {naming!r}: {error}"
        )
