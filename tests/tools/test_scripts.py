"""Every script under tools/ and examples/ runs in its smallest form, so that none rots unseen.

A new script belongs in a table here.

pytest tests/tools                 # that none is forgotten
pytest tests/tools -m nightly         # all of them"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = "tools/benchmarks"


@dataclass(frozen=True)
class Case:
    """One way to start a script."""

    script: str
    arguments: str = ""
    """OUT is a new folder, PYTHON the interpreter, QUICKSTART what tools/quickstart.py would have written.

    DATA is the data in it, MODEL its untrained model, BF16_MODEL that model in bf16, CHECKOUT this
    checkout."""
    code: int = 0
    says: str = ""
    """A regular expression for what it prints."""
    json: str | None = None
    """A file that it leaves, with this key in it: "OUT/file.json key"."""


CASES = [
    # The compilation of CUDA: tests/reshard/test_cuda_kernels.py.
    Case("tools/check_cuda.py", "--help", says="Without nvcc the check counts as skipped"),
    Case("tools/code_size.py", "", says=r"this tree: \d+ tokens in \d+ files"),
    Case("tools/compare_metrics.py", "compare OUT OUT", code=1, says="holds no metrics.jsonl"),
    Case(
        f"{BENCH}/bench_episodes.py",
        "--model MODEL --data DATA/train.jsonl --episodes 4 --seats 2 --repeats 1 --json OUT/bench.json",
        says="episodes",
    ),
    Case("tools/draw_docstrings.py", "--count 3", says=r"(?m)^megarl/\S+\.py: \w+: "),
    Case("tools/mutants.py", "--number 3 --list", says=r"(?m)^\+\+\+ (megarl|triton_kernels)/\S+\.py"),
    Case("tools/gpu_session.sh", "OUT '' tests", says=r"tests +exit +0 .* skipped"),
    Case(
        "tools/gpu_session.sh",
        "OUT '' nothing",
        code=2,
        says="PART .nothing. must be one of build tests",
    ),
    # With stand-ins for SLURM, and on two nodes of this machine: tests/tools/test_launch_scripts.py.
    Case("tools/launch/torchrun.sh", "--help", says="usage: tools/launch/torchrun.sh"),
    Case("tools/launch/slurm.sh", "--help", says="usage: sbatch --nodes N"),
    Case("tools/launch/ray_submit.sh", "--help", says="usage: tools/launch/ray_submit.sh"),
    Case("tools/make_random_model.py", "--out OUT/model", json="OUT/model/config.json vocab_size"),
    Case("tools/make_sums.py", "--out OUT/sums --seed 3", says="train.jsonl"),
    Case(
        "tools/make_tiny_model.py",
        "--family mixtral --out OUT/model",
        says="MixtralForCausalLM with .* parameters",
        json="OUT/model/config.json num_local_experts",
    ),
    Case("tools/nightly.py", "--list", says=r"part 0: .*\npart 1: \d+ tests, about"),
    # With a stand-in for nsys: tests/tools/test_nsys_train.py.
    Case("tools/nsys_train.sh", "--help", says="usage: tools/nsys_train.sh"),
    Case(
        "tools/quickstart.py",
        "--small --seed 1 --out OUT/quickstart",
        says="(?s)accuracy, greedy.*curves.png",
    ),
    Case(
        "tools/quickstart.py",
        "--agent --small --seed 1 --out OUT/calculator",
        says="(?s)answers per episode.*after: .*assistant .*curves.png",
    ),
    # At two sizes: tests/tools/test_simulate_scale.py.
    Case("tools/simulate_scale.py", "--help", says="the tree of relays"),
    Case(
        "tools/soak_gate.py",
        "--quickstart QUICKSTART --out OUT/soak --steps 2 --recipes grpo-lr-1e-4 --max-response-length 16",
        says=r"(?m)^\| grpo-lr-1e-4 \| 2 \| .* \| 0 \|$",
    ),
    Case(
        "tools/stress_tests.py",
        "tests/runtime/test_abort.py --runs 1 --conditions quiet delayed --folder OUT/stress",
        says=r"failed, of all runs \| 0 of \d+ \| 0 of 0 \| 0 of 0 \| 0 of \d+",
    ),
    # What it installs, and how that can fail: tests/test_package.py.
    Case("tools/setup_env.py", "--help", says="--device"),
    Case(
        f"{BENCH}/bench_commits.py",
        "CHECKOUT --checkpoint MODEL --data DATA --steps 3 --repeats 1 --out OUT/r --json OUT/out.json",
        says=r"step_s [\d.]+ \(1\.000 of the first",
        json="OUT/out.json repeats",
    ),
    Case(
        f"{BENCH}/bench_executors.py",
        "--checkpoint MODEL --data DATA --turns 2 --steps-per-turn 2 --out OUT/r --json OUT/out.json",
        says=r"(?m)^ray: step_s [\d.]+, [\d.]+ of torchrun",
        json="OUT/out.json seconds_of_turns",
    ),
    Case(
        f"{BENCH}/bench_async.py",
        "--checkpoint MODEL --data DATA --recipes tail --only colocated --settings S=0,S=1-keep --steps 12 "
        "--repeats 1 --out OUT/r --json OUT/out.json",
        says=r"\| tail \| colocated \| S=1-keep \| [\d.]+ \|",
        json="OUT/out.json runs",
    ),
    Case(
        f"{BENCH}/bench_data_plane.py",
        "--samples 64 --length 64 --repeats 1 --exchange-samples 16 --json OUT/out.json",
        json="OUT/out.json exchange",
    ),
    Case(
        f"{BENCH}/bench_e2e.py",
        "--without-trl --steps 3 --repeats 1 --checkpoint MODEL --data DATA --out OUT/r --json OUT/out.json",
        says="seconds per step",
        json="OUT/out.json summary",
    ),
    Case(
        f"{BENCH}/bench_e2e.py",
        "--trl-python PYTHON --out OUT/runs --json OUT/out.json",
        code=1,
        says=r"--trl-python \(.*\): has no trl 1\.16\.0\. Run `.* -m pip install trl==1\.16\.0`",
    ),
    Case(
        f"{BENCH}/bench_jobs.py",
        "--small --train-iters 3 --jobs grpo --json OUT/out.json",
        says=r"(?m)^grpo +step_s [\d.]+, .*mismatch_max",
        json="OUT/out.json jobs",
    ),
    Case(
        f"{BENCH}/bench_kernels.py",
        "--small --repeats 1 --threads 1 --json OUT/out.json",
        says="liger",
        json="OUT/out.json cases",
    ),
    Case(
        f"{BENCH}/bench_step.py",
        "--small --json OUT/out.json",
        says=r"small update: .* ms, .* tokens/s, MFU",
        json="OUT/out.json models",
    ),
    Case(
        f"{BENCH}/bench_reshard.py",
        "--model BF16_MODEL --threads 1 --repeats 1 --json OUT/out.json",
        says="gather",
        json="OUT/out.json ways",
    ),
    Case(
        f"{BENCH}/head_memory.py",
        "--tokens 64 128 --num-hidden 32 --vocab-size 500 --json OUT/out.json",
        says="bytes per token",
    ),
    Case(f"{BENCH}/trl_grpo.py", "a.json b.json", code=1, says="No module named '(datasets|trl)'"),
]
ELSEWHERE = {
    "examples/calculator_agent.py": "tests/e2e/test_agents_job.py",
    "examples/calculator_env.py": "tests/e2e/test_episodes_job.py",
    "examples/own_loop.py": "tests/e2e/test_python_api.py",
    f"{BENCH}/learning_curves.py": "tests/tools/test_learning_curves.py",
    f"{BENCH}/permuted_reward.py": "tests/tools/test_learning_curves.py",
    f"{BENCH}/preference_learning.py": "tests/e2e/test_preference_jobs.py",
    "examples/reasoning_gym_rows.py": "tests/episodes/test_adapters.py",
    "tools/upstream.py": "tests/tools/test_upstream.py",
    "examples/relay_env.py": "tests/e2e/test_shared_episodes_job.py",
    "examples/retry_loop.py": "tests/e2e/test_python_api.py",
    **{
        f"tools/data/{name}.py": "tests/tools/test_data_scripts.py"
        for name in ("dapo_math", "gsm8k", "hendrycks_math", "hh_rlhf", "ultrafeedback")
    },
    "tools/check_kernels.py": "tests/kernels/test_check_kernels.py",
    "tools/kernel_table.py": "tests/kernels/test_kernel_table.py",
    f"{BENCH}/async_plants/sitecustomize.py": "tests/tools/test_async_plants.py",
    "tools/plot_quickstart.py": "tests/tools/test_plot_quickstart.py",
}
"""Script -> the test that runs it."""
IMPORTED = {
    f"{BENCH}/checkout.py": f"{BENCH}/bench_step.py",
    f"{BENCH}/e2e_summary.py": f"{BENCH}/bench_e2e.py",
    f"{BENCH}/head_contenders.py": f"{BENCH}/bench_kernels.py",
    f"{BENCH}/hf_buckets.py": f"{BENCH}/reshard_roles.py",
    f"{BENCH}/measured_process.py": f"{BENCH}/bench_commits.py",
    f"{BENCH}/reshard_roles.py": f"{BENCH}/bench_reshard.py",
    f"{BENCH}/turns.py": f"{BENCH}/bench_kernels.py",
    "tools/kernel_ir.py": "tools/check_kernels.py",
    "tools/planting/after_import.py": f"{BENCH}/async_plants/sitecustomize.py",
    "tools/data/prepare.py": "tools/data/gsm8k.py",
    "examples/sums/files.py": "tools/make_sums.py",
    "examples/sums/model.py": "examples/sums/files.py",
    "examples/sums/problems.py": "examples/sums/files.py",
}
"""Module -> a script of the cases, or another module of this table, that imports it."""


def scripts(*folders: str) -> list[Path]:
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".sh") and path.name != "__init__.py"
    ]


def test_no_script_is_forgotten():
    found = {str(path.relative_to(ROOT)) for path in scripts("tools", "examples")}
    run = {case.script for case in CASES}
    assert found == run | ELSEWHERE.keys() | IMPORTED.keys(), (
        "add new scripts to a table of this file, with their smallest form"
    )
    for script, test in ELSEWHERE.items():
        assert Path(script).stem in (ROOT / test).read_text(), f"{test} does not mention {script} any more"
    for module, script in IMPORTED.items():
        assert script in run | ELSEWHERE.keys() | IMPORTED.keys() and re.search(
            rf"^ *(import|from) (sums\.)?{Path(module).stem}\b", (ROOT / script).read_text(), re.MULTILINE
        ), module


def test_scripts_of_the_tests_are_started_by_tests():
    """What has a `__main__` under tests/ is a process of some test."""
    texts = {path: path.read_text() for path in scripts("tests")}
    words = {path: {*re.findall(r"\w+", text)} for path, text in texts.items()}
    for path, text in texts.items():
        if "\nif __name__ == " in text:
            users = [other for other in texts if other != path and path.stem in words[other]]
            assert users, f"no test starts {path.relative_to(ROOT)}"


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory) -> dict[str, Path]:
    from megarl.convert import main as convert
    from sums.files import make_sums

    folder = tmp_path_factory.mktemp("quickstart")
    data, model = folder / "data", folder / "data" / "model"
    make_sums(data, seed=0)
    (folder / "sft_mixed").mkdir()
    (folder / "sft_mixed" / "hf").symlink_to(model)
    assert convert(["--model", str(model), "--save", str(folder / "bf16"), "--dtype", "bfloat16"]) == 0
    names = {"QUICKSTART": folder, "DATA": data, "MODEL": model, "BF16_MODEL": folder / "bf16"}
    return names | {"PYTHON": Path(sys.executable), "CHECKOUT": ROOT}


def named(case: Case) -> pytest.param:
    marks = [pytest.mark.nightly, pytest.mark.timeout(1200)]
    return pytest.param(case, id=f"{Path(case.script).stem} {case.arguments}"[:60], marks=marks)


@pytest.mark.parametrize("case", map(named, CASES))
def test_the_smallest_form_runs(case, quickstart, tmp_path):
    names = quickstart | {"OUT": tmp_path}
    arguments = re.sub(
        rf"\b({'|'.join(names)})\b", lambda match: shlex.quote(str(names[match[0]])), case.arguments
    )
    start = "bash" if case.script.endswith(".sh") else sys.executable
    done = subprocess.run(
        f"{shlex.join([start, str(ROOT / case.script)])} {arguments}",
        shell=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable, "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1150,
        check=False,
    )
    assert done.returncode == case.code, done.stdout
    assert re.search(case.says, done.stdout), done.stdout
    if case.json:
        file, key = case.json.replace("OUT", str(tmp_path)).split()
        assert json.loads(Path(file).read_text())[key]
