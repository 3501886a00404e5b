"""The peak of the plan is the sum that `megarl check` prints: a PPO job with evaluations, a checkpoint and a
resumption on a simulated GPU that holds exactly as much (run_simulated_gpu.py).

pytest tests/e2e/test_kv_cache_job.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.checks.memory import PHASES
from tests.e2e.run_simulated_gpu import PHASE
from tests.launch import succeed


HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("simulated_gpu")


def run(how: str, data: Path, folder: Path) -> dict:
    arguments = (data / "model", f"{HERE / 'reward.py'}:lower_case", data / "train.jsonl")
    succeed(HERE / "run_simulated_gpu.py", how, folder, *arguments, timeout=240, preloaded=True)
    return json.loads((folder / f"{how}.json").read_text())


@pytest.fixture(scope="module")
def report(sums_data, folder) -> dict:
    return run("with", sums_data, folder)


@pytest.mark.parametrize("run", ("events", "resumed"))
def test_each_phase_needs_what_the_table_says(report, run):
    held = {phase: 0 for phase in PHASES}
    for call, _, num_bytes, _, _ in report[run]:
        if (method := call.rpartition(".")[2]) in PHASE:
            held[PHASE[method]] = max(held[PHASE[method]], num_bytes)
    assert held == report["table"]
    assert max(num_bytes for _, _, num_bytes, _, _ in report[run]) == report["capacity"]


@pytest.mark.parametrize("run", ("events", "resumed"))
def test_the_cache_is_on_the_device_while_it_is_sampled_from_only(report, run):
    """Each call at its begin and at its end, evaluations and checkpoints included."""
    events = [(call, cache) for call, _, _, cache, _ in report[run] if call.rpartition(".")[2]]
    calls = {call for call, _ in events}
    assert {"rollout.generate", "actor.update", "critic.update", "rollout.sync"} <= calls
    assert ("actor.load_checkpoint" if run == "resumed" else "actor.begin_checkpoint") in calls
    for call, cache in events:
        assert (cache > 0) == (call == "rollout.generate"), call


@pytest.mark.nightly
def test_one_byte_less_is_too_little_and_training_is_the_same_to_the_bit(sums_data, report, folder):
    """Two steps and a resumed third one, against three steps without a GPU."""
    without = run("without", sums_data, folder)
    assert f"{report['capacity']} bytes are held of {report['capacity'] - 1}" in without["one_byte_less"]

    def rows(run: str) -> list[dict]:
        lines = (folder / run / "metrics.jsonl").read_text().splitlines()
        kept = ("policy/", "critic/", "reward/", "response/", "kl/", "eval/")
        return [{k: v for k, v in json.loads(line).items() if k.startswith(kept)} for line in lines]

    plain = [row for row in rows("plain") if "reward/mean" in row]
    ours = [row for run in ("released", "resumed") for row in rows(run) if "reward/mean" in row]
    assert len(plain) == 3 and ours == plain
