"""`megarl balance` on run folders of the product's own writer, against times computed by hand.

pytest tests/inspect/test_balance.py"""

from __future__ import annotations

import json
import re

import pytest

from tests.config.conftest import MIXTURE, write_model  # noqa: F401

FLAGS = """--algorithm grpo
--kl-mode none
--model none
--train-data none
--train-iters 3
--save unused
"""
SHARED_BY_THREE = "--num-prompts 12\n--num-samples-per-prompt 8\n--global-batch-size 96\n"
"""A batch that one, two, three and four data-parallel ranks can share."""
STEP = {
    "time/rollout_s": 4.0,
    "time/reward_s": 0.5,
    "time/reshard_s": 0.1,
    "time/update_s": 1.0,
    "time/log_probs_s": 0.3,
    "response/length_mean": 100.0,
    "response/length_max": 400.0,
}
"""A step of 6 s: sampling 4, the rule 0.5, weights 0.1, and 1.4 for all else."""


def write_run(open_run, folder, *steps: dict, flags: str = "", step_s: float = 6.0):
    """Write a run with these steps, of which the first does not count, each of `step_s` seconds."""
    with open_run(folder, f"{FLAGS}{flags}") as run:
        for number, metrics in enumerate(steps, start=1):
            run.begin_step()
            run.record_step(number, metrics, num_tokens=10)
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) | {"time/step_s": step_s} for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def table(out: str) -> dict[str, list[float]]:
    """Return layout -> seconds of S = 0, 1, 2 and 4."""
    found = {}
    for line in out.splitlines():
        if line.startswith("  ") and ("colocated on" in line or " sample " in line) and "=" not in line:
            *words, a, b, c, d = line.split()
            if all(value.replace(".", "").isdigit() for value in (a, b, c, d)):
                found[" ".join(words)] = [float(value) for value in (a, b, c, d)]
    return found


def test_a_colocated_run_of_one_rank_may_only_become_stale(open_run, megarl, tmp_path):
    """A response of four times the mean length leaves the engine three quarters empty."""
    slow_start = STEP | {"time/rollout_s": 60.0}
    run = write_run(open_run, tmp_path / "a", slow_start, STEP, STEP, flags="--nproc-per-node 1\n")
    code, out, err = megarl("balance", run)
    assert (code, err) == (0, "")
    # S = 1 samples half as long, S = 2 a third, S = 4 a quarter, that of the mean length. The rule runs beside.
    expected = [6.0, 2.0 + 1.4 + 0.1, 4 / 3 + 1.5, 1.0 + 1.5]
    assert table(out) == {"colocated on 1": pytest.approx(expected, rel=0.005)}
    assert "median of 2 steps: 6 s = rollout 4 + reward 0.5 + weight sync 0.1 + training" in out
    assert "balanced: --staleness 4   2.5 s per step, 2.40 times as fast at most" in out


def test_ranks_of_their_own_are_proposed_where_both_sides_take_equally_long(open_run, megarl, tmp_path):
    """Equal lengths: staleness alone gains nothing. Four ranks sample 1.2 s and train 3.6 s, which is
    balanced by three that train 4.8 s and one that samples 4.8 s."""
    equal = STEP | {"response/length_max": 100.0, "time/rollout_s": 1.2, "time/reward_s": 0.0}
    flags = f"--nproc-per-node 4\n{SHARED_BY_THREE}"
    run = write_run(open_run, tmp_path / "a", equal, equal, flags=flags, step_s=4.9)
    out = megarl("balance", run)[1]
    assert table(out) == {
        "colocated on 4": pytest.approx([4.9] * 4, rel=0.005),
        "1 train, 3 sample": pytest.approx([1.6 + 14.4 + 0.1, 14.5, 14.5, 14.5], rel=0.005),
        "2 train, 2 sample": pytest.approx([2.4 + 7.2 + 0.1, 7.3, 7.3, 7.3], rel=0.005),
        "3 train, 1 sample": pytest.approx([4.8 + 4.8 + 0.1, 4.9, 4.9, 4.9], rel=0.005),
    }
    assert "balanced: --staleness 0   4.9 s per step, 1.00 times" in out
    uneven = equal | {"response/length_max": 200.0}
    run = write_run(open_run, tmp_path / "b", uneven, uneven, flags=flags, step_s=4.9)
    out = megarl("balance", run)[1]
    assert table(out)["3 train, 1 sample"] == pytest.approx([9.7, 4.9, 4.9, 4.9], rel=0.005)
    assert table(out)["colocated on 4"] == pytest.approx([4.9, 4.3, 4.3, 4.3], rel=0.005)
    assert "balanced: --staleness 1   4.3 s per step, 1.14 times" in out


