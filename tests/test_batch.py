"""The packed batch against plain lists: packing, selecting and concatenating lose and mix up nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from megarl.batch import TOKEN_COLUMNS, Batch, MicroBatch, column_dtype
from tests.launch import succeed


def make(
    rng: random.Random, ids: list[int]
) -> tuple[Batch, dict[int, tuple[list[int], list[int], list[float]]]]:
    rows = {
        i: (
            [rng.randrange(100) for _ in range(rng.randint(1, 6))],
            [rng.randrange(100) for _ in range(rng.randint(0 if i else 1, 7))],
        )
        for i in ids
    }
    rows = {i: (p, r, [-rng.random() for _ in r]) for i, (p, r) in rows.items()}
    return Batch.from_samples(ids, *map(list, zip(*(rows[i] for i in ids), strict=True))), rows


def read(batch: Batch) -> dict[int, tuple[list[int], list[int], list[float]]]:
    """Back to lists, by slicing with cu_seqlens."""
    out, cu = {}, batch.cu_seqlens.tolist()
    for row, sample in enumerate(batch.sample_ids.tolist()):
        tokens, mask = batch.tokens[cu[row] : cu[row + 1]], batch.response_mask[cu[row] : cu[row + 1]]
        out[sample] = (
            tokens[~mask].tolist(),
            tokens[mask].tolist(),
            batch.rollout_log_probs[cu[row] : cu[row + 1]][mask].tolist(),
        )
    return out


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for sample, (prompt, response, log_probs) in wanted.items():
        assert got[sample][:2] == (prompt, response)
        assert got[sample][2] == pytest.approx(log_probs, rel=1e-7)  # Python floats stored as fp32


@pytest.mark.parametrize("seed", range(5))
def test_pack_select_cat(seed):
    rng = random.Random(seed)
    batch, rows = make(rng, [4, 7, 1, 9, 3])
    assert_same(read(batch), rows)
    chosen = rng.sample([4, 7, 1, 9, 3], 3)
    assert batch.select_samples(chosen).sample_ids.tolist() == chosen
    assert_same(read(batch.select_samples(chosen)), {i: rows[i] for i in chosen})
    other, other_rows = make(rng, [20, 21])
    assert_same(read(Batch.cat([batch, other])), rows | other_rows)


def test_selecting_nothing_and_repeating_a_sample():
    batch, rows = make(random.Random(0), [4, 7])
    assert len(batch.select_samples([]).tokens) == 0
    twice = batch.select_samples([7, 7])
    assert twice.tokens.tolist() == (rows[7][0] + rows[7][1]) * 2


def test_alignment_of_the_docstring_example():
    batch = Batch.from_samples([0, 1], [[5, 6], [8]], [[7, 1], [9, 9, 1]], [[-0.1, -0.2], [-0.3, -0.4, -0.5]])
    assert batch.tokens.tolist() == [5, 6, 7, 1, 8, 9, 9, 1]
    assert batch.cu_seqlens.tolist() == [0, 4, 8]
    assert batch.response_mask.int().tolist() == [0, 0, 1, 1, 0, 1, 1, 1]
    assert batch.response_lengths.tolist() == [2, 3]
    micro = MicroBatch.of(batch)
    assert micro.targets.tolist() == [7, 1, 9, 9, 1]
    assert micro.predict_positions.tolist() == [
        1,
        2,
        4,
        5,
        6,
    ]  # token 7 at position 2 is predicted at position 1
    torch.testing.assert_close(
        micro.column("rollout_log_probs"), torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.5])
    )
    assert micro.response_length_of_token.tolist() == [2, 2, 3, 3, 3]
    assert batch.spread(torch.tensor([2.0, -1.0])).tolist() == [0, 0, 2, 2, 0, -1, -1, -1]


def test_every_column_that_is_there_is_carried_and_the_others_stay_away():
    batch, _ = make(random.Random(1), [4, 7, 1])
    number_of_token = torch.arange(len(batch.tokens))
    batch.tokens = number_of_token
    for i, name in enumerate(TOKEN_COLUMNS[1:]):
        assert set(batch.columns) == {"rollout_log_probs", *TOKEN_COLUMNS[1 : 1 + i]}
        batch.set_column(name, (number_of_token + 0.5**i).to(column_dtype(name)))
        both = Batch.cat([batch.select_samples([1, 4]), batch.select_samples([7])])
        assert both.columns.keys() == batch.columns.keys()
        for j, carried in enumerate(TOKEN_COLUMNS[1 : 2 + i]):
            expected = (both.tokens + 0.5**j).to(column_dtype(carried))
            assert torch.equal(both.columns[carried], expected)


def test_a_stored_column_has_no_gradient():
    batch, _ = make(random.Random(1), [4])
    batch.set_column("values", torch.ones(len(batch.tokens), requires_grad=True))
    assert not batch.values.requires_grad


@pytest.mark.parametrize(
    "name, column, text",
    [
        ("value", torch.zeros(5), r"column \('value'\) must be one of rollout_log_probs, .*returns"),
        (
            "values",
            torch.zeros(4),
            r"column values \(\[4\] torch.float32\) must be one torch.float32 per token, \[5\]",
        ),
        ("values", torch.zeros(5, dtype=torch.float64), r"column values \(\[5\] torch.float64\)"),
    ],
)
def test_what_is_no_column_is_refused(name, column, text):
    batch = Batch.from_samples([0], [[5, 6]], [[7, 1, 2]])
    with pytest.raises(ValueError, match=text):
        batch.set_column(name, column)


def test_columns_of_some_batches_only_are_refused():
    a, b = (Batch.from_samples([i], [[5]], [[7]]) for i in range(2))
    b.set_column("values", torch.zeros(2))
    for batches in ([a, b], [b, a]):
        with pytest.raises(ValueError, match="column values is in some of the 2 batches only"):
            Batch.cat(batches)


def test_a_token_column_is_one_row_of_the_table():
    """A planted row is a field of batches, is exchanged, has its dtype, and has the writer that declares it."""
    planted = """
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import torch

