"""Folders that are no checkpoint, or a damaged one: found when it is opened, with the file's name. One
process, without ranks."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from megarl.checkpoint.load import Checkpoint, load
from megarl.checkpoint.manifest import CheckpointError
from megarl.checkpoint.rectangles import Box, Rectangle
from megarl.checkpoint.save import save
from megarl.files.checkpoints import MANIFEST

VALUES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def rectangles(values: torch.Tensor, vector: torch.Tensor) -> list[Rectangle]:
    """x in three parts, as a stretch would be, and a vector."""
    boxes = (Box(0, 1, 0, 2), Box(0, 1, 2, 4), Box(1, 6, 0, 4))
    return [
        *(
            Rectangle(
                "weights", "x", (6, 4), box, values[box.row_start : box.row_end, box.col_start : box.col_end]
            )
            for box in boxes
        ),
        Rectangle("weights", "v", (3,), Box(0, 3, 0, 1), vector),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "a", rectangles(VALUES, torch.ones(3, 1)), {"note": "ünïcode", "list": [1, 2]})
    return tmp_path / "a"


def test_round_trip(folder: Path):
    values, vector = torch.zeros(6, 4), torch.zeros(3, 1)
    assert load(folder, rectangles(values, vector)) == {"note": "ünïcode", "list": [1, 2]}
    assert values.equal(VALUES) and vector.eq(1).all()
    assert Checkpoint(folder).read("weights", "x", Box(0, 3, 1, 3)).equal(VALUES[0:3, 1:3])
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "weights-00000.safetensors"]


def test_any_cut_reads_any_other(tmp_path: Path):
    for number, rows in enumerate((1, 4, 6)):
        parts = [
            Rectangle("weights", "x", (6, 4), Box(a, min(a + rows, 6), 0, 4), VALUES[a : a + rows])
            for a in range(0, 6, rows)
        ]
        save(tmp_path / str(number), parts, {})
        for box in (Box(0, 6, 0, 4), Box(2, 5, 1, 4), Box(3, 4, 3, 4)):
            assert (
                Checkpoint(tmp_path / str(number))
                .read("weights", "x", box)
                .equal(VALUES[box.row_start : box.row_end, box.col_start : box.col_end])
            )


def test_values_are_converted_to_what_they_are_loaded_into(folder: Path):
    values, vector = torch.zeros(6, 4, dtype=torch.bfloat16), torch.zeros(3, 1)
    load(folder, rectangles(values, vector))
    assert values.equal(VALUES.bfloat16())


@pytest.mark.parametrize("position", range(0, 400, 23))
def test_every_flipped_bit_is_found(folder: Path, position):
    """Of the tensors' file and of the manifest."""
    for name in (MANIFEST, "weights-00000.safetensors"):
        path = folder / name
        original = path.read_bytes()
        at = position * len(original) // 400
        path.write_bytes(original[:at] + bytes([original[at] ^ 4]) + original[at + 1 :])
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            load(folder, rectangles(torch.zeros(6, 4), torch.zeros(3, 1)))
        path.write_bytes(original)


def test_a_file_that_is_cut_short_is_named(folder: Path):
    path = folder / "weights-00000.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=f"{path} is damaged: it has {size - 1} bytes, and {size} were written"
    ):
        Checkpoint(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path} is missing"):
        Checkpoint(folder)


