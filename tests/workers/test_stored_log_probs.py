"""Log-probs of samples in files: the advice for damage works, and a killed job leaves nothing behind."""

from pathlib import Path

import pytest
import torch

from megarl.batch import Batch
from megarl.invariants import InvariantError
from megarl.trainer.stored_reference import _check_index
from megarl.workers.stored_log_probs import StoredLogProbs

INDEX = {"rows of --train-data": "1f", "complete": False}


def batch(*first_tokens: int) -> Batch:
    """Samples of one prompt token and two response tokens."""
    return Batch.from_samples([*first_tokens], [[one] for one in first_tokens], [[5, 6]] * len(first_tokens))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete folder with two files."""
    folder = tmp_path / "ref_log_probs"
    assert not _check_index(folder, INDEX)
    stored = StoredLogProbs(folder)
    stored.write(batch(1, 2), torch.tensor([-0.5, -1.0, -1.5, -2.0]))
    stored.write(batch(3), torch.tensor([-2.5, -3.0]))
    (folder / "index.json").write_text((folder / "index.json").read_text().replace("false", "true"))
    return folder


def test_log_probs_are_found_by_the_samples_in_any_order(folder):
    stored = StoredLogProbs(folder)
    assert stored.values(batch(3, 1)).tolist() == [-2.5, -3.0, -0.5, -1.0]
    assert not stored.lacks(batch(2, 3)) and stored.lacks(batch(2, 4))


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


DAMAGES = {
    "flipped": flip_last_byte,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-4]),
    "removed": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_advice_for_a_damaged_file_works(folder, damage):
    """Without the folder all log-probs are computed anew; without the file alone they are not."""
    path = sorted(folder.glob("*.safetensors"))[0]
    DAMAGES[damage](path)
    advice = rf"^{folder}\S* .*Remove the folder {folder}, to compute all of them anew$"
    with pytest.raises(InvariantError, match=advice):
        StoredLogProbs(folder).values(batch(1, 2, 3))
    assert _check_index(folder, INDEX)  # so nothing would be scored
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert not _check_index(folder, INDEX)
    stored = StoredLogProbs(folder)
    stored.write(batch(1, 2, 3), torch.arange(6.0))
    assert StoredLogProbs(folder).values(batch(2)).tolist() == [2.0, 3.0]


def test_what_a_killed_job_was_writing_is_removed_before_ranks_write(folder):
    partial = folder / "3f2a.partial_17"
    partial.write_bytes(b"half")
    assert _check_index(folder, INDEX) and partial.exists()  # nothing is written to a complete folder
    (folder / "index.json").write_text((folder / "index.json").read_text().replace("true", "false"))
    assert not _check_index(folder, INDEX) and not partial.exists()
    assert len(list(folder.glob("*.safetensors"))) == 2