path = Path("megarl/flow/columns.py").resolve()
row = 'Column(name="versions", dtype="int32", holds="..."),'
before = 'Column(name="ref_log_probs"'
source = path.read_text()
assert source.count(before) == 1

class Planted(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        return compile(source.replace(before, row + before), str(path), "exec")

spec = importlib.util.spec_from_loader("megarl.flow.columns", Planted("megarl.flow.columns", str(path)))
class Finder:
    @staticmethod
    def find_spec(name, *_):
        return spec if name == "megarl.flow.columns" else None
sys.meta_path.insert(0, Finder)

from megarl.batch import Batch, column_dtype
from megarl.flow import Flow, Role, SymbolicRole, method
from megarl.flow.columns import COMPUTED_COLUMNS
from megarl.flow.role import writer_of
from megarl.workers.exchange import bytes_per_token

class Versions(Role, kind="versions_of"):
    @method(reads=["tokens"], writes=["versions"])
    def note(self) -> None: ...

batch = Batch.from_samples([7, 8], [[5], [6]], [[1, 2], [3]])
assert batch.versions is None and "versions" not in batch.columns
batch.set_column("versions", batch.scatter([16777217, 2, 3], column_dtype("versions")))
assert batch.versions.tolist() == [0, 16777217, 2, 0, 3]  # the first is no float32
batch.set_column("versions", torch.arange(5, dtype=torch.int32))
try:
    batch.set_column("versions", torch.zeros(5))
except ValueError as error:
    assert "must be one torch.int32 per token" in str(error)
else:
    raise AssertionError("a column of another dtype was taken")
assert batch.select_samples([8]).versions.tolist() == [3, 4]
assert Batch.cat([batch, batch]).versions.tolist() == [0, 1, 2, 3, 4] * 2
assert "versions" in COMPUTED_COLUMNS and bytes_per_token(["tokens", "versions"]) == 12
assert writer_of("versions", "_2") == "versions_of_2.note"
actor, versions, other = (SymbolicRole(name) for name in ("actor", "versions_of", "other"))
flow = actor.rollout().then(versions.note).then(other.read, reads=["versions"], writes=())
assert flow.errors() == [] and "versions" in flow.text()
"""
    root = Path(__file__).resolve().parents[1]
    succeed("-c", planted, timeout=120, folder=root)
