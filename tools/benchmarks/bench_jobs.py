"""Whole jobs of a 0.5B model in bf16 on one device, with vLLM: seconds of each phase, memory and mismatch.

    python tools/benchmarks/bench_jobs.py --json out.json [--jobs grpo separate_process ppo] [--train-iters 8]
                                          [--small]

The model has the shape of Qwen2.5-0.5B and random weights, so its answers are noise of full length; the prompts are
sums. Of each job's steps the first two, which compile kernels and capture graphs, are left out, and the median of the
others is printed. `mismatch` is the difference between the log-probs of the engine and of the trainer for the tokens
of a step. A job that fails is reported with the last lines of its log, and the next one runs. A metric that a
job does not report is named as missing.

Rewards are numbers that the responses' texts determine, and `reward_std` is their deviation within a group. A
model of random weights solves no sum: with the sums' own rewards all advantages would be 0, and the output
layer would skip its backward pass. A job whose rewards are equal within all groups fails.

--small is a rehearsal on a CPU with the quickstart's model; its numbers say nothing."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, median, stdev

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 2
JOBS = {
    "grpo": ["@configs/quickstart_grpo.args"],
    # The engine keeps its cache during updates; with vLLM's half of the GPU, 80 GB are too few.
    "separate_process": [
        *("@configs/quickstart_grpo.args", "--rollout-engine", "out-of-process"),
        *("--rollout-gpu-memory-utilization", "0.4"),
    ],
    "ppo": ["@configs/quickstart_ppo.args"],
}
"""Name: recipe and flags."""
JOB_TIMEOUT_S = 170
"""All jobs and making the model fit the 560 s that tools/gpu_session.sh gives them."""
REWARD = Path(__file__).resolve().parent / "permuted_reward.py"
LARGE = """--bf16 --num-prompts 32 --num-samples-per-prompt 8 --global-batch-size 128 --max-prompt-length 128
--max-response-length 512""".split()
SMALL = "--num-prompts 4 --num-samples-per-prompt 4 --global-batch-size 8".split()
COLUMNS = {
    "step_s": "time/step_s",
    "rollout_s": "time/rollout_s",
    "log_probs_s": "time/log_probs_s",
    "update_s": "time/update_s",
    "reshard_s": "time/reshard_s",
    "tokens_per_s": "throughput/tokens_per_s",
    "peak_bytes": "memory/peak_bytes",
    "sync_bytes": "sync/bytes",
    "response_length": "response/length_mean",
    "mismatch_mean": "mismatch/mean_abs",
    "mismatch_max": "mismatch/max_abs",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--train-iters", type=int, default=8, help=f"steps of a job, more than {WARM_UP}")
    parser.add_argument("--timeout-s", type=float, default=JOB_TIMEOUT_S, help="of each job")
    parser.add_argument("--small", action="store_true")
    arguments, flags = parser.parse_known_args()
    if arguments.train_iters <= WARM_UP:
        parser.error(f"--train-iters ({arguments.train_iters}) must be more than {WARM_UP}, such as 8")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model_and_data(Path(folder), arguments.small)
        for job in arguments.jobs:
            results[job] = run(job, Path(folder), model, arguments, flags)
            print(f"{job:20s} " + ", ".join(f"{name} {value}" for name, value in results[job].items()))
            if arguments.json:
                arguments.json.write_text(json.dumps({"command": sys.argv, "jobs": results}, indent=1) + "\n")
    return any("failed" in result for result in results.values())


def make_model_and_data(folder: Path, small: bool) -> Path:
    """Write both into `folder` and return the model's."""
    tools = ROOT / "tools"
    subprocess.run([sys.executable, tools / "make_sums.py", "--out", folder / "data"], check=True)
    if small:
        return folder / "data" / "model"
    command = [sys.executable, tools / "make_random_model.py", "--out", folder / "model", "--weights"]
    subprocess.run(command, check=True)
    return folder / "model"


def run(job: str, folder: Path, model: Path, arguments: argparse.Namespace, flags: list[str]) -> dict:
    """Train and return the medians of COLUMNS, or {"failed": end of the log}."""
    save, started = folder / job, time.time()
    command = [
        *(sys.executable, "-m", "megarl.cli", "train", *JOBS[job]),
        *("--model", model, "--train-data", folder / "data" / "train.jsonl"),
        *("--eval-data", folder / "data" / "test.jsonl", "--eval-interval", "1000", "--save", save),
        *("--nproc-per-node", "1", "--train-iters", str(arguments.train_iters)),
        *("--reward-function", f"{REWARD}:by_text"),
        *(SMALL if arguments.small else LARGE),
        *flags,
    ]
    log = folder / f"{job}.log"
    with log.open("w") as file:
        try:
            code = subprocess.call(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=arguments.timeout_s
            )
        except subprocess.TimeoutExpired:
            code = f"not finished after {arguments.timeout_s:g} s"
    if code:
        return {"failed": f"{code}\n{log.read_text(errors='replace')[-6000:]}"}
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/step_s" in row][WARM_UP:]
    return summary(save, rows) | {"job_s": round(time.time() - started, 1), "steps": len(rows)}


def summary(save: Path, rows: list[dict]) -> dict:
    """Return the medians of COLUMNS over the steps, the rewards' standard deviation and the names of missing
    metrics, or {"failed": reason}."""
    deviation = reward_std(save / "rollouts", [row["step"] for row in rows])
    if deviation == 0:
        return {
            "failed": "reward_std is 0. Rewards must differ within groups, as those of "
            "permuted_reward.py:by_text do: without advantages the output layer skips its backward pass, and "
            "updates look too fast."
        }
    missing = [key for key in COLUMNS.values() if not all(key in row for row in rows)]
    missing += ["reward_std"] if deviation is None else []
    medians = {
        name: round(median(row[key] for row in rows), 6)
        for name, key in COLUMNS.items()
        if key not in missing
    }
    found = {} if deviation is None else {"reward_std": deviation}
    return medians | found | ({"missing": missing} if missing else {})


def reward_std(rollouts: Path, steps: list[int]) -> float | None:
    """Return the mean standard deviation of rewards within the groups that these steps have logged, or None
    if no group has two rewards, as with --num-rollouts-to-log 0."""
    groups = defaultdict(list)
    for step in steps:
        file = rollouts / f"step_{step:06d}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            sample = json.loads(line)
            if sample["reward"] is not None:
                groups[step, sample["row"]].append(sample["reward"])
    deviations = [stdev(rewards) for rewards in groups.values() if len(rewards) > 1]
    return round(mean(deviations), 6) if deviations else None


if __name__ == "__main__":
    sys.exit(main())
