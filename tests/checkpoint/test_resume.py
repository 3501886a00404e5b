"""A job that is interrupted and goes on leaves what one that was not leaves, to the last bit; and what
happens where it cannot.

Supervised fine-tuning on one rank, all jobs in one process (run_resume.py); tests/e2e/test_resume.py does the
same with engines and ranks. Mutations that made these fail: the cursor, or the moments, not restored; rows of
later steps not cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import succeed


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    succeed("-P", Path(__file__).with_name("run_resume.py"), folder, timeout=280, preloaded=True)
    return folder


@pytest.fixture(scope="module")
def report(out: Path) -> dict:
    return json.loads((out / "report.json").read_text())


def rows(run: Path) -> list[dict]:
    """Of metrics.jsonl, without what differs from run to run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("time/", "throughput/", "memory/"))
        }
        for row in lines
    ]


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def weights(run: Path) -> bytes:
    return (run / "hf" / "model.safetensors").read_bytes()


# ------------------------------------------------------------------ going on


def test_a_run_that_goes_on_is_the_one_that_never_stopped(out: Path):
    """From step 3, though the job before had done 5: warm-up, decay, the second pass over the data and the
    weights."""
    assert rows(out / "parts") == rows(out / "whole") and [row["step"] for row in rows(out / "parts")] == [
        *range(1, 9)
    ]
    assert weights(out / "parts") == weights(out / "whole")


def test_fewer_rows_than_a_batch_are_trained_on_again_and_again(out: Path):
    """32 samples of 5 rows are 6 passes and 2 rows of the seventh; and a resumed run makes the same
    visits."""
    few, half = out / "few", out / "few_half"
    assert rows(half) == rows(few)[2:] and weights(half) == weights(few)
    job = json.loads((few / "checkpoints" / "step_000004" / "job.json").read_text())
    cursor = job["actors"][""]["cursor"]
    assert cursor == {"num_rows": 5, "seed": 0, "shuffle": True, "pass": 6, "offset": 2, "visits": 32}
    assert len(rows(few)) == 4


def test_another_run_folder_has_the_later_steps_and_leaves_the_first_as_it_was(out: Path):
    assert rows(out / "elsewhere") == rows(out / "whole")[5:] and weights(out / "elsewhere") == weights(
        out / "whole"
    )
    assert [row["step"] for row in rows(out / "parts_after_5")] == [1, 2, 3, 4, 5]


def test_a_script_that_is_queued_again_begins_and_then_goes_on(out: Path, report):
    assert rows(out / "requeued") == rows(out / "whole")[:4] and checkpoints(out / "requeued") == [
        "step_000002",
        "step_000004",
    ]
    assert "no checkpoint is there yet; begins at step 1" in report["told"]["nothing there"]
    assert (
        f"continues after step 2: {out / 'requeued' / 'checkpoints' / 'step_000002'}; later rows"
        in report["told"]["there now"]
    )


def test_a_job_that_had_only_its_export_left_makes_it(out: Path):
    assert weights(out / "lost") == weights(out / "parts_after_5")


def test_a_job_that_was_over_stays_so(out: Path):
    """It stopped before --train-iters, as its loss was low enough, and was queued again."""
    assert rows(out / "early") == rows(out / "whole")[:6] and checkpoints(out / "early") == [
        "step_000005",
        "step_000006",
    ]


