"""The command `megarl doctor`: runs the probes at the same time, collects their results, and prints them."""

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
from multiprocessing.connection import wait

from megarl.config.errors import ConfigError
from megarl.doctor.facts import machine, version_errors, versions
from megarl.inspect.arguments import Parser, number, whole

_DEADLINE_S = 240.0  # of a machine that is busy; it takes about 15 s
_PORT, _WAIT_S = 29511, 60.0


def main(argv: list[str]) -> int:
    """Run the command. Returns the exit code: 0; 1 if a test failed or a version is not the one that
    megarl needs. Raises: ConfigError for flags that cannot be used."""
    parser = Parser("doctor", "Show what this installation and machine have, and try the parts.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    several = parser.add_argument_group("several machines, where this command is run on each of them")
    several.add_argument(
        "--nnodes", type=whole(1, 2), default=1, metavar="N", help="try whether N machines fit together"
    )
    several.add_argument("--head", help="host name or address of one of them, the same on all")
    several.add_argument(
        "--port", type=whole(1, _PORT, at_most=65535), help=f"a free port of --head; default: {_PORT}"
    )
    several.add_argument("--folder", help="a folder that all of them should share")
    several.add_argument(
        "--wait-s", type=number(1, _WAIT_S), help=f"seconds to wait for all of them; default: {_WAIT_S:g}"
    )
    arguments = parser.parse(argv)
    if arguments.nnodes > 1:
        return _check_nodes(arguments)
    for flag in ("head", "port", "folder", "wait_s"):
        if getattr(arguments, flag) is not None:
            raise ConfigError(
                [f"--{flag.replace('_', '-')}: has no effect without --nnodes 2 or more. Leave it out."]
            )
    found = versions()
    report = {
        "versions": found,
        "machine": machine(),
        "errors": version_errors(found),
        "devices": [],
        "features": {},
        "tests": [],
    }
    with _probes() as lines:
        for line in lines:
            report["tests"] += [line] if "test" in line else []
            report |= {name: line[name] for name in ("devices", "features") if name in line}
    report["ok"] = not report["errors"] and all(test["ok"] for test in report["tests"])
    sys.stdout.write(json.dumps(report, indent=1) + "\n" if arguments.json else text(report))
    return 0 if report["ok"] else 1


def _check_nodes(arguments: argparse.Namespace) -> int:
    """Test this machine together with others. Returns the exit code: 0, 1 if a test failed, or 2 if the user
    must name a secret or a network interface first."""
    from megarl.doctor.nodes import Meeting, check_nodes
    from megarl.runtime.network import InterfaceError
    from megarl.runtime.signing import SecretError

    if arguments.head is None:
        raise ConfigError(
            ["--head (not given): must name one of the machines, which all others reach. Try --head node0."]
        )
    port, wait_s = arguments.port or _PORT, arguments.wait_s or _WAIT_S
    meeting = Meeting(arguments.nnodes, arguments.head, port, arguments.folder, wait_s)
    try:
        tests = check_nodes(meeting)
    except (SecretError, InterfaceError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    ok = all(test["ok"] for test in tests)
    report = {"tests": tests, "ok": ok}
    lines = [_line(test) for test in tests]
    shown = json.dumps(report, indent=1) if arguments.json else "\n".join([*lines, "ok" if ok else "not ok"])
    sys.stdout.write(f"{shown}\n")
    return 0 if ok else 1


def _line(test: dict) -> str:
    return f"{'ok    ' if test['ok'] else 'FAILED'} {test['test']}: {test['text']} ({test['seconds']} s)"


@contextlib.contextmanager
def _probes() -> Iterator[Iterator[dict]]:
    """Context manager that runs two probe processes and gives an iterator over their results as they come.
    Both have ended afterwards."""
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONSAFEPATH": "1"}
    for name in ("RANK", "WORLD_SIZE"):
        env.pop(name, None)
    with tempfile.TemporaryFile("w+") as stderr:
        # Unbuffered: a line that waits in a buffer here is one that the selector does not see.
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "megarl.doctor.probe", str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
                env=env,
                start_new_session=True,
            )
            for rank in range(2)
        ]
        try:
            yield _lines(processes, stderr)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def _lines(processes: list[subprocess.Popen], stderr) -> Iterator[dict]:
    deadline, begun = time.monotonic() + _DEADLINE_S, ["rank 0 starts", "rank 1 starts"]
    running = {process.stdout: rank for rank, process in enumerate(processes)}

    def failed(rank: int, how: str, seconds: float) -> dict:
        text = f"rank {rank} of the test {how}"
        return {"test": begun[rank], "ok": False, "text": text, "seconds": seconds}

    while running and (ready := wait([*running], max(0.0, deadline - time.monotonic()))):
        for stdout in ready:
            rank, line = running[stdout], stdout.readline()
            if not line:
                del running[stdout]
                if code := processes[rank].wait():
                    yield failed(rank, _how(code, stderr), 0.0)
                    if begun[0] == "rank 0 starts":  # rank 1 waits for its port
                        return
            elif line.startswith(b'{"'):  # other lines are printed by libraries
                said = json.loads(line)
                begun[rank] = said.get("begins", begun[rank])
                if "port" in said:
                    with contextlib.suppress(BrokenPipeError):  # it has died, and its stdout will end
                        processes[1].stdin.write(f"{said['port']}\n".encode())
                yield said
    for rank in running.values():
        yield failed(rank, f"did not end within {_DEADLINE_S:g} s", _DEADLINE_S)


def _how(code: int, stderr) -> str:
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    stderr.seek(0)
    return f"ended with exit code {code}: {(stderr.read().strip().splitlines() or ['it said nothing'])[-1]}"


def text(report: dict) -> str:
    devices = report["devices"] or ["no GPU: everything runs on the CPU"]
    parts = {
        "versions": [", ".join(f"{name} {version or '-'}" for name, version in report["versions"].items())],
        "machine": [*(f"{name}: {value}" for name, value in report["machine"].items()), *devices],
        "features": [
            f"{'on ' if on else 'off'} {name}: {why}" for name, (on, why) in report["features"].items()
        ],
        "tests": [_line(test) for test in report["tests"]],
    }
    lines = [line for title, own in parts.items() for line in (title, *(f"  {one}" for one in own))]
    lines += [f"wrong: {error}" for error in report["errors"]]
    return "\n".join([*lines, "ok" if report["ok"] else "not ok"]) + "\n"
