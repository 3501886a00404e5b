"""Compare the step time of one job under torchrun, under megarl's own processes and under Ray.

    python tools/benchmarks/bench_executors.py --checkpoint runs/quickstart/sft_mixed/hf --data runs/quickstart/data
           --out runs/executors --json out.json [--turns 32] [--steps-per-turn 6] [--executors torchrun,ray]

All jobs are alive at the same time and take turns of a few steps: all processes of the others, Ray's own ones
included, are stopped by SIGSTOP meanwhile. They compute the same steps bit for bit, so a ratio compares the same work
within seconds. That matters on a shared machine, whose speed changes by a third from one minute to the next."""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
EXECUTORS = ("torchrun", "own", "ray")
FIRST_STEPS = 3
"""Steps before the first turn, which compile and allocate."""
STEP_LIMIT_S = 300.0
MARK = "MEGARL_BENCHMARK_JOB"
"""Environment variable that all processes of a job inherit."""


def main() -> int:
    options = parse()
    options.out.mkdir(parents=True)
    jobs = [Job(name, options) for name in options.executors]
    try:
        for job in jobs:
            job.run_until(FIRST_STEPS)
        for turn in range(options.turns):
            for job in jobs if turn % 2 == 0 else reversed(jobs):
                job.run_until(job.step + options.steps_per_turn)
        for job in jobs:
            job.end()
    finally:
        for job in jobs:
            job.signal(signal.SIGKILL)
    seconds = {job.name: job.seconds_of_turns(options.steps_per_turn) for job in jobs}
    options.json.write_text(json.dumps({"command": sys.argv, "seconds_of_turns": seconds}, indent=1) + "\n")
    first = options.executors[0]
    for name in options.executors:
        ratios = sorted(other / own for other, own in zip(seconds[name], seconds[first], strict=True))
        step_s = median(seconds[name]) / (options.steps_per_turn - 1)
        quarter = len(ratios) // 4
        print(
            f"{name}: step_s {step_s:.3f}, {median(ratios):.3f} of {first} (quarters {ratios[quarter]:.3f} and "
            f"{ratios[-1 - quarter]:.3f}), {sum(seconds[name]) / sum(seconds[first]):.3f} over all steps"
        )
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="Hugging Face folder to start from")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder for all runs, made anew")
    parser.add_argument("--json", type=Path, required=True, help="where to write the result")
    parser.add_argument("--turns", type=int, default=32, help="turns of each job")
    parser.add_argument(
        "--steps-per-turn", type=int, default=6, help="the first one, cut by the stop, is left out"
    )
    parser.add_argument(
        "--executors", default="torchrun,own,ray", help="what others are divided by comes first"
    )
    options = parser.parse_args()
    options.executors = options.executors.split(",")
    if unknown := set(options.executors) - set(EXECUTORS):
        parser.error(f"--executors: {sorted(unknown)[0]!r} is none of {', '.join(EXECUTORS)}.")
    if options.turns < 1 or options.steps_per_turn < 2:
        parser.error(
            f"--turns ({options.turns}) must be at least 1 and --steps-per-turn ({options.steps_per_turn}) "
            "at least 2. Try 32 and 6."
        )
    options.out, options.train_iters = (
        options.out.resolve(),
        FIRST_STEPS + options.turns * options.steps_per_turn + 1,
    )
    return options


class Job:
    """A job that runs only while it is asked for steps."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.step = 0
        self._folder = options.out / name
        self._mark = f"{name}-{os.getpid()}"
        self._steps: queue.Queue[int | None] = queue.Queue()
        self._turns: list[tuple[int, int]] = []
        self._log = self._folder.with_suffix(".log")
        self._process = subprocess.Popen(
            command(name, self._folder, options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=options.out,
            env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
            | {MARK: self._mark},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def run_until(self, step: int) -> None:
        """Continue the job until it has printed a step, then stop it."""
        self.signal(signal.SIGCONT)
        self._turns.append((self.step, step))
        while self.step < step:
            self._next_step()
        self.signal(signal.SIGSTOP)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        if self._process.wait(STEP_LIMIT_S):
            raise SystemExit(f"{self.name}: exit code {self._process.returncode}, see {self._log}")

    def seconds_of_turns(self, steps_per_turn: int) -> list[float]:
        """Return the seconds of each turn, without its first step."""
        rows = map(json.loads, (self._folder / "metrics.jsonl").read_text().splitlines())
        seconds = [row["time/step_s"] for row in rows if "time/step_s" in row]
        return [sum(seconds[before + 1 : last]) for before, last in self._turns[1:]]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of the job, Ray's own ones included."""
        mark = f"{MARK}={self._mark}".encode()
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    if mark in (process / "environ").read_bytes().split(b"\0"):
                        os.kill(int(process.name), number)
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    continue

    def _read(self) -> None:
        with self._log.open("w") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                if found := re.match(r"step=(\d+)/", line):
                    self._steps.put(int(found[1]))
        self._steps.put(None)

    def _next_step(self) -> None:
        try:
            step = self._steps.get(timeout=STEP_LIMIT_S)
        except queue.Empty:
            raise SystemExit(f"{self.name}: no step in {STEP_LIMIT_S:.0f} s, see {self._log}") from None
        if step is None:
            raise SystemExit(f"{self.name}: ended after step {self.step}, see {self._log}")
        self.step = step


def command(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    files = ["--model", options.checkpoint.resolve(), "--train-data", options.data.resolve() / "train.jsonl"]
    files += ["--eval-data", options.data.resolve() / "test.jsonl", "--eval-interval", 0, "--save", folder]
    words = [f"@{ROOT}/configs/quickstart_grpo.args", *files, "--train-iters", options.train_iters]
    if name == "torchrun":
        start = [BIN / "torchrun", "--standalone", "--nproc-per-node", 2, "-m", "megarl.train"]
    else:
        start = [BIN / "python", "-P", "-m", "megarl.cli", "train"]
        words += ["--nproc-per-node", 2] + (["--executor", "ray"] if name == "ray" else [])
    return [*map(str, [*start, *words])]


if __name__ == "__main__":
    sys.exit(main())
