"""Write and restore the checkpoints of a job.

Checkpoints are written while the job trains and become visible when every rank is done. A later job of any
layout can read them.

    save      every rank copies its state, threads write it            .step_000010.attempt_1.partial/actor/...
    poll      all threads have ended: write job.json, then rename      step_000010/
    abandon   after a failure: the same, judged by the files on disk
    restore   newest first; a damaged checkpoint is skipped

The state of the ranks is in the folders of the roles (megarl/checkpoint). The driver's state is in job.json.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.errors import raise_errors
from megarl.config.rules_files import described_models, disagreements, goes_on, uncompared_models
from megarl.config.user_files import changed_files, user_files
from megarl.failures import ExplainedError
from megarl.files.checkpoints import (
    CHECKPOINTS,
    MANIFEST,
    REQUESTS,
    JobFileError,
    checkpoints_in,
    folder_of_step,
    found_by,
    is_one_checkpoint,
    read_job,
    step_of,
    write_job,
)
from megarl.files.checkpoints import file_digest, sync_folder
from megarl.config.render import write_args
from megarl.files.writing import writing
from megarl.futures import Future
from megarl.flow import RandomState, Rollout, CheckpointedRole
from megarl.runtime.executor import Executor
from megarl.config.mesh import MeshSpec
from megarl.config.roles import checkpointed_roles
from megarl.config.schema import TrainConfig
from megarl.metrics import current_name
from megarl.role_names import kind_and_suffix
from megarl.trainer.attempt import SupersededError
from megarl.trainer.replay import DriverLog
from megarl.trainer.run_folder import Run
from megarl.trainer.state import TrainState
from megarl.trainer.stop_request import StopRequest


class NoWholeCheckpoint(ExplainedError, RuntimeError):
    """--load names no readable checkpoint; the message gives the error of each checkpoint."""

    read_on = "docs/checkpoints.md, section Damage"


@dataclass
class _Saving:
    """A checkpoint that threads of the ranks are writing."""

    step: int
    partial: Path
    body: dict[str, Any]
    """Content of job.json, without the roles' digests."""
    asked: dict[str, Future[str | None]] | None = None
    """Pending calls by role, each asking whether the role's part is written."""