def test_folders_that_are_none(folder: Path, tmp_path: Path):
    (folder / MANIFEST).unlink()
    with pytest.raises(
        CheckpointError,
        match="is not a megarl checkpoint: it has no checkpoint.json, so writing it did not end",
    ):
        Checkpoint(folder)
    for text, reason in (
        ("", "cannot be read"),
        ("[" * 100_000, "cannot be read: maximum recursion depth"),
        ("[]", "is not of a megarl checkpoint"),
        ("{}", "is not of a megarl checkpoint"),
        (
            json.dumps({"format": "megarl checkpoint", "version": 2}),
            "has version 2 of the format; this megarl reads 1",
        ),
    ):
        (folder / MANIFEST).write_text(text)
        with pytest.raises(CheckpointError, match=reason):
            Checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    (
        (lambda body: body.update(files=None), "TypeError"),
        (lambda body: body.update(tensors=[]), "AttributeError"),
        (lambda body: body.update(state=[]), "its state is no object"),
        (
            lambda body: body["files"][0].__setitem__(0, "../a/weights-00000.safetensors"),
            "'../a/weights-00000.safetensors' is not the name of a file in it",
        ),
        (lambda body: body["tensors"]["weights"]["x"].update(dtype="nn"), r"nn of \[6, 4\] is no tensor"),
        (lambda body: body["tensors"]["weights"]["x"].update(shape=[]), r"float32 of \[\] is no tensor"),
        (lambda body: body["tensors"]["weights"]["x"]["parts"].pop(), "20 of 24 elements are missing"),
        (lambda body: body["tensors"]["weights"]["x"]["parts"][0].__setitem__(0, 7), "IndexError"),
    ),
)
def test_a_manifest_that_does_not_say_where_all_is_is_refused(folder: Path, change, reason):
    """Though its digest fits."""
    stored = json.loads((folder / MANIFEST).read_text())
    body = {key: stored[key] for key in ("files", "tensors", "state")}
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**stored, **body, "sha256": digest}))
    with pytest.raises(
        CheckpointError, match=f"{folder / MANIFEST} is not of a megarl checkpoint: .*{reason}"
    ):
        Checkpoint(folder)


def test_another_model_is_refused_by_name(folder: Path):
    values, vector, extra = torch.zeros(6, 4), torch.zeros(3, 1), torch.zeros(1, 1)
    whole = rectangles(values, vector)
    wide = Rectangle("weights", "x", (6, 5), Box(0, 6, 0, 5), torch.zeros(6, 5))
    for wanted, reason in (
        (whole[:3], "v is not a tensor of this model"),
        ([*whole, Rectangle("weights", "y", (1,), Box(0, 1, 0, 1), extra)], "y is missing"),
        ([wide, whole[3]], "x is 6x4 there and 6x5 by config.json"),
        ([*whole, Rectangle("exp_avg", "x", (6, 4), Box(0, 6, 0, 4), values)], "exp_avg in .* x is missing"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            load(folder, wanted)
    assert not values.any() and not vector.any()


def test_what_does_not_cover_a_tensor_is_not_saved(tmp_path: Path):
    parts = rectangles(VALUES, torch.ones(3, 1))
    with pytest.raises(CheckpointError, match="weights of x: 2 of 24 elements are missing"):
        save(tmp_path / "a", parts[1:], {})
    with pytest.raises(CheckpointError, match="weights of x: .* is there twice"):
        save(
            tmp_path / "a", [*parts, Rectangle("weights", "x", (6, 4), Box(0, 1, 1, 3), VALUES[:1, 1:3])], {}
        )
    assert not any(tmp_path.iterdir())


def test_an_unfinished_one_gives_way_and_a_finished_one_does_not(folder: Path, tmp_path: Path):
    (tmp_path / ".b.partial").mkdir()
    (tmp_path / ".b.partial" / "old").touch()
    save(tmp_path / "b", rectangles(VALUES, torch.ones(3, 1)), {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"] and not (tmp_path / "b" / "old").exists()
    with pytest.raises(CheckpointError, match="b exists; a checkpoint never replaces one"):
        save(tmp_path / "b", rectangles(VALUES, torch.ones(3, 1)), {})


def test_a_checkpoint_may_be_moved(folder: Path, tmp_path: Path):
    shutil.move(folder, tmp_path / "elsewhere")
    assert Checkpoint(tmp_path / "elsewhere").read("weights", "x", Box(0, 6, 0, 4)).equal(VALUES)