def test_tensorboard_shows_each_step_once(out: Path):
    """Step 4 and 5 are in both event files of the folder, and differ in time only; those of the first job are
    to be forgotten."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "parts" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    shown = events.Scalars("policy/loss")
    assert [event.step for event in shown] == [*range(1, 9)]
    assert [event.value for event in shown] == pytest.approx(
        [row["policy/loss"] for row in rows(out / "whole")], rel=1e-6
    )  # a file of float32
    assert len(list((out / "parts" / "tensorboard").iterdir())) == 2


def test_other_rows_are_an_error_of_the_flags(out: Path, report):
    """So the exit code is 2, and no restart repeats it; the run is not touched."""
    weighted, _, sft = report["other rows"]
    rest = "Give the same files, or start a new run from the exported hf/ folder."
    assert weighted == (
        f"--train-data ({out}/rest.jsonl {out}/five.jsonl): has 35 and 5 rows, and the run that --load "
        f"continues has 5 and 35. {rest}"
    )
    assert (
        sft == f"--sft-data ({out}/five.jsonl): has 5 rows, and the run that --load continues has 7. {rest}"
    )
    assert len(rows(out / "weighted")) == 2


# ------------------------------------------------------------------ which checkpoints there are


def test_the_newest_two_stay_and_nothing_half_written(out: Path):
    assert checkpoints(out / "parts_after_5") == [
        "step_000003",
        "step_000005",
    ]  # every third step, and the last
    assert checkpoints(out / "parts") == [
        "step_000006",
        "step_000008",
    ]  # step 5 of before was in the way, and is gone


def test_the_best_one_stays_too(out: Path):
    losses = {row["step"]: row["policy/loss"] for row in rows(out / "best")}
    assert max(losses, key=losses.get) == 1 and checkpoints(out / "best") == ["step_000001", "step_000006"]


def test_a_best_metric_that_no_step_has_is_told_once(out: Path, report):
    told = report["unknown"]
    assert (
        told.count(
            "--best-metric (eval/reward): step 1 has no such metric, so its checkpoint is not "
            "compared. It has policy/loss"
        )
        == 1
    )


def test_job_json_is_all_there_is_beside_the_roles(out: Path):
    folder = out / "parts" / "checkpoints" / "step_000008"
    assert sorted(path.name for path in folder.iterdir()) == ["actor", "job.json"]
    job = json.loads((folder / "job.json").read_text())
    assert (
        job["step"] == job["weight_version"] == 8
        and job["arguments"] == (out / "parts" / "resolved.args").read_text()
    )
    assert job["actors"][""]["cursor"] == {
        "num_rows": 40,
        "seed": 0,
        "shuffle": True,
        "pass": 1,
        "offset": 24,
        "visits": 64,
    }  # of 40 rows
    assert (
        len(job["random_states"]) == 1
        and job["metrics"]["policy/loss"] == rows(out / "parts")[-1]["policy/loss"]
    )


def test_convert_makes_of_a_role_what_the_job_exported(out: Path, report):
    converted, exported = (
        load_file(out / folder / "model.safetensors") for folder in ("converted", "parts/hf")
    )
    assert report["converted"] == 0 and converted.keys() == exported.keys()
    assert all(torch.equal(converted[name], exported[name]) for name in exported)


# ------------------------------------------------------------------ damage

CAUSES = {
    "truncated": "actor/weights-00000.safetensors is damaged: it has 5000 bytes, and",
    "flipped": "actor/exp_avg-00000.safetensors is damaged: its SHA-256 is not the one that was written.",
    "missing": "actor/exp_avg_sq-00000.safetensors is missing, and",
    "no manifest": "actor/checkpoint.json is missing.",
    "no job": "is not a checkpoint of a job: it has no job.json.",
    "job changed": "job.json is damaged: its digest does not fit its content.",
    "another manifest": "actor/checkpoint.json is damaged: its SHA-256 is not the one that was written.",
}


@pytest.mark.parametrize("what", CAUSES)
def test_a_damaged_checkpoint_is_passed_over_with_its_cause(out: Path, report, what):
    damaged = out / "damaged" / what / "checkpoints" / "step_000005"
    told = report["damaged"][what]["told"].splitlines()
    assert report["damaged"][what]["step"] == 3
    assert (
        told[1].startswith(f"checkpoint {damaged} is passed over: ")
        and f"{damaged}" in told[1].partition("over: ")[2]
        and CAUSES[what] in told[1]
    )
    assert told[2].startswith(f"continues after step 3: {damaged.with_name('step_000003')}")


def test_where_none_is_whole_nothing_is_changed(out: Path, report):
    told = report["damaged"]["all"]["told"]
    assert (
        told.startswith(f"--load ({out / 'damaged' / 'flipped'}): no whole checkpoint is there.")
        and "step_000003/actor/exp_avg" in told
    )
    assert report["damaged"]["all"]["untouched"]


def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over(out: Path, report):
    """The next try may find it whole; a job that went on from step 3 would remove step 5 and its records."""
    told = report["unreadable"]["told"]
    folder = out / "unreadable" / "checkpoints" / "step_000005"
    assert told.startswith("[actor rank 0] damage_of_checkpoint failed")
    assert (
        f"CheckpointIOError: {folder}/actor/" in told
        and "cannot be read: Input/output error. That is no damage" in told
    )
    assert report["unreadable"]["untouched"]


# ------------------------------------------------------------------ writing


def test_training_goes_on_while_the_disk_is_held_up(report):
    """Two whole steps are made between the first write's begin and its end, and the checkpoint has its name
    only after the last."""
    events = report["held up"]
    assert events[:4] == ["step 1", "write begins", "step 2", "step 3"] and events[4] == "write ends"
    assert (
        "visible step_000001" in events[events.index("step 4") :]
        and "visible step_000001" not in events[: events.index("step 4")]
    )


def test_what_was_written_when_the_job_failed_is_a_checkpoint(out: Path, report):
    assert report["failed"] == ["step_000001"]
    assert json.loads((out / "failed" / "checkpoints" / "step_000001" / "job.json").read_text())["step"] == 1


def test_an_attempt_that_was_taken_over_makes_no_checkpoint(out: Path, report):
    told, left = report["superseded"]["told"], report["superseded"]["left"]
    assert len(told) == 2 and left == []
    for text in told:
        assert "attempt 1 must not write the checkpoint of step 1, because attempt 2 on node" in text


def test_a_full_disk_is_told_with_role_rank_and_file_and_leaves_no_rest(out: Path, report):
    told, left = report["disk full"]["told"], report["disk full"]["left"]
    assert told.startswith("[actor rank 0] checkpoint_written failed")
    assert (
        f"{out / 'full' / 'checkpoints'}/.step_000004.attempt_1.partial/.actor.partial/exp_avg-00000.safetensors cannot be written: No space left on device."
        in told
    )
    assert left == ["step_000002"]
