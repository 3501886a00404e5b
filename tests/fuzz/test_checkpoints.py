"""Damaged files of checkpoints: what was written, or an error that names the file; never other values.

pytest tests/fuzz/test_checkpoints.py"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch
from hypothesis import strategies as st

from megarl.checkpoint.load import Checkpoint, load
from megarl.checkpoint.manifest import CheckpointError
from megarl.checkpoint.rectangles import Box, Rectangle
from megarl.checkpoint.save import save
from megarl.checkpoint.tensor_file import TensorFile, TensorFileError
from megarl.files.checkpoints import MANIFEST, JobFileError, file_digest, read_job, write_job
from megarl.loggers.json_lines import cut_after
from tests.fuzz.cases import fuzz, may_refuse
from tests.fuzz.damage import damaged, damages, edited, edits, json_values

VALUES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
TENSORS = "weights-00000.safetensors"


def rectangles() -> list[Rectangle]:
    boxes = (Box(0, 1, 0, 2), Box(0, 1, 2, 4), Box(1, 6, 0, 4))
    whole = torch.zeros(6, 4), torch.zeros(3, 1)
    return [
        *(
            Rectangle(
                "weights",
                "x",
                (6, 4),
                box,
                whole[0][box.row_start : box.row_end, box.col_start : box.col_end],
            )
            for box in boxes
        ),
        Rectangle("weights", "v", (3,), Box(0, 3, 0, 1), whole[1]),
    ]


def saved(folder: Path) -> Path:
    """A copy of a sound checkpoint."""
    if not (folder / "sound").exists():
        sound = rectangles()
        for r in sound:
            r.values.copy_(
                VALUES[r.box.row_start : r.box.row_end, r.box.col_start : r.box.col_end]
                if r.name == "x"
                else torch.ones(3, 1)
            )
        save(folder / "sound", sound, {"note": "ü", "dtype": "float32"})
    shutil.rmtree(folder / "copy", ignore_errors=True)
    return shutil.copytree(folder / "sound", folder / "copy")


def reads_what_was_written(folder: Path) -> bool:
    into = rectangles()
    load(folder, into)
    return all(
        r.values.equal(
            VALUES[r.box.row_start : r.box.row_end, r.box.col_start : r.box.col_end]
            if r.name == "x"
            else torch.ones(3, 1)
        )
        for r in into
    )


@fuzz(st.sampled_from([MANIFEST, TENSORS]), damages)
def test_damaged_bytes_of_a_checkpoint(folder: Path, name: str, damage: list) -> None:
    """Found by their digests, every one of them."""
    copy = saved(folder)
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(damaged(content, damage))
    with may_refuse(CheckpointError, naming=str(copy)):
        assert reads_what_was_written(copy)
        assert (copy / name).read_bytes() == content or name == MANIFEST


@fuzz(edits, st.booleans())
def test_manifests_that_lie(folder: Path, drawn: list, state: bool) -> None:
    """With a digest that fits: somebody wrote them so. What they say of the tensors is not believed before it
    was seen in the files."""
    copy = saved(folder)
    stored = json.loads((copy / MANIFEST).read_text())
    body = {key: stored[key] for key in ("files", "tensors", "state")}
    for path, new, how in drawn:
        body = edited(body, path, new, how)
    if not isinstance(body, dict):
        return
    body = {key: body.get(key) for key in ("files", "tensors", "state")}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (copy / MANIFEST).write_text(
        json.dumps({"format": "megarl checkpoint", "version": 1, "sha256": digest, **body})
    )
    with may_refuse(CheckpointError):
        assert reads_what_was_written(copy)
    with may_refuse(CheckpointError, TensorFileError):
        checkpoint = Checkpoint(copy)
        for kind, tensors in checkpoint.manifest.tensors.items():
            for tensor_name, tensor in tensors.items():
                checkpoint.read(kind, tensor_name, Box(0, tensor.shape[0], 0, 1))


@fuzz(edits | damages | st.binary(max_size=60), st.integers(-3, 9), st.integers(-3, 9))
def test_files_of_tensors(folder: Path, drawn: list | bytes, first: int, last: int) -> None:
    path = folder / "a.safetensors"
    content = (saved(folder) / TENSORS).read_bytes()
    if isinstance(drawn, bytes):
        content = drawn
    elif len(drawn[0]) == 3 and isinstance(drawn[0][0], str):
        content = damaged(content, drawn)
    else:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        for at, new, how in drawn:
            header = edited(header, at, new, how)
        text = json.dumps(header).encode()
        content = len(text).to_bytes(8, "little") + text + content[8 + length :]
    path.write_bytes(content)
    with may_refuse(TensorFileError, naming=str(path)):
        file = TensorFile(path)
        for key in file.keys():  # noqa: SIM118 (not a dict)
            assert file.read(key).numel() * file.dtype(key).itemsize < len(content)
        for key in (*file.keys(), "missing"):
            assert file.read(key, first, last).shape[0] == last - first >= 0


JOB_BODY = {
    "step": 7,
    "weight_version": 7,
    "roles": {},
    "models": {"actor": {"layers": 2}},
    "actors": {"": {"cursor": {"pass": 0}}},
    "random_states": [{"torch": "AA=="}],
    "metrics": {"reward/mean": 0.5},
    "arguments": "--lr 1",
}


@fuzz(edits, damages, st.booleans())
def test_files_of_jobs(folder: Path, drawn: list, damage: list, lies: bool) -> None:
    """Damaged ones, and ones that somebody wrote so, of whose digest nothing is to be seen."""
    root = saved(folder) / "job"
    root.mkdir()
    shutil.copytree(folder / "sound", root / "actor")
    body = JOB_BODY | {"roles": {"actor": file_digest(root / "actor" / MANIFEST)}}
    if lies:
        for at, new, how in drawn:
            body = edited(body, at, new, how)
    if not isinstance(body, dict):
        return
    try:
        write_job(root, body)
    except ValueError:  # NaN, which megarl writes nowhere
        return
    if not lies:
        (root / "job.json").write_bytes(damaged((root / "job.json").read_bytes(), damage))
    with may_refuse(JobFileError, naming=str(root)):
        assert read_job(root) == json.loads(json.dumps(body)) or lies


rows = st.dictionaries(st.sampled_from(["step", "reward/mean"]), json_values, max_size=2).map(
    json.dumps
) | st.integers(0, 9).map('{{"step": {}}}'.format)
ends = st.sampled_from(["\n", "\n", "\n", "", "\r\n"])


@fuzz(
    st.lists(st.tuples(rows | st.text(max_size=6) | st.just("[" * 100_000), ends), max_size=5),
    st.integers(-1, 9),
)
def test_rows_of_a_run_that_goes_on(folder: Path, drawn: list[tuple[str, str]], last: int) -> None:
    """Rows of earlier steps stay, byte for byte, and no other."""
    (folder / "rollouts").mkdir(exist_ok=True)
    path = folder / "metrics.jsonl"
    path.write_bytes("".join(row + end for row, end in drawn).encode(errors="replace"))
    before = path.read_bytes().splitlines(keepends=True)
    cut_after(folder, last)
    kept = path.read_bytes().splitlines(keepends=True)
    assert all(
        isinstance(json.loads(line)["step"], int) and json.loads(line)["step"] <= last for line in kept
    )
    assert [line for line in before if line in kept] == kept
    assert all(
        line in kept for line in before if line in [b'{"step": %d}\n' % step for step in range(last + 1)]
    )