def test_a_disjoint_run_overlaps_both_sides_and_model_parallel_ranks_stay_together(
    open_run, megarl, tmp_path
):
    flags = "--nproc-per-node 6\n--tensor-model-parallel-size 2\n--actor-ranks 0-3\n--rollout-ranks 4-5\n"
    run = write_run(open_run, tmp_path / "a", STEP, STEP, flags=flags + SHARED_BY_THREE)
    out = megarl("balance", run)[1]
    assert "4 ranks train, 2 sample (ranks of their own); responses: mean 100 tokens" in out
    assert [*table(out)] == ["colocated on 6", "4 train, 2 sample", "2 train, 4 sample"]
    # The longest response needs a half, a third, a fifth of 4 s, and all responses a quarter of it.
    assert table(out)["4 train, 2 sample"] == pytest.approx([6.0, 2.1, 1.5, 1.5], rel=0.005)
    assert "balanced: --actor-ranks 0-3 --rollout-ranks 4-5 --staleness 2   1.5 s" in out
    assert "  of that sampling 1.33 s beside training 1.4 s" in out


def test_a_slow_rule_bounds_a_step(open_run, megarl, tmp_path):
    slow = STEP | {"time/reward_s": 5.0}
    run = write_run(open_run, tmp_path / "a", slow, slow, flags="--nproc-per-node 1\n", step_s=10.5)
    assert table(megarl("balance", run)[1])["colocated on 1"] == [10.5, 5.0, 5.0, 5.0]


def test_world_size_is_that_of_torchrun(open_run, megarl, tmp_path):
    run = write_run(open_run, tmp_path / "a", STEP, STEP, flags="--nproc-per-node 1\n")
    assert [*table(megarl("balance", run, "--world-size", 2)[1])] == ["colocated on 2", "1 train, 1 sample"]


def test_world_size_of_a_ray_job_is_that_of_all_its_nodes(open_run, megarl, tmp_path):
    """With one node's ranks the tensor-parallel size would not even fit."""
    flags = "--executor ray\n--nnodes 2\n--nproc-per-node 2\n--tensor-model-parallel-size 4\n"
    run = write_run(open_run, tmp_path / "a", STEP, STEP, flags=flags)
    code, out, err = megarl("balance", run)
    assert (code, err) == (0, "") and "4 ranks train, 4 sample (the same ranks)" in out
    assert [*table(out)] == ["colocated on 4"]


def test_a_world_size_that_the_run_cannot_have_had(open_run, megarl, tmp_path):
    run = write_run(open_run, tmp_path / "a", STEP, STEP, flags="--tensor-model-parallel-size 2\n")
    code, out, err = megarl("balance", run, "--world-size", 3)
    rule = "--world-size (3): must be the number of ranks of the run, whose layout it does not fit: "
    assert (code, out) == (2, "") and rule in err


