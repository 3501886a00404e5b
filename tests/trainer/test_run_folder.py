"""The run folder is read back with readers that are not ours: json (strict), TensorBoard's event
accumulator."""

import contextlib
import errno
import json
import math
import pickle
import re
import resource
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.checkpoint.manifest import Manifest
from megarl.checkpoint.tensor_file import Entry, write_tensors
from megarl.config.schema import CheckpointConfig
from megarl.files.checkpoints import write_job
from megarl.config.schema import BatchConfig, DataConfig, ModelConfig, RunConfig, TrainConfig
from megarl.files.writing import ReadError, WriteError
from megarl.trainer.step_report import phase_times
from megarl.loggers.console import Progress
from megarl.rollout.replay_log import ReplayLog
from megarl.trainer.checkpointer import Checkpointer
from megarl.trainer.run_folder import Run, check_folder_is_free
from megarl.trainer.stop_request import StopRequest
from megarl.batch import Batch
from megarl.loggers.json_lines import cut_after, to_json_line
from megarl.trainer.timeline import Record, Timeline
from megarl.reshard.export_folder import save_tensors
from megarl.workers.stored_log_probs import StoredLogProbs
from tests.tensorboard_files import number_files_alike
from tests.workers.test_request_stream import Stream, answers


def config(folder) -> TrainConfig:
    return TrainConfig(
        algorithm=None,
        model=ModelConfig(model="none"),
        batch=BatchConfig(train_iters=3),
        data=DataConfig(train_data=("none",)),
        run=RunConfig(save=str(folder)),
    )


def open_run(folder) -> Run:
    return Run(config(folder), "--train-iters 3\n", Progress(3, StringIO()))


