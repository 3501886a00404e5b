"""Which failures save the last completed step, and what they say. `pytest tests/trainer/test_graceful_stop.py`

Signals: tests/runtime/test_shutdown.py and tests/e2e/test_stopping.py. With a job: tests/e2e/test_ending.py."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.failures import ExplainedError
from megarl.runtime.end_message import EndNotes, driver_error_text
from megarl.trainer import graceful_stop as module
from megarl.trainer.graceful_stop import graceful_stop
from megarl.trainer.stop_request import StopRequest


class JudgeFailed(ExplainedError, RuntimeError):
    """Stands for RewardsFailed."""


class FakeTrainer:
    """A trainer whose step 4 runs, on an executor whose calls end as `calls` says."""

    def __init__(self, folder: Path, calls: str = "well", failure: RuntimeError | None = None) -> None:
        self.config = SimpleNamespace(checkpoint=SimpleNamespace(exit_grace_s=0.3))
        self.stop, self.save_timeline, self.saved = StopRequest(), lambda: None, []
        self.stops_gracefully = False
        self.state = SimpleNamespace(completed=3, in_step=True, drop_step=self._drop)
        self.run_folder = SimpleNamespace(folder=folder)
        self.executor = SimpleNamespace(failure=failure, abort_calls=self._abort, label="step 4")
        self.checkpointer = SimpleNamespace(last_step=2, save=self._save, wait=lambda: None)
        self.calls, self.runner = calls, SimpleNamespace(batches=self.saved)

    def _drop(self) -> None:
        self.state.in_step = False

    def _abort(self) -> None:
        if self.calls == "a rank dies":
            self.executor.failure = RuntimeError("rank 1 died")
            raise self.executor.failure
        while self.calls == "hang":
            time.sleep(0.01)
            self.executor.check_interrupt()

    def _save(self) -> None:
        self.saved.append("checkpoint")
        (self.run_folder.folder / "checkpoints" / "step_000003").mkdir(parents=True)


@pytest.fixture(autouse=True)
def all_can_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_savable", lambda config: True)

    def save_samples(run_folder, saved, state, error) -> None:
        assert state.in_step, "the samples are lost once the step is dropped"
        saved.append("samples")

    monkeypatch.setattr(module, "save_failed_step", save_samples)


@pytest.mark.parametrize(
    "case, saved, said",
    [
        (
            "well",
            ["samples", "checkpoint"],
            "Stopped after step 3: its checkpoint is {folder}/checkpoints/step_000003",
        ),
        ("between steps", ["samples", "checkpoint"], "Stopped after step 3: its checkpoint is"),
        ("a rank dies", ["samples"], "Step 3 could not be saved: RuntimeError: rank 1 died"),
        ("hang", ["samples"], "Step 3 could not be saved: TimeoutError: --exit-grace-s is over"),
        ("a rank has failed", [], None),
        ("half an update", [], None),
        ("no step yet", [], None),
        ("ctrl-c", [], None),
    ],
)
@pytest.mark.parametrize("kind", [JudgeFailed, KeyError], ids=["explained", "bug"])
def test_a_failure_that_leaves_the_weights_whole_saves_the_last_completed_step(
    tmp_path: Path, kind: type[Exception], case: str, saved: list[str], said: str | None
) -> None:
    failure = RuntimeError("rank 0 died") if case == "a rank has failed" else None
    trainer = FakeTrainer(tmp_path, case, failure)
    error: BaseException = KeyboardInterrupt() if case == "ctrl-c" else kind("no judge")
    if case == "half an update":
        trainer.stop.begin_update()
    if case == "no step yet":
        trainer.state.completed = 0
    with pytest.raises(type(error)) as raised, graceful_stop(trainer):  # type: ignore[arg-type]
        if case == "between steps":
            trainer.stop.begin_update()
            trainer.stop.step_completed()
        raise error
    assert raised.value is error and trainer.saved == saved
    assert trainer.executor.failure is failure  # the driver's error stays the first one
    assert not trainer.stop.is_armed
    if case == "ctrl-c":
        return
    text = driver_error_text(error, trainer.executor, EndNotes())  # type: ignore[arg-type]
    if said is None:
        assert "step 3" not in text.lower()
        return
    assert said.format(folder=tmp_path) in text
    first = text.splitlines()[0]
    assert first.startswith("[driver] failed at step 4: ") and "no judge" in first and "Stopped" not in first
    assert text.count("Ste") + text.count("Sto") - text.count("Step 3") <= 1  # told once


def test_a_failure_of_a_job_that_cannot_be_saved_says_after_which_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_savable", lambda config: False)
    trainer = FakeTrainer(tmp_path)
    with pytest.raises(KeyError) as raised, graceful_stop(trainer):  # type: ignore[arg-type]
        raise KeyError("x")
    assert raised.value.__notes__ == ["Stopped after step 3"] and trainer.saved == ["samples"]
