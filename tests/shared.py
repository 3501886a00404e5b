"""What test files share: things that are made once in a run of pytest, and cases of which the default suite
runs some."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """Return what `make` returns for a new folder of this name, as JSON keeps it. Other processes of this run
    wait, and get the same value and the same files, which no test may change."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    result, folder = root / f"{name}.json", root / name
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():  # or the process that made it has failed
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            made = json.dumps(make(folder))
            result.write_text(made)
    return json.loads(result.read_text())


def with_nightly(cases: Iterable[tuple[str, ...]], quick: Iterable[tuple[str, ...]]) -> list:
    """Return the cases for `parametrize`; those that are not in `quick` run nightly."""
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.nightly, id="-".join(case))
        for case in cases
    ]


def selected_cases(request: pytest.FixtureRequest, *names: str) -> list[str]:
    """Return the values of these parameters of the tests of this file that will run, each once: "family/layout"."""
    of_file = (item for item in request.session.items if item.path == request.path)
    found = (item.callspec.params for item in of_file if hasattr(item, "callspec"))
    return [*dict.fromkeys("/".join(of[name] for name in names) for of in found if {*names} <= {*of})]
