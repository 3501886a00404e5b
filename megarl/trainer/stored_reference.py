"""Let the reference score all rows once before training (--precompute-ref-log-probs), and then free its model.

    rows -> chunks of 1,024 -> the actor's ranks make batches, the reference scores them -> ref_log_probs/ in --save

The folder's index.json says by what the log-probs were computed. A job that finds another index refuses to go on;
one that finds an incomplete folder scores the missing rows, whatever its layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megarl.config.mesh import MeshSpec
from megarl.config.schema import TrainConfig
from megarl.failures import ExplainedError
from megarl.files.checkpoints import file_digest
from megarl.files.writing import writing
from megarl.flow import Actor, PlacedRole, Reference
from megarl.packing import Sample, plan_mini_batches
from megarl.runtime.executor import Executor
from megarl.trainer.announce import reminding, wait_for_setups
from megarl.trainer.run_folder import Run

FOLDER, INDEX = "ref_log_probs", "index.json"
CHUNK_ROWS = 1024
"""Rows that the reference scores in one call; an interrupted job loses one call at most."""
RowSizes = Sequence[Sequence[tuple[int, int, float | None]]]


class OtherReference(ExplainedError, ValueError):
    """Raised if stored log-probs are of another model, of other rows, or of other settings."""

    read_on = "docs/algorithms.md, section Preferences"


def set_up_stored_reference(
    executor: Executor,
    config: TrainConfig,
    meshes: Mapping[str, MeshSpec],
    run: Run,
    rows: RowSizes,
    hidden: int,
) -> list[str]:
    """Store the reference's log-probs of all rows, as far as they are missing, and free its model. Returns the roles
    that are set up.

    Args:
        rows: (length, response length, reward) of the samples of each row.
        hidden: hidden size of the reference, by which the cost of a sample is estimated.
    Raises: OtherReference; RemoteError if a rank fails."""
    actor, reference = Actor(executor, "actor"), Reference(executor, "reference")
    run.lock()  # a run that is resumed where there is none yet is not locked before
    folder, done = run.folder / FOLDER, ["reference"]
    index = _index(config, actor.digest_rows().first() or "")
    if _check_index(folder, index):
        run.progress.note(f"reference: all log-probs are in {folder}")
    else:
        # adapters that are switched off make the reference of the actor
        first = [*(["actor"] if config.lora.lora_rank else []), "reference"]
        wait_for_setups({role: PlacedRole(executor, role).setup() for role in first}, run.progress.note)
        done = first
        with reminding(run.progress.note, f"reference: scoring {len(rows)} rows into {folder}"):
            for begin in range(0, len(rows), CHUNK_ROWS):
                visits = {row: row for row in range(begin, min(begin + CHUNK_ROWS, len(rows)))}
                samples = [
                    Sample(row * len(rows[row]) + at, length, response_length, group=row)
                    for row in visits
                    for at, (length, response_length, _) in enumerate(rows[row])
                ]
                limit, dp = config.batch.max_tokens_per_micro_batch, meshes["actor"].dp
                plan = plan_mini_batches(samples, len(samples), {}, dp, limit, hidden, seed=None)
                actor.receive_rows(visits, plan).result()
                reference.store_log_probs(str(folder)).result()
        _write_index(folder, index | {"complete": True})
    reference.use_stored_log_probs(str(folder)).result()
    return done


def _index(config: TrainConfig, rows: str) -> dict[str, object]:
    """Return what the log-probs depend on: the model, the rows, and settings."""
    path = Path(config.model.reference_folder)
    files = [path / "config.json", *(() if config.model.random_init else sorted(path.glob("*.safetensors")))]
    with ThreadPoolExecutor() as pool:
        of_files = dict(zip([file.name for file in files], pool.map(file_digest, files), strict=True))
    if config.model.random_init:
        of_files["seed of the random weights"] = str(config.batch.seed)
    model = hashlib.sha256(json.dumps(of_files, sort_keys=True).encode()).hexdigest()
    return {
        "--model or --reference-model": model,
        "rows of --train-data": rows,
        "--temperature": config.sampling.temperature,
        "dtype": config.model.dtype,
        "complete": False,
    }


def _check_index(folder: Path, wanted: Mapping[str, object]) -> bool:
    """Return whether the folder has all log-probs. If not, prepare it for the ranks: write its index, and
    remove what a killed job was writing. The run folder is locked, and no rank writes yet.

    Raises: OtherReference."""
    path = folder / INDEX
    if not path.exists():
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        _write_index(folder, wanted)
        return False
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name in wanted if name != "complete" and found.get(name) != wanted[name]]
    except (ValueError, AttributeError):
        found, changed = {}, ["a damaged index.json"]
    if changed:
        raise OtherReference(
            f"--precompute-ref-log-probs: the log-probs in {folder} are of other values than this job's: "
            f"{', '.join(changed)}. Remove the folder to compute them anew, or go on as the run began."
        )
    if not found.get("complete"):
        for partial in folder.glob("*.partial_*"):
            partial.unlink()
    return bool(found.get("complete"))


def _write_index(folder: Path, index: Mapping[str, object]) -> None:
    path = folder / INDEX
    with writing(path):
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        partial.rename(path)