@pytest.mark.parametrize(
    "flags, places",
    [
        # three ranks cannot share 64 samples equally
        (
            "--num-prompts 8\n--num-samples-per-prompt 8\n--global-batch-size 64\n",
            ["colocated on 4", "2 train, 2 sample", "1 train, 3 sample"],
        ),
        (
            f"{SHARED_BY_THREE}--expert-model-parallel-size 2\n",
            ["colocated on 4", "2 train, 2 sample"],
        ),
        # vLLM runs in the workers of all ranks only
        (f"{SHARED_BY_THREE}--rollout-engine in-process\n", ["colocated on 4"]),
    ],
    ids=["batch", "experts", "engine"],
)
def test_only_layouts_are_proposed_that_a_check_accepts(
    open_run,
    megarl,
    tmp_path,
    write_model,  # noqa: F811
    flags,
    places,
):
    """Three ranks that train and one that samples would balance 4.5 s of training and 1.5 s of sampling."""
    equal = STEP | {"response/length_max": 100.0, "time/rollout_s": 1.5, "time/reward_s": 0.0}
    flags = f"--nproc-per-node 4\n{flags}"
    run = write_run(open_run, tmp_path / "a", equal, equal, flags=flags, step_s=6.1)
    args = run / "resolved.args"
    args.write_text(args.read_text().replace("--model none", f"--model {write_model(MIXTURE)}"))
    out = megarl("balance", run)[1]
    assert [*table(out)] == places
    proposed = re.search(r"balanced: (.*?)   ", out)[1].split()
    _, _, of_run = megarl("check", f"@{args}")
    code, _, err = megarl("check", f"@{args}", *proposed)
    assert code == 2 and err == of_run  # both name the missing data only


def test_a_staleness_that_the_flags_exclude_is_left_out(open_run, megarl, tmp_path):
    run = write_run(open_run, tmp_path / "a", STEP, STEP, flags="--nproc-per-node 1\n--dynamic-sampling\n")
    out = megarl("balance", run)[1].splitlines()
    (row,) = [line.split() for line in out if line.startswith("  colocated on 1")]
    assert row == ["colocated", "on", "1", "6", "-", "-", "-"]
    assert "-: the run's other flags do not allow it" in out and "balanced: --staleness 0   6 s" in out[-1]


def test_a_run_on_ranks_of_their_own_may_become_colocated(open_run, megarl, tmp_path):
    """Training of 4.9 s on one of two ranks takes half as long on both. The flags name the ranks, as those of
    the run are others."""
    step = STEP | {"time/reward_s": 0.0, "time/rollout_s": 1.0}
    flags = "--nproc-per-node 2\n--actor-ranks 0\n--rollout-ranks 1\n"
    run = write_run(open_run, tmp_path / "a", step, step, flags=flags)
    out = megarl("balance", run)[1]
    expected = [1 + 2.45 + 0.1, 1 / 2 + 2.45 + 0.1, 1 / 3 + 2.45 + 0.1, 1 / 4 + 2.45 + 0.1]
    assert table(out)["colocated on 2"] == pytest.approx(expected, rel=0.005)
    assert "balanced: --actor-ranks 0-1 --rollout-ranks 0-1 --staleness " in out


@pytest.mark.parametrize(
    "flags, steps, error",
    [
        (
            "--staleness 1\n",
            2,
            "has --staleness 1, so its time/rollout_s is the time that steps waited, not that of the sampling. "
            "Give a run with --staleness 0; a few steps are enough.",
        ),
        ("--num-actors 2\n", 2, "has several actors, whose phases overlap. Give a run with --num-actors 1."),
        ("", 1, "metrics.jsonl has 1 steps, and 2 steps with time/step_s, "),
        ("", 0, "metrics.jsonl has no time/step_s, and 2 steps with time/step_s, "),
    ],
)
def test_a_run_that_cannot_say_it(open_run, megarl, tmp_path, flags, steps, error):
    run = write_run(open_run, tmp_path / "a", *[STEP] * steps, flags=f"--nproc-per-node 1\n{flags}")
    code, out, err = megarl("balance", run)
    assert (code, out) == (2, "") and f"RUN ({run}): {error}" in err


def test_a_run_of_fine_tuning_samples_nothing(open_run, megarl, tmp_path):
    run = write_run(open_run, tmp_path / "a", STEP, STEP)
    arguments = run / "resolved.args"
    arguments.write_text("--algorithm sft\n--model none\n--train-data none\n--train-iters 3\n--save unused\n")
    assert "has --algorithm sft, which samples nothing" in megarl("balance", run)[2]
    arguments.unlink()
    assert f"RUN ({run}): holds no resolved.args." in megarl("balance", run)[2]
    assert "there is no such folder" in megarl("balance", tmp_path / "b")[2]