def strict(line: str) -> dict:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_everything_recorded_can_be_read_back(tmp_path):
    rows = [
        {"sample_id": 1, "prompt": "2+2=", "response": "vier ü\n4", "reward": 1.0},
        {"sample_id": 2, "reward": None},
    ]
    with open_run(tmp_path / "run") as run:
        run.record_evaluation(0, {"eval/reward": 0.25})
        run.begin_step()
        run.write_rollouts(1, rows)
        time.sleep(0.05)
        run.record_step(
            1, {"reward/mean": 0.5, "policy/loss": math.nan, "policy/grad_norm": math.inf}, num_tokens=1000
        )
        run.record_evaluation(1, {"eval/reward": 0.75}, {"eval/reward": rows[0]})
        run.begin_step()
        run.write_rollouts(2, [])
        run.record_step(2, {"reward/mean": 1.0}, num_tokens=1000)
    assert (run.folder / "resolved.args").read_text() == "--train-iters 3\n"

    lines = [strict(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]  # one object per step, its evaluation in it
    assert lines[0] == {"step": 0, "eval/reward": 0.25}
    assert (
        lines[1]["reward/mean"] == 0.5 and lines[1]["eval/reward"] == 0.75 and "eval/reward" not in lines[2]
    )
    assert lines[1]["policy/loss"] is None and lines[1]["policy/grad_norm"] is None
    assert lines[1]["nonfinite"] == {"policy/loss": "nan", "policy/grad_norm": "inf"}
    assert lines[1]["time/step_s"] >= 0.05
    assert lines[1]["throughput/tokens_per_s"] == pytest.approx(1000 / lines[1]["time/step_s"])

    assert [
        strict(line) for line in (run.folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ] == rows
    assert strict((run.folder / "rollouts" / "eval.jsonl").read_text()) == {
        "step": 1,
        "name": "eval/reward",
        **rows[0],
    }
    assert sorted(p.name for p in (run.folder / "rollouts").iterdir()) == ["eval.jsonl", "step_000001.jsonl"]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert scalars["reward/mean"] == [(1, 0.5), (2, 1.0)]
    assert scalars["eval/reward"] == [(0, 0.25), (1, 0.75)]
    assert math.isnan(scalars["policy/loss"][0][1]) and "step" not in scalars


def test_a_finished_step_is_on_disk_when_the_next_begins(tmp_path):
    with open_run(tmp_path / "run") as run:
        run.begin_step()
        run.record_step(1, {"reward/mean": 0.5}, num_tokens=10)
        run.begin_step()
        assert (
            strict((run.folder / "metrics.jsonl").read_text())["step"] == 1
        )  # through another handle: it was flushed


def test_scores_of_a_second_evaluation_go_to_the_same_row(tmp_path):
    with open_run(tmp_path / "run") as run:
        for step in (1, 2):
            run.begin_step()
            run.record_step(step, {"reward/mean": 0.5}, num_tokens=1)
            run.record_evaluation(step, {"eval/reward": 0.25})
            run.record_evaluation(step, {"eval/reward": 0.75, "eval/more": 1.0})
    rows = [strict(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["reward/mean"], row["eval/reward"], row["eval/more"]) for row in rows] == [
        (1, 0.5, 0.75, 1.0),
        (2, 0.5, 0.75, 1.0),
    ]


def test_scores_of_a_late_evaluation_go_to_the_row_of_its_step(tmp_path):
    with open_run(tmp_path / "run") as run:
        for step in (1, 2, 3):
            run.begin_step()
            run.record_step(step, {"reward/mean": 0.5 * step, "policy/loss": math.nan}, num_tokens=1)
        run.record_evaluation(2, {"eval/reward": 0.2})
        run.begin_step()
        run.record_evaluation(0, {"eval/reward": 0.0})
        assert run.row_of(3)["reward/mean"] == 1.5 and "eval/reward" not in run.row_of(3)
        run.record_evaluation(1, {"eval/reward": 0.1})
        run.record_step(4, {"reward/mean": 2.0}, num_tokens=1)
        run.record_evaluation(3, {"eval/reward": 0.3})
        run.record_evaluation(4, {"eval/reward": 0.4})
    rows = [strict(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row.get("reward/mean"), row["eval/reward"]) for row in rows] == [
        (0, None, 0.0),
        (1, 0.5, 0.1),
        (2, 1.0, 0.2),
        (3, 1.5, 0.3),
        (4, 2.0, 0.4),
    ]
    assert [row.get("nonfinite") for row in rows] == [None, *[{"policy/loss": "nan"}] * 3, None]


@pytest.mark.parametrize("mark", ["resolved.args", "metrics.jsonl", "checkpoints/step_000010/job.json"])
def test_a_folder_that_holds_a_run_is_refused_with_a_name_that_works(tmp_path, mark):
    folder = tmp_path / "run"
    (folder / mark).parent.mkdir(parents=True)
    (tmp_path / "run-2").mkdir()
    (folder / mark).write_text("precious")
    with pytest.raises(ValueError, match=r"--save .* already holds a run.* Try --save (.*)\.$") as refused:
        Run(config(folder), "other")
    files = [(str(p.relative_to(folder)), p.read_text()) for p in folder.rglob("*") if p.is_file()]
    assert files == [(mark, "precious")]  # nothing overwritten, nothing added
    suggested = str(refused.value).split("Try --save ")[1].rstrip(".")
    assert suggested == str(tmp_path / "run-3")
    open_run(suggested).close()


def test_checking_a_folder_creates_nothing(tmp_path):
    check_folder_is_free(str(tmp_path / "new" / "run"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--save .*file\) is a file"):
        check_folder_is_free(str(tmp_path / "file"))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_error_of_the_background_thread_surfaces(tmp_path):
    run = open_run(tmp_path / "run")
    (run.folder / "rollouts").rename(run.folder / "moved")
    with pytest.raises(WriteError, match="step_000001.jsonl cannot be written: No such file"):
        run.begin_step()
        run.write_rollouts(1, [{"sample_id": 1}])
        deadline = time.time() + 10
        while time.time() < deadline:  # at the next call once the write was tried
            run.record_evaluation(1, {}, {"eval/reward": {}})
            time.sleep(0.01)
    (run.folder / "moved").rename(run.folder / "rollouts")
    run.close()


def test_to_json_line_keeps_integers_and_every_name():
    assert strict(to_json_line({"step": 3, "a": -math.inf, "b": 1e-30})) == {
        "step": 3,
        "a": None,
        "b": 1e-30,
        "nonfinite": {"a": "-inf"},
    }


def test_phase_times_sum_to_what_the_calls_took():
    calls = {
        ("rollout", "generate"): 1.0,
        ("actor", "update"): 2.0,
        ("rollout", "sync"): 0.25,
        ("actor", "receive"): 0.125,
        ("actor", "advantages"): 0.5,
    }
    times = phase_times(calls)
    assert times == {
        "time/rollout_s": 1.0,
        "time/update_s": 2.0,
        "time/reshard_s": 0.25,
        "time/other_s": 0.625,
    }


# ------------------------------------------------------------------ a run that goes on in its own folder


def going_on(folder) -> TrainConfig:
    return replace(config(folder), checkpoint=CheckpointConfig(load=str(folder)))


def make_run(folder) -> None:
    with open_run(folder) as run:
        run.record_evaluation(0, {"eval/reward": 0.0})
        for step in (1, 2, 3):
            run.begin_step()
            run.write_rollouts(step, [{"sample_id": step}])
            run.record_step(step, {"reward/mean": float(step)}, num_tokens=1)
            answer = {"eval/reward": {"response": str(step)}}
            run.record_evaluation(step, {"eval/reward": 0.1 * step}, answer)


def test_later_steps_are_forgotten_and_recorded_again(tmp_path):
    folder = tmp_path / "run"
    make_run(folder)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "reward/mean": 9')  # a job was killed while it wrote
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with Run(going_on(folder), "--train-iters 4\n", Progress(3, StringIO())) as run:
        assert {
            path: path.read_bytes() for path in folder.rglob("*") if path.is_file()
        } == before  # what goes on is not known yet
        run.go_on_after(2)
        assert sorted(path.name for path in (folder / "rollouts").iterdir()) == [
            "eval.jsonl",
            "step_000001.jsonl",
            "step_000002.jsonl",
        ]
        run.begin_step()
        run.record_step(3, {"reward/mean": 33.0}, num_tokens=1)
        assert run.row_of(3)["reward/mean"] == 33.0 and run.row_of(2) == {}
    rows = [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row.get("reward/mean")) for row in rows] == [
        (0, None),
        (1, 1.0),
        (2, 2.0),
        (3, 33.0),
    ]
    assert [
        strict(line)["step"] for line in (folder / "rollouts" / "eval.jsonl").read_text().splitlines()
    ] == [1, 2]
    assert (folder / "resolved.args").read_text() == "--train-iters 4\n"


def test_a_step_that_was_not_evaluated_any_more_gets_its_scores_later(tmp_path):
    """SIGTERM came between the end of the step and that of its evaluation."""
    folder = tmp_path / "run"
    with open_run(folder) as run:
        for step in (1, 2):
            run.begin_step()
            run.record_step(step, {"reward/mean": 0.5, "policy/loss": math.nan}, num_tokens=1)
    before = [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with Run(going_on(folder), "", Progress(3, StringIO())) as run:
        run.go_on_after(2)
        run.record_evaluation(2, {"eval/reward": 0.75})
        run.begin_step()
        run.record_step(3, {"reward/mean": 1.0}, num_tokens=1)
    rows = [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[:2] == [before[0], before[1] | {"eval/reward": 0.75}] and [row["step"] for row in rows] == [
        1,
        2,
        3,
    ]


def test_a_run_without_a_checkpoint_begins_anew_in_its_folder(tmp_path):
    make_run(tmp_path / "run")
    with Run(going_on(tmp_path / "run"), "", Progress(3, StringIO())) as run:
        run.go_on_after(None)
        run.record_evaluation(0, {"eval/reward": 0.5})
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 0, "eval/reward": 0.5}\n'
    assert [path.name for path in (tmp_path / "run" / "rollouts").iterdir()] == ["eval.jsonl"]


def test_a_checkpoint_before_the_first_step_keeps_its_evaluation(tmp_path, monkeypatch):
    """A loop of one's own made it: evaluate(), then save_checkpoint(). No later job evaluates again."""
    number_files_alike(monkeypatch)
    folder = tmp_path / "run"
    make_run(folder)
    with Run(going_on(folder), "", Progress(3, StringIO())) as run:
        run.go_on_after(0)
    assert (folder / "metrics.jsonl").read_text() == '{"step": 0, "eval/reward": 0.0}\n'
    assert (folder / "rollouts" / "eval.jsonl").read_text() == ""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Run(going_on(folder), "", Progress(3, StringIO())) as run:
        run.go_on_after(0)
        run.begin_step()
        run.record_step(1, {"reward/mean": 5.0}, num_tokens=1)
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/reward")] == [(0, 0.0)]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 5.0)]


def test_an_evaluation_that_a_resume_made_up_for_is_not_made_again(tmp_path):
    """SIGTERM ended the evaluation of step 2, so its checkpoint has none; the next job made up for it, and
    ended before the next checkpoint."""
    folder, answers = tmp_path / "run", {"eval/reward": {"response": "7"}}
    with open_run(folder) as run:
        run.record_step(2, {"reward/mean": 0.5}, num_tokens=1)
    (checkpoint := folder / "checkpoints" / "step_000002").mkdir(parents=True)
    write_job(checkpoint, {"roles": {}, "metrics": {"reward/mean": 0.5}})
    made = []
    for _ in range(3):
        with Run(going_on(folder), "", Progress(3, StringIO())) as run:
            executor = SimpleNamespace(ranks={"actor": (0,)})
            checkpointer = Checkpointer(going_on(folder), executor, {}, None, run, StopRequest())
            checkpointer.restored_metrics = {"reward/mean": 0.5}  # of job.json
            checkpointer._go_on(2, checkpoint)
            made.append(not checkpointer.is_evaluated)
            if made[-1]:
                run.record_evaluation(2, {"eval/reward": 0.75}, answers)
    assert made == [True, False, False]
    assert [
        strict(line)["step"] for line in (folder / "rollouts" / "eval.jsonl").read_text().splitlines()
    ] == [2]


@pytest.mark.parametrize("best", [None, "eval/reward"])
def test_an_older_checkpoint_that_cannot_be_read_matters_only_to_the_best_metric(tmp_path, best):
    folder = tmp_path / "run"
    with Run(going_on(folder), "", Progress(3, StringIO())) as run:
        run.go_on_after(0)
        of = {step: folder / "checkpoints" / f"step_{step:06d}" for step in (10, 20, 30)}
        for step, path in of.items():
            path.mkdir(parents=True)
            write_job(path, {"roles": {}, "metrics": {"eval/reward": float(step)}})
        (of[10] / "job.json").unlink()
        (of[10] / "job.json").symlink_to("job.json")  # reading it is an error: too many levels of links
        job = going_on(folder)
        job = replace(job, checkpoint=replace(job.checkpoint, best_metric=best))
        executor = SimpleNamespace(ranks={"actor": (0,)})
        checkpointer = Checkpointer(job, executor, {}, None, run, StopRequest())
        if best:
            with pytest.raises(ReadError, match="step_000010/job.json cannot be read"):
                checkpointer._go_on(20, of[20])
            assert of[30].exists()
        else:
            checkpointer._go_on(20, of[20])
            assert not of[30].exists()


def test_a_folder_that_a_job_is_writing_to_is_refused(tmp_path):
    folder = tmp_path / "run"
    with (
        open_run(folder),
        pytest.raises(
            ValueError,
            match=f"--save \\({folder}\\): another job is running there. Wait for its end, or try --save",
        ),
    ):
        Run(going_on(folder), "", Progress(3, StringIO()))
    Run(going_on(folder), "", Progress(3, StringIO())).close()


def test_of_two_jobs_that_begin_in_a_folder_at_once_the_second_changes_nothing(tmp_path):
    """The command of a queue, started twice: --load and --save name a folder that is not there yet."""
    folder = tmp_path / "run"
    first, second = (Run(going_on(folder), "", Progress(3, StringIO())) for _ in range(2))
    with first:
        first.go_on_after(0)
        first.record_evaluation(0, {"eval/reward": 0.5})
        with pytest.raises(ValueError, match="another job is running there"):
            second.go_on_after(0)
        second.close()
        assert first.attempt.is_current()
        first.record_evaluation(1, {"eval/reward": 0.75})
    rows = [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 0, "eval/reward": 0.5}, {"step": 1, "eval/reward": 0.75}]


def test_a_second_try_begins_with_new_logs_of_its_engines(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError), open_run(folder):
        ReplayLog(folder, "driver", 0).close()
        raise RuntimeError
    assert [path.name for path in (folder / "engines").iterdir()] == ["driver.jsonl"]
    with open_run(folder):
        assert not list((folder / "engines").iterdir())


def test_the_best_checkpoint_is_found_by_scores_that_came_after_it(tmp_path):
    """The evaluation of step 20 ended with the job, and the next one made up for it."""
    folder, scores = tmp_path / "run", {10: 0.5, 20: None, 30: 0.6}
    chosen = CheckpointConfig(load=str(folder), keep=1, best_metric="eval/reward", best_metric_mode="max")
    with Run(going_on(folder), "", Progress(3, StringIO())) as run:
        run.go_on_after(0)
        executor = SimpleNamespace(ranks={"actor": (0,)})
        job = replace(config(folder), checkpoint=chosen)
        checkpointer = Checkpointer(job, executor, {}, None, run, StopRequest())
        for step, score in scores.items():
            saved = {} if score is None else {"eval/reward": score}
            (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
            write_job(folder / "checkpoints" / f"step_{step:06d}", {"roles": {}, "metrics": saved})
            run.record_evaluation(step, saved)
        run.record_evaluation(20, {"eval/reward": 0.9})
        checkpointer._prune()
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == ["step_000020", "step_000030"]


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize("there", ([], ["run"], ["run", "run/mine.log"]), ids=str)
def test_a_failure_before_anything_was_recorded_leaves_what_was_there(tmp_path, there):
    """The same command can be tried again."""
    for name in there:
        (tmp_path / name).mkdir() if name == "run" else (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no engine"), open_run(tmp_path / "run") as run:
            run.begin_step()
            raise RuntimeError("no engine")
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(RuntimeError), open_run(tmp_path / "a" / "b" / "run"):
        raise RuntimeError
    assert sorted(tmp_path.rglob("*")) == before


def test_what_was_recorded_stays_after_a_failure(tmp_path):
    for name, record in (
        ("row", lambda run: run.record_evaluation(0, {"eval/reward": 0.5})),
        ("rollouts", lambda run: run.write_rollouts(1, [{"id": 1}])),
    ):
        with pytest.raises(RuntimeError), open_run(tmp_path / name) as run:
            record(run)
            raise RuntimeError
        assert (tmp_path / name / "resolved.args").exists() and list(
            (tmp_path / name / "tensorboard").iterdir()
        )
    with pytest.raises(ValueError, match="already holds a run"):
        open_run(tmp_path / "row")


def test_a_run_that_goes_on_is_never_removed(tmp_path):
    open_run(tmp_path / "run").close()
    with pytest.raises(RuntimeError), Run(going_on(tmp_path / "run"), "", Progress(3, StringIO())) as run:
        run.go_on_after(0)
        raise RuntimeError
    assert (tmp_path / "run" / "resolved.args").exists()


@contextlib.contextmanager
def largest_file(num_bytes: int):
    """Files end there, as on a full disk, but for the error's number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LONG = {f"metric_{i}": 1.0 for i in range(2000)}
# file -> what writes more than 20 kB into it
WRITES = {
    "metrics.jsonl": lambda run: run.record_evaluation(1, LONG),
    "rollouts/step_000001.jsonl": lambda run: run.write_rollouts(1, [LONG]),
    "rollouts/eval.jsonl": lambda run: run.record_evaluation(1, {}, {"eval/reward": LONG}),
    "timeline.json": lambda run: timeline().write(run.folder / "timeline.json"),
    "job.json": lambda run: write_job(run.folder, LONG),
    "checkpoint.json": lambda run: Manifest(state=LONG).write(run.folder),
    "weights.safetensors": lambda run: write_tensors(
        run.folder / "weights.safetensors", [Entry("x", torch.float32, (9000,), lambda: [torch.zeros(9000)])]
    ),
    "model.safetensors": lambda run: save_tensors({"x": torch.zeros(9000)}, run.folder / "model.safetensors"),
    "requests/rollout": lambda run: save_requests(run.folder / "requests" / "rollout"),
    "moved": lambda run: give_up_requests(run.folder / "moved"),
    "ref_log_probs/": lambda run: store_log_probs(run.folder / "ref_log_probs"),
}


def many_requests(folder: Path) -> Stream:
    """Return an engine's requests, whose samples take more than 20 kB."""
    folder.mkdir(parents=True, exist_ok=True)
    job = Stream(folder, max_running=100)
    job.stream.add(answers(*range(200)))
    return job


def save_requests(path: Path) -> None:
    many_requests(path.parent).stream.save(path, range(200))


def give_up_requests(path: Path) -> None:
    many_requests(path.parent).stream.give_up(path)


def store_log_probs(folder: Path) -> None:
    folder.mkdir()
    try:
        StoredLogProbs(folder).write(Batch.from_samples([0], [[1]], [[2] * 9000]), torch.zeros(9000))
    finally:
        assert list(folder.iterdir()) == []  # the disk has its space back


def test_an_exported_model_can_be_read_by_those_who_can_read_its_folder(tmp_path):
    tmp_path.chmod(0o755)
    save_tensors({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


def timeline() -> Timeline:
    lines = Timeline()
    for step in range(300):
        lines.records.append(Record("actor.update", (0, 1), f"step {step}", 0.0, 1.0, 2.0))
    return lines


@pytest.mark.parametrize("file", WRITES)
def test_a_file_that_cannot_be_written_is_named(tmp_path, file):
    run = open_run(tmp_path / "run")
    run.begin_step()
    with largest_file(20_000), pytest.raises(WriteError) as failed:
        WRITES[file](run)
        run._background.submit(int).result()
        run._raise_errors()
    assert re.fullmatch(
        rf"{re.escape(str(tmp_path / 'run' / file))}\S* cannot be written: File too large\. Raise "
        r"the limit .*\.",
        str(failed.value),
    )
    assert (
        str(pickle.loads(pickle.dumps(failed.value))) == str(failed.value)
        and failed.value.errno == errno.EFBIG
    )
    with contextlib.suppress(WriteError):
        run.close()


def test_a_full_disk_leaves_the_records_that_a_resume_would_cut(tmp_path):
    folder = tmp_path / "run"
    make_run(folder)
    before = (folder / "metrics.jsonl").read_bytes()
    with (
        largest_file(10),
        pytest.raises(WriteError, match=f"^{folder}/metrics.jsonl cannot be written: File too large"),
    ):
        cut_after(folder, 2)
    assert (folder / "metrics.jsonl").read_bytes() == before and not list(folder.glob(".*"))


def test_a_timeline_is_whole_or_the_one_before(tmp_path):
    path, lines = tmp_path / "timeline.json", Timeline()
    lines.write(path)
    before = path.read_bytes()
    with largest_file(20_000), pytest.raises(WriteError):
        timeline().write(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    timeline().write(path)
    assert len(json.loads(path.read_text())["traceEvents"]) > 300 and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_told_by_its_flag(tmp_path):
    """What no check can see beforehand, such as a disk that is full when the job begins."""
    with (
        largest_file(0),
        pytest.raises(
            ValueError,
            match=rf"--save \({tmp_path}/run\): {tmp_path}/run/resolved.args cannot be written: "
            r"File too large",
        ),
    ):
        open_run(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_rewards_that_are_most_of_a_step_name_their_flag_once(tmp_path):
    shown = StringIO()
    with Run(config(tmp_path / "run"), "", Progress(4, shown)) as run:
        for step, (seconds, rewards) in enumerate([(5.0, 2.0), (0.5, 0.5), (5.0, 4.0), (5.0, 4.0)], 1):
            run.begin_step()
            run._step_start -= seconds
            run.record_step(step, {"time/reward_s": rewards}, num_tokens=1)
    (note,) = [line for line in shown.getvalue().splitlines() if "--reward-num-workers" in line]
    assert note.startswith("step 3: rewards took 4.0 of 5.0 s.")
