"""Run the tests that start processes, send signals or depend on time, many times in several conditions.

    make test-stress                                          20 times in each condition: days on two cores
    make test-stress ARGS="tests/runtime/test_shutdown.py"    the tests of one file
    make test-stress ARGS="--budget-s 3600"                   for an hour; called again, it continues

    quiet      the tests of two files run at the same time, as in make test
    busy       the tests of six files, and two busy loops
    one-core   all processes of the tests share one core
    delayed    SIGINT and SIGTERM reach every process up to 300 ms late, at random (tools/delay_signals.c);
               the tests of two files run at the same time

A hundred files run in one pytest. build/stress/ holds state.json, the first failure of each test in each
condition, and table.md. The exit code is 1 if a test has failed in any run in state.json. After a
fix, `--forget TEXT` removes the runs of tests whose name contains the text."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
CONDITIONS = {"quiet": 2, "busy": 6, "one-core": 0, "delayed": 2}
"""Condition -> workers of pytest-xdist; 0: none."""
FILES_AT_ONCE = 100
"""Test files per pytest process: to start one and import what tests need takes each worker 10 s of a core."""
BUSY_LOOPS = 2
KINDS = ("signals", "deadlines", "children")
"""Kinds of tests by the names of tests/processes.py that they use. Tests of the first kind run first."""
DELAY_MS = 300
RUN_LIMIT_S = 3600.0
PYTEST = [sys.executable, "-P", "-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider", "-q"]


class State:
    """Results of all runs: test -> condition -> results, oldest first.

    They are written after every run, so that an interrupted command can continue."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "state.json"
        self.results: dict[str, dict[str, list[dict]]] = (
            json.loads(self._file.read_text()) if self._file.exists() else {}
        )

    def runs(self, test: str, condition: str) -> list[dict]:
        return self.results.get(test, {}).get(condition, [])

    def add(self, test: str, condition: str, result: dict) -> None:
        self.results.setdefault(test, {}).setdefault(condition, []).append(result)

    def forget(self, text: str) -> None:
        self.results = {test: runs for test, runs in self.results.items() if text not in test}

    def write(self) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self.results))
        new.replace(self._file)


def main(argv: list[str]) -> int:
    options = parse(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    state = State(options.folder)
    for text in options.forget:
        state.forget(text)
    state.write()
    files = collect(options.tests, options.nightly)
    if not files:
        sys.exit(
            f"tests ({' '.join(options.tests)}): none of them starts processes, sends signals or "
            "depends on time."
        )
    deadline = time.monotonic() + options.budget_s if options.budget_s else float("inf")
    for chosen, condition in what_to_run(files, state, options):
        if time.monotonic() > deadline:
            break
        run([test for file in chosen for test in files[file]], condition, state, options.folder)
        state.write()
        (options.folder / "table.md").write_text(table(state))
    sys.stdout.write(table(state))
    return int(
        any(
            result["outcome"] != "passed"
            for runs in state.results.values()
            for of in runs.values()
            for result in of
        )
    )


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "stress_tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tests", nargs="*", default=["tests"], help="files, folders or tests, as pytest takes them"
    )
    parser.add_argument("--runs", type=int, default=20, help="of each test in each condition")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=[*CONDITIONS])
    parser.add_argument("--nightly", action="store_true", help="the nightly tests too")
    parser.add_argument("--budget-s", type=float, help="begin no run after so many seconds")
    parser.add_argument(
        "--forget",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="drop the runs of tests whose name has this text",
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "stress")
    return parser.parse_args(argv)


def collect(tests: list[str], nightly: bool) -> dict[str, list[str]]:
    """Return file -> its tests that start processes or depend on time, the most fragile files first."""
    marks = "processes" if nightly else "processes and not nightly"
    with tempfile.NamedTemporaryFile("r", suffix=".json") as found:
        env = os.environ | {"STRESS_COLLECTED": found.name, "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(
            [*PYTEST, "-p", "stress_tests", "--collect-only", "-m", marks, *tests],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, 5):  # 5: no tests
            sys.exit(done.stdout + done.stderr)
        kinds = json.loads(found.read() or "{}")
    files: dict[str, list[str]] = {}
    for test in kinds:
        files.setdefault(test.partition("::")[0], []).append(test)
    return dict(sorted(files.items(), key=lambda item: min(KINDS.index(kinds[test]) for test in item[1])))


def pytest_collection_finish(session: object) -> None:
    """Write test -> kind. Pytest calls this, because `collect` loads this file as a plugin."""
    if "STRESS_COLLECTED" in os.environ:
        kinds = {item.nodeid: item.get_closest_marker("processes").args[0] for item in session.items}
        Path(os.environ["STRESS_COLLECTED"]).write_text(json.dumps(kinds))


def what_to_run(
    files: dict[str, list[str]], state: State, options: argparse.Namespace
) -> Iterator[tuple[list[str], str]]:
    """Yield files and condition of each remaining run: one of all files in all conditions, then another one."""
    for number in range(options.runs):
        for condition in options.conditions:
            left = [
                file
                for file, tests in files.items()
                if min(len(state.runs(test, condition)) for test in tests) <= number
            ]
            for at in range(0, len(left), FILES_AT_ONCE):
                yield left[at : at + FILES_AT_ONCE], condition


