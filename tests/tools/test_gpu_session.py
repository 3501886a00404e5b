"""tools/gpu_session.sh installs what is missing, runs parts within their limits and records how each ended.
pip, pytest, the quickstart, the benchmarks and compute-sanitizer are stand-ins.

pytest tests/tools/test_gpu_session.py"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu_session.sh"
PYTHON = f"""#!/usr/bin/env bash
# What is there is said by files in $MACHINE: gpu, megarl and vllm; `broken` makes pip fail, and pytest.log is
# what pytest says. The rest is Python.
has() {{ [ -e "$MACHINE/$1" ]; }}
case "$*" in
  *"pip install"*--target*)
    while [ "$1" != --target ]; do shift; done
    echo "${{*:3}}" >> "$MACHINE/calls"
    mkdir -p "$2"
    ! has broken || {{ touch "$2/half"; exit 1; }}
    touch "$2/whole" ;;
  *"pip install"*) echo build >> "$MACHINE/calls"; touch "$MACHINE/megarl" ;;
  *"-m pytest"*)
    printf '%s\\n' "$@" > "$MACHINE/pytest.args"
    echo "no cache: ${{PYTORCH_NO_CUDA_MEMORY_CACHING:-}}" >> "$MACHINE/calls"
    cat "$MACHINE/pytest.log" ;;
  "-c import megarl") has megarl ;;
  "-c import importlib.util, sys; "*vllm*) has vllm ;;
  tools/benchmarks/*) echo "$*" >> "$MACHINE/calls" ;;
  -) has gpu && echo '{{"gpus": ["H100"]}}' || echo '{{"gpus": []}}' ;;
  *) exec {shlex.quote(sys.executable)} "$@" ;;
esac
"""
SANITIZER = """#!/usr/bin/env bash
shift 4 # --error-exitcode and --target-processes
"$@"
[ -e "$MACHINE/out_of_bounds" ] && errors=3 || errors=0
echo "========= ERROR SUMMARY: $errors errors"
[ "$errors" = 0 ] || exit 9
"""
QUICKSTART = """
import os, sys
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
(out / "grpo" / "hf").mkdir(parents=True)
(out / "grpo" / "hf" / "model.safetensors").touch()
(out / "grpo" / "metrics.jsonl").write_text("{}")
if Path(os.environ["MACHINE"], "broken").exists():
    sys.exit(1)
(out / "curves.png").touch()
"""
TIMEOUT = """#!/usr/bin/env bash
echo "$3" >> "$MACHINE/timeouts"
"""


@pytest.fixture
def machine(tmp_path):
    """A folder with the script, a wheel, and the stand-ins: a machine with a GPU and megarl."""
    for folder in ("tools", "wheels", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(SCRIPT, tmp_path / "tools")
    (tmp_path / "tools" / "quickstart.py").write_text(QUICKSTART)
    for name in ("wheels/a.whl", "gpu", "megarl"):
        (tmp_path / name).touch()
    (tmp_path / "pytest.log").write_text("==== 8 passed, 1 skipped in 2.50s ====\n")
    add_program(tmp_path, "python", PYTHON)
    add_program(tmp_path, "compute-sanitizer", SANITIZER)
    return tmp_path


def add_program(machine: Path, name: str, text: str) -> None:
    path = machine / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def session(machine: Path, *parts: str, wheels: bool = False) -> dict[str, dict]:
    """Run parts of the session. Returns part -> its record in summary.json, in the order of the parts."""
    variables = {name: value for name, value in os.environ.items() if name != "MEGARL_GPU_REHEARSAL"} | {
        "PYTHON": str(machine / "bin" / "python"),
        "MACHINE": str(machine),
        "PATH": f"{machine}/bin:{os.environ['PATH']}",
    }
    shutil.rmtree(machine / "out", ignore_errors=True)
    script, out = machine / "tools" / "gpu_session.sh", machine / "out"
    done = subprocess.run(
        ["bash", str(script), str(out), str(machine / "wheels") if wheels else "", *parts],
        env=variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((out / "summary.json").read_text())["parts"]


def results(records: dict[str, dict]) -> dict[str, str]:
    return {name: record["result"] for name, record in records.items()}


def test_wheels_are_installed_again_after_an_installation_that_failed(machine):
    site = machine / "build" / "gpu_session_site"
    (machine / "broken").touch()
    assert results(session(machine, "build", wheels=True))["wheels"] == "failed" and not site.exists()
    (machine / "broken").unlink()
    assert results(session(machine, "build", wheels=True))["wheels"] == "passed"
    assert [path.name for path in site.iterdir()] == ["whole"]
    assert "wheels" not in session(machine, "build", wheels=True)
    calls = (machine / "calls").read_text().splitlines()
    assert calls == [f"{machine}/wheels/a.whl", "build"] * 2 + ["build"]


def test_build_runs_first_where_megarl_is_not_installed(machine):
    assert [*session(machine, "bench_step")] == ["bench_step"]
    (machine / "megarl").unlink()
    assert results(session(machine, "bench_step")) == {"build": "passed", "bench_step": "passed"}
    calls = (machine / "calls").read_text().splitlines()
    benchmark = "tools/benchmarks/bench_step.py"
    assert [call.split()[0] for call in calls] == [benchmark, "build", benchmark]
    (machine / "megarl").unlink()
    assert [*results(session(machine, "bench_step", "build"))] == ["build", "bench_step"]


def test_what_would_run_on_the_cpu_is_skipped_without_a_gpu(machine):
    (machine / "gpu").unlink()
    parts = ("tests", "quickstart", "bench_jobs", "bench_kernels", "bench_reshard", "sanitizer", "two_gpus")
    records = session(machine, *parts)
    assert {name: record["says"] for name, record in records.items()} == dict.fromkeys(
        parts, "skipped: PyTorch sees no GPU"
    )
    assert set(results(records).values()) == {"skipped"} and not (machine / "calls").exists()


@pytest.mark.parametrize(
    "log, result",
    [
        ("==== 8 skipped, 3 deselected in 0.25s ====", "skipped"),
        ("8 skipped in 0.25s", "skipped"),
        ("==== 7 passed, 1 skipped in 65.20s (0:01:05) ====", "passed"),
    ],
    ids=["all skipped", "all skipped, quietly", "one skipped"],
)
def test_a_part_is_skipped_if_all_its_tests_are(machine, log, result):
    """In `tests` pytest says so last, in `sanitizer` compute-sanitizer has the last line."""
    (machine / "pytest.log").write_text(f"tests/gpu/test_copier.py::test_copies SKIPPED\n{log}\n")
    records = session(machine, "tests", "sanitizer")
    assert results(records) == {"tests": result, "sanitizer": result}
    assert {record["says"] for record in records.values()} == {log.strip("= ")}


def test_the_sanitizer_sees_each_allocation_of_pytorch_and_its_errors_fail_the_part(machine):
    assert results(session(machine, "sanitizer")) == {"sanitizer": "passed"}
    assert (machine / "calls").read_text() == "no cache: 1\n"
    (machine / "out_of_bounds").touch()
    record = session(machine, "sanitizer")["sanitizer"]
    assert (record["result"], record["exit"], record["says"]) == ("failed", 9, "ERROR SUMMARY: 3 errors")


@pytest.mark.parametrize("fails", [False, True], ids=["it succeeds", "it fails"])
def test_a_quickstart_leaves_its_numbers_and_no_model(machine, fails):
    session(machine, "quickstart")  # an earlier one, whose curves are not those of the next
    if fails:
        (machine / "broken").touch()
    assert results(session(machine, "quickstart")) == {"quickstart": "failed" if fails else "passed"}
    left = {str(path.relative_to(machine / "out")) for path in (machine / "out").rglob("*")}
    curves = set() if fails else {"quickstart.png"}
    assert left == {"machine.log", "summary.json", "quickstart.log", "quickstart.jsonl"} | curves


def test_the_kernels_are_measured_often_enough_for_the_part_s_time(machine):
    """30 repeats, the benchmark's default, took 380 s and compilation on an H100."""
    session(machine, "bench_kernels")
    assert "--repeats 15 " in (machine / "calls").read_text()


def test_limits_are_those_of_the_script_s_head_and_fit_calls_of_ten_minutes(machine):
    add_program(machine, "timeout", TIMEOUT)
    (machine / "vllm").touch()
    promised = {
        name: int(seconds) for name, seconds in re.findall(r"(?m)^#   (\w+) +(\d+)  ", SCRIPT.read_text())
    }
    records = session(machine, wheels=True)
    limits = [int(line) for line in (machine / "timeouts").read_text().splitlines()]
    actual = dict(zip(records, limits, strict=True))
    wheels = actual.pop("wheels")
    assert actual == promised and len(actual) == 10
    assert wheels + actual["build"] + actual["tests"] < 600
    assert actual["bench_step"] + actual["bench_reshard"] < 600 and max(actual.values()) < 600
    assert sum(limits) < 3600


PLUGIN = """
def pytest_collection_finish(session):
    marks = [item.get_closest_marker("timeout") for item in session.items]
    print("longest", max((mark.args[0] for mark in marks if mark), default=0))
"""


def test_all_tests_of_one_gpu_run_and_none_may_take_the_whole_part(machine):
    """No case is left out as nightly: those are for Triton's interpreter."""
    session(machine, "tests")
    (machine / "longest_mark.py").write_text(PLUGIN)
    arguments = (machine / "pytest.args").read_text().splitlines()

    def collect(*arguments: str) -> str:
        command = [
            sys.executable,
            *arguments,
            "--collect-only",
            "-p",
            "longest_mark",
            "-p",
            "no:cacheprovider",
        ]
        variables = {name: value for name, value in os.environ.items() if name != "HOSTCUDA"}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(machine), variables.get("PYTHONPATH")]))
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200, check=True
        )
        return done.stdout

    said = collect(*arguments)
    of_two_gpus = re.search(
        r"(\d+)/\d+ tests collected", collect("-m", "pytest", "-m", "two_gpus", "tests/gpu")
    )
    assert re.search(r"tests collected \((\d+) deselected\)", said)[1] == of_two_gpus[1]
    assert float(re.search(r"(?m)^timeout: ([\d.]+)s", said)[1]) <= 150
    assert int(re.search(r"(?m)^longest (\d+)", said)[1]) <= 150
