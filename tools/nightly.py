"""Run a part of the nightly tests: what is too long for every change, cut into parts of equal length.

    python tools/nightly.py                     today's part
    NIGHTLY_PART=3 python tools/nightly.py      this part
    python tools/nightly.py --list              how long each part takes, and what it has
    python tools/nightly.py --all --record      all parts, one after another; writes how long each test takes

Part 0 has the tests of `make test` that start processes, and starts them all anew (tests/launch.py). The other
parts have the tests marked nightly. Each day has the next part; with fewer parts than days, a week covers all.

A test that fails here and also fails on the parent commit is reported and does not fail the run."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = ROOT / "tests" / "nightly_seconds.json"
UNKNOWN_S = 60.0
"""Length of a test that no run has recorded."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=22.0,
        help="length of a part; after half as many more, no file is begun",
    )
    parser.add_argument("--list", action="store_true", help="print the parts and run none")
    parser.add_argument("--all", action="store_true", help="run every part")
    parser.add_argument(
        "--record", action="store_true", help="write the tests' lengths to the file of lengths"
    )
    arguments = parser.parse_args()
    recorded = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    parts = [[], *cut(collect(), recorded, 60 * arguments.minutes)]
    if arguments.list:
        for number, tests in enumerate(parts):
            print(f"part {number}:", describe(tests, recorded))
        return 0
    codes = []
    for number in range(len(parts)) if arguments.all else [chosen(len(parts))]:
        print(f"nightly part {number} of {len(parts)} (NIGHTLY_PART={number} runs it again):", flush=True)
        print(describe(parts[number], recorded), flush=True)
        limit_s = math.inf if arguments.all else 60 * 1.5 * arguments.minutes
        codes.append(run(parts[number], recorded if arguments.record else None, limit_s))
    return max(codes)


def chosen(num_parts: int) -> int:
    """Return NIGHTLY_PART of the environment, or today's part."""
    text = os.environ.get("NIGHTLY_PART") or str(
        (datetime.now(UTC) - datetime(2026, 1, 1, tzinfo=UTC)).days % num_parts
    )
    if not text.isdecimal() or int(text) >= num_parts:
        sys.exit(f"NIGHTLY_PART ({text}) must be a whole number from 0 to {num_parts - 1}, for example 0")
    return int(text)


def collect() -> list[str]:
    """Return the nightly tests in their order, without parameters: a function's cases stay together."""
    command = [sys.executable, "-m", "pytest", "tests", "--collect-only", "-q", "-m", "nightly"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    return list(dict.fromkeys(re.findall(r"^(tests/[^\s\[]+::[^\s\[]+)", done.stdout, re.MULTILINE)))


def cut(tests: list[str], seconds: dict[str, float], part_s: float) -> list[list[str]]:
    """Cut the tests, in their order, into parts of at most `part_s` seconds; a longer test is a part alone."""
    parts: list[list[str]] = [[]]
    left = part_s
    for test in tests:
        length = seconds.get(test, UNKNOWN_S)
        if length > left and parts[-1]:
            parts.append([])
            left = part_s
        parts[-1].append(test)
        left -= length
    return parts


def describe(tests: list[str], seconds: dict[str, float]) -> str:
    if not tests:
        return "the tests of `make test` that start processes, each process anew"
    length = sum(seconds.get(test, UNKNOWN_S) for test in tests) / 60
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    return f"{len(tests)} tests, about {length:.0f} min: {', '.join(files)}"


def run(tests: list[str], recorded: dict[str, float] | None, limit_s: float) -> int:
    """Run a part, file by file. Returns 1 if a test fails that does not fail on the parent commit.

    Files that `limit_s` seconds do not suffice for are left out, and named."""
    environment = dict(os.environ) if tests else os.environ | {"MEGARL_TEST_PRELOADED": "0"}
    select = ["-m", "nightly"] if tests else ["-m", "not nightly and not unit"]
    files = [[*group] for _, group in itertools.groupby(tests, lambda test: test.split("::")[0])]
    deadline, failed = time.monotonic() + limit_s, []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        for group in files or [["tests"]]:
            if time.monotonic() > deadline:
                print(f"not run, {limit_s / 60:.0f} min are over: {' '.join(group)}")
                continue
            code = pytest(ROOT, [*select, *group, f"--junitxml={report}"], environment)
            if code not in (0, 1):
                return code
            seconds, of_group = read(report)
            failed += of_group
            if recorded is not None and tests:
                recorded |= {test: round(length, 1) for test, length in seconds.items()}
                SECONDS.write_text(json.dumps(dict(sorted(recorded.items())), indent=0) + "\n")
        before = failures_of_parent(failed, Path(folder) / "parent", environment) if failed else set()
    for test in failed:
        print(
            f"{test}: " + ("fails on the parent commit too" if test in before else "fails since this commit")
        )
    return int(any(test not in before for test in failed))


def pytest(root: Path, arguments: list[str], environment: dict[str, str]) -> int:
    command = [
        ".venv/bin/python",
        "-m",
        "pytest",
        "-q",
        "--dist",
        "loadfile",
        "--no-loadscope-reorder",
        "-n",
        "2",
        *arguments,
    ]
    return subprocess.run(command, cwd=root, env=environment).returncode


def read(report: Path) -> tuple[dict[str, float], list[str]]:
    """Return (test function -> seconds of all its cases, cases that failed) of a JUnit report."""
    seconds: dict[str, float] = defaultdict(float)
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
        seconds[test.split("[")[0]] += float(case.get("time"))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(test)
    return seconds, failed


def failures_of_parent(tests: list[str], folder: Path, environment: dict[str, str]) -> set[str]:
    """Return which of these tests fail on the parent commit as well, in an environment of its own."""
    known = subprocess.run(["git", "rev-parse", "-q", "--verify", "HEAD^"], cwd=ROOT, capture_output=True)
    if known.returncode != 0:
        print("This clone has no parent commit to compare with: git fetch --deepen 1")
        return set()
    subprocess.run(["git", "worktree", "add", "--detach", folder, "HEAD^"], cwd=ROOT, check=True)
    try:
        subprocess.run(["make", ".venv/.ready"], cwd=folder, check=True)
        report = folder / "report.xml"
        pytest(folder, ["-m", "", *tests, f"--junitxml={report}"], environment)
        return set(read(report)[1]) if report.exists() else set()  # not: a test that the parent does not have
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