def run(tests: list[str], condition: str, state: State, folder: Path) -> None:
    """Run these tests once in a condition, and add their outcomes to the state."""
    load, start = os.getloadavg()[0], time.time()
    with (
        tempfile.TemporaryDirectory(prefix="stress-") as scratch,
        surroundings(condition, Path(scratch)) as env,
    ):
        report, output = Path(scratch) / "report.xml", Path(scratch) / "output"
        workers = ["-n", str(CONDITIONS[condition]), "--dist", "loadfile"] if CONDITIONS[condition] else []
        with open(output, "wb") as out:
            process = subprocess.Popen(
                [*PYTEST, "-m", "", f"--junitxml={report}", *workers, *tests],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(RUN_LIMIT_S)
            finally:
                end(process)
        outcomes = read_report(report) if report.exists() else {}
        failed = []
        for test in tests:
            outcome, seconds = outcomes.get(test, ("no report: pytest was ended", 0.0))
            if outcome == "skipped":
                outcome = "passed"
            if outcome != "passed":
                failed.append(test)
                first = folder / f"{test.replace('/', '.').replace('::', '-')[:150]}-{condition}.txt"
                if not first.exists():
                    first.write_bytes(output.read_bytes())
            state.add(test, condition, {"outcome": outcome, "seconds": seconds, "at": start, "load": load})
    sys.stdout.write(
        f"{time.strftime('%H:%M:%S')} {condition:8} {tests[0].partition('::')[0]} and others, {len(tests)} tests, "
        f"{time.time() - start:.0f} s, load {load:.0f}: "
        f"{', '.join(failed) + ' FAILED' if failed else 'ok'}\n"
    )
    sys.stdout.flush()


def end(process: subprocess.Popen) -> None:
    """End a pytest that is still running. A Ctrl-C comes first, so that it can end the jobs of its tests."""
    for signum, wait_s in ((signal.SIGINT, 60.0), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)


@contextlib.contextmanager
def surroundings(condition: str, scratch: Path) -> Iterator[dict[str, str]]:
    """Create a condition, and yield the environment variables for the tests that run in it.

    Cores and busy loops are set up and restored here."""
    env, cores, loops = dict(os.environ), os.sched_getaffinity(0), []
    if condition == "one-core":
        os.sched_setaffinity(0, {min(cores)})  # children inherit it
    if condition == "delayed":
        library = scratch / "delay_signals.so"
        subprocess.run(
            [
                "cc",
                "-shared",
                "-fPIC",
                "-O1",
                "-o",
                str(library),
                str(Path(__file__).with_name("delay_signals.c")),
                "-ldl",
            ],
            check=True,
        )
        env |= {"LD_PRELOAD": str(library), "DELAY_SIGNALS_MS": str(DELAY_MS)}
    if condition == "busy":
        loops = [
            subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(BUSY_LOOPS)
        ]
    try:
        yield env
    finally:
        os.sched_setaffinity(0, cores)
        for loop in loops:
            loop.kill()
            loop.wait()


def read_report(report: Path) -> dict[str, tuple[str, float]]:
    """Return test -> (outcome, seconds)."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = [child for child in case if child.tag in ("failure", "error")]
        outcome = (
            f"{wrong[0].tag}: {wrong[0].get('message', '').splitlines()[0][:200]}"
            if wrong and wrong[0].get("message")
            else (wrong[0].tag if wrong else "skipped" if case.find("skipped") is not None else "passed")
        )
        file = case.get("classname").replace(".", "/") + ".py"
        found[f"{file}::{case.get('name')}"] = outcome, float(case.get("time", 0.0))
    return found


def table(state: State) -> str:
    """Return Markdown: how often all tests ran, and the tests that failed, with their messages."""
    head = f"| test | {' | '.join(CONDITIONS)} |\n|---|{'---|' * len(CONDITIONS)}\n"
    rows, messages = [], []
    for test, runs in sorted(state.results.items()):
        bad = {name: [run for run in runs.get(name, []) if run["outcome"] != "passed"] for name in CONDITIONS}
        if any(bad.values()):
            cells = (f"{len(bad[name])} of {len(runs.get(name, []))} failed" for name in CONDITIONS)
            rows.append(f"| {test} | {' | '.join(cells)} |\n")
        messages += (
            f"- {name}, load {run['load']:.0f}: {test}: {run['outcome']}\n"
            for name in bad
            for run in bad[name]
        )
    numbers = {name: [len(runs.get(name, [])) for runs in state.results.values()] for name in CONDITIONS}
    times = (f"{min(of)} to {max(of)} times" if of else "" for of in numbers.values())
    rows.append(f"| each of {len(state.results)} tests ran | {' | '.join(times)} |\n")
    return head + "".join(rows) + "".join(["\n", *messages] if messages else [])


if __name__ == "__main__":
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a shell's background job inherits an ignored SIGINT, and so would the tests
        signal.signal(number, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