class Checkpointer:
    """Writes and restores the checkpoints of a job, one at a time.

    Args:
        meshes: role -> its mesh.
        state: the driver's state, which goes into job.json.
        run_folder: the folder for checkpoints, which also provides their metrics.
        stop: the shutdown request, which does not interrupt a checkpoint half-way.
    """

    def __init__(
        self,
        config: TrainConfig,
        executor: Executor,
        meshes: Mapping[str, MeshSpec],
        state: TrainState,
        run_folder: Run,
        stop: StopRequest,
    ) -> None:
        self._job_config, self.config = config, config.checkpoint
        self._user_files = user_files(config)  # as the ranks have read them
        self._state, self._run, self._stop = state, run_folder, stop
        self.roles = {role: CheckpointedRole(executor, role) for role in checkpointed_roles(config, meshes)}
        self._rollouts = {
            role: Rollout(executor, role) for role in meshes if kind_and_suffix(role)[0] == "rollout"
        }
        everywhere = "data" if "data" in executor.ranks else "actor"  # the role that is on every rank
        self._random, self._ranks = RandomState(executor, everywhere), executor.ranks[everywhere]
        self._meshes = meshes
        self._restored: Path | None = None
        """The checkpoint that was restored."""
        self.last_step: int | None = None
        """Step of the newest checkpoint that was begun or restored."""
        self.restored_metrics: dict[str, float] = {}
        """Metrics of the restored step."""
        self.log: DriverLog | None = None
        """Log of asynchronous rollouts; None in synchronous training."""
        self._saving: _Saving | None = None
        self._metrics: dict[int, dict[str, float]] = {}
        """Step of each checkpoint in the run folder -> the metrics of that step."""
        self._has_noted = False
        """Whether the user was told that a step has no --best-metric."""

    @property
    def is_evaluated(self) -> bool:
        """Whether the restored step has held-out scores."""
        return any(name.startswith("eval/") for name in self.restored_metrics)

    def save(self) -> None:
        """Begin a checkpoint of the state between two steps. Returns when every rank has copied its state.

        Waits for the previous checkpoint. Does nothing if the run has a checkpoint of this step, or if --replay
        repeats a run that has none.

        Raises: RemoteError if a rank cannot copy its state; OSError if the folder cannot be written."""
        self.wait()
        step = self._state.completed
        folder = folder_of_step(self._run.folder, step)
        if step in self._metrics:  # the run already has a checkpoint of this step
            return
        if self.log is not None:
            if not self.log.may_save(step):
                self._run.progress.note(
                    f"step {step}: no checkpoint, as the replayed run has none of this step"
                )
                return
            self.log.save(step)
        self._run.attempt.check(f"the checkpoint of step {step}")
        partial = folder.with_name(f".{folder.name}.attempt_{self._run.attempt.number}.partial")
        with self._stop.held(), _removed_if_failed(partial):
            shutil.rmtree(partial, ignore_errors=True)
            with writing(partial):
                partial.mkdir(parents=True)
            copied = [role.begin_checkpoint(str(partial / name)) for name, role in self.roles.items()]
            states, requests = self._random.random_state(), self._save_requests(partial)
            for future in copied:
                future.result()
            body = self._body(states.result()) | ({REQUESTS: requests} if requests else {})
            self._saving, self.last_step = _Saving(step, partial, body), step

    def _save_requests(self, folder: Path) -> dict[str, str]:
        """Write the samples of the groups that no step has trained on, finished or not. Returns file -> its
        SHA-256; {} if there are none, as in synchronous training."""
        written: dict[str, str] = {}
        for name, rollout in self._rollouts.items():
            visits = [group.visit for group in self._state.actor_of(name).buffer.groups]
            if visits:
                with writing(folder / REQUESTS):
                    (folder / REQUESTS).mkdir(exist_ok=True)
                for of_rank in rollout.save_requests(str(folder / REQUESTS), visits).result():
                    written |= of_rank
        return written

    def load_requests(self) -> None:
        """Queue the groups that no step has trained on when the restored checkpoint was made, and let them go
        on where it left them. Call this when the engines have weights."""
        for name, rollout in self._rollouts.items():
            buffer = self._state.actor_of(name).buffer
            if self._restored is not None and len(buffer):
                engines = buffer.engines(self._meshes[name].dp)
                folder = str(self._restored / REQUESTS)
                rollout.load_requests(folder, buffer.issue(engines), engines).result()

    def poll(self) -> None:
        """Rename the current checkpoint to its final folder if every rank has written its part. Does not
        wait, and does nothing if there is no checkpoint in progress.

        Raises: RemoteError if a rank could not write its part."""
        saving = self._saving
        if saving is None:
            return
        with self._stop.held():
            if saving.asked is None:
                saving.asked = {name: role.checkpoint_written() for name, role in self.roles.items()}
            if all(future.done() for future in saving.asked.values()):
                answers = {role: future.result() for role, future in saving.asked.items()}
                saving.asked = None
                if all(None not in of_role for of_role in answers.values()):
                    self._publish(saving, {role: digests[0] for role, digests in answers.items()})

    def wait(self) -> None:
        """Wait until the current checkpoint, if any, is complete and has its final folder name. Raises the
        errors of `poll`."""
        saving = self._saving
        if saving is None:
            return
        with self._stop.held():
            asked = {name: role.checkpoint_written(wait=True) for name, role in self.roles.items()}
            self._publish(saving, {role: future.first() for role, future in asked.items()})

    def abandon(self) -> None:
        """Clean up after a failure: publish the checkpoint if all roles have written it, else remove it."""
        saving = self._saving
        if saving is None:
            return
        partial = saving.partial
        with contextlib.suppress(OSError, SupersededError):
            if all((partial / role).is_dir() for role in self.roles):
                self._publish(saving, {role: file_digest(partial / role / MANIFEST) for role in self.roles})
        shutil.rmtree(partial, ignore_errors=True)

    def restore(self) -> None:
        """Load the newest undamaged checkpoint of --load into every role and into the driver's state. Without
        --load nothing is done.

        Nothing is restored if --load is --save's own folder and holds no checkpoint yet.

        Only damage is passed over. With other flags, or when the file system answers again, the checkpoint
        may be whole, and a job that went on from an older one would remove it.

        Raises: NoWholeCheckpoint if all checkpoints are damaged; ConfigError if this job cannot go on from
            the newest undamaged one; ReadError or RemoteError if a file cannot be read."""
        if self.config.load is None:
            return
        note, problems = self._run.progress.note, []
        for folder in found_by(self.config.load):
            if (damage := self._damage_of(folder)) is None:
                self._load(folder)
                return
            problems.append(damage)
            note(f"checkpoint {folder} is passed over: {damage}")
        if problems or not goes_on(self._job_config):
            load = Path(self.config.load)
            others = (
                f" Try --load {load.resolve().parent.parent} for another one of the run."
                if is_one_checkpoint(load)
                else ""
            )
            raise NoWholeCheckpoint(
                "\n".join([f"--load ({load}): no whole checkpoint is there.{others}", *problems])
            )
        self._go_on(None, None)

    # ------------------------------------------------------------------ writing

    def _body(self, random_states: list[dict[str, str]]) -> dict[str, Any]:
        step = self._state.completed
        row, best = self._run.row_of(step), self.config.best_metric
        if best is not None and best not in row and not self._has_noted:
            self._has_noted = True
            self._run.progress.note(
                f"--best-metric ({best}): step {step} has no such metric, so its checkpoint is not compared. "
                f"It has {', '.join(row)}."
            )
        return {
            **self._state.snapshot(),
            "attempt": self._run.attempt.number,
            "weight_version": step,
            "random_states": random_states,
            "models": described_models(self._job_config),
            "user_files": self._user_files,
            "metrics": {name: value for name, value in row.items() if math.isfinite(value)},
            "arguments": write_args(self._job_config),
        }

    def _publish(self, saving: _Saving, digests: Mapping[str, object]) -> None:
        folder = folder_of_step(self._run.folder, saving.step)
        self._run.attempt.check(f"the checkpoint of step {saving.step}")
        write_job(saving.partial, {**saving.body, "roles": dict(digests)})
        sync_folder(saving.partial)
        saving.partial.rename(folder)
        self._saving = None  # from here on `abandon` has nothing to do
        sync_folder(folder.parent)
        self._metrics[saving.step] = saving.body["metrics"]
        self._prune()

    @property
    def _on_disk(self) -> dict[int, Path]:
        """Step -> checkpoint of the run folder, newest first."""
        found = checkpoints_in(self._run.folder)
        return {step: folder for folder in found if (step := step_of(folder)) is not None}

    def _prune(self) -> None:
        """Remove checkpoints that --keep and --best-metric do not keep, and leftovers of earlier jobs."""
        on_disk = self._on_disk
        kept = {*list(on_disk)[: self.config.keep], self._best_step()}
        for step, folder in on_disk.items():
            if step not in kept:
                # a job that ends meanwhile leaves no incomplete checkpoint
                folder.rename(folder.with_name(f".{folder.name}.removed"))
        for hidden in (self._run.folder / CHECKPOINTS).glob(".step_*"):
            shutil.rmtree(hidden, ignore_errors=True)

    def _best_step(self) -> int | None:
        """Return the step of the checkpoint on disk with the best --best-metric, the latest of equal ones;
        None if no checkpoint has that metric."""
        name, sign = self.config.best_metric, 1 if self.config.best_metric_mode == "max" else -1
        if name is None:
            return None
        # A resumed job makes up for an evaluation that its checkpoint does not have.
        on_disk = self._on_disk
        rows = self._run.recorded(on_disk)
        metrics = ((step, self._metrics.get(step, {}) | rows.get(step, {})) for step in on_disk)
        values = {
            step: (sign * row[name], step) for step, row in metrics if math.isfinite(row.get(name, math.nan))
        }
        return max(values, key=values.__getitem__, default=None)

    # ------------------------------------------------------------------ reading

    def _damage_of(self, folder: Path) -> str | None:
        """Return what of a checkpoint is damaged, or None.

        Compares digests of the files and shapes of the models.

        Raises: the errors of `restore`."""
        try:
            body = read_job(folder)
        except JobFileError as error:
            return str(error)
        raise_errors([*disagreements(self._job_config, folder, body)])
        asked = {name: role.damage_of_checkpoint(str(folder / name)) for name, role in self._held_by(body)}
        damages = ((name, future.first()) for name, future in asked.items())
        return next((f"{name}: {damage}" for name, damage in damages if damage is not None), None)

    def _held_by(self, body: Mapping[str, Any]) -> list[tuple[str, CheckpointedRole]]:
        """Return the roles that a checkpoint holds. It lacks the reference if that still was the model from
        which training starts, as in this job."""
        return [(name, role) for name, role in self.roles.items() if name in body["roles"]]

    def _load(self, folder: Path) -> None:
        body = read_job(folder)
        changed = changed_files(self._job_config, body.get("user_files", {}))
        for line in (*uncompared_models(self._job_config, body), *changed):
            self._run.progress.note(line)
        loaded = [
            role.load_checkpoint(str(folder / name), digests=False) for name, role in self._held_by(body)
        ]
        for future in loaded:
            future.result()
        self._state.restore(body)
        states = body["random_states"]
        if len(states) == len(self._ranks):  # another number of ranks has no equivalent random state
            set_again = [
                self._random.on([rank]).set_random_state(state)
                for rank, state in zip(self._ranks, states, strict=True)
            ]
            for done in set_again:
                done.result()
        self.last_step, self.restored_metrics, self._restored = body["step"], body["metrics"], folder
        self._go_on(body["step"], folder)

    def _go_on(self, step: int | None, folder: Path | None) -> None:
        """Report that the job continues after `step`. If it continues in its own run folder, also remove the
        records and checkpoints of later steps. Both are None for a run that begins anew."""
        note = self._run.progress.note
        if not goes_on(self._job_config):
            note(f"continues after step {step}: {folder}")
            return
        self._run.lock()  # before anything of another job's is renamed
        self._metrics = {
            number: _metrics_of(path) if self.config.best_metric else {}
            for number, path in self._on_disk.items()
            if step is not None and number <= step
        }
        for number, later in self._on_disk.items():
            if step is None or number > step:  # removed when the next checkpoint is complete
                replaced = later.with_name(f".{later.name}.replaced")
                shutil.rmtree(replaced, ignore_errors=True)
                later.rename(replaced)
        self._run.go_on_after(step)
        if step is not None:  # a job before may have made up for the evaluation that the checkpoint lacks
            self.restored_metrics |= self._run.recorded({step}).get(step, {})
        if folder is None:
            note(f"--load ({self.config.load}): no checkpoint is there yet; begins at step 1")
        else:
            note(
                f"continues after step {step}: {folder}; later rows of metrics.jsonl, rollouts and "
                "TensorBoard events are removed"
            )


@contextlib.contextmanager
def _removed_if_failed(partial: Path) -> Iterator[None]:
    """Remove the partial folder after an error, so that a full disk gets its space back."""
    try:
        yield
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _metrics_of(folder: Path) -> dict[str, float]:
    """Return the metrics that were saved with a checkpoint, or {} if its job.json is damaged."""
    try:
        metrics: dict[str, float] = read_job(folder)["metrics"]
        return {current_name(name): value for name, value in metrics.items()}
    except JobFileError:
        return {}
