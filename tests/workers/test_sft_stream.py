"""The loss of samples and rows in one update against float64 formulas, whole and split over ranks and
micro-batches, and the walk over the rows.

    pytest tests/workers/test_sft_stream.py"""

from types import SimpleNamespace

import pytest
import torch

from megarl.batch import MicroBatch
from megarl.packing import MiniBatch
from megarl.trainer.data_rows import SftRows
from megarl.workers.row_samples import RowSample
from megarl.workers.sft_stream import SftStream

ROWS = [RowSample([1, 2], [3, 4, 5]), RowSample([6], [7]), RowSample([8, 9, 1], [2, 3])]


def stream_of(coef):
    stream = object.__new__(SftStream)
    stream._rows, stream._coef = ROWS, coef
    return stream


@pytest.mark.parametrize("layout", [[[[0, 1, 2]]], [[[0], [2]], [[1], []]]], ids=["one rank", "two ranks"])
def test_the_loss_is_the_mean_over_the_rows_tokens_times_the_factor(layout):
    """L = coef / T x sum of -log p over the T response tokens of all ranks' rows. In float64, so to 1e-15."""
    visits = {10: 0, 11: 1, 12: 2}
    plan = tuple(tuple(tuple(10 + row for row in micro) for micro in rank) for rank in layout)
    rows, samples = MiniBatch(plan, 6, 3), MiniBatch((((99,),),) * len(layout), 5, 1)
    tokens = torch.linspace(-2, -0.1, 6, dtype=torch.float64)
    of_row = dict(zip((10, 11, 12), tokens.split([3, 1, 2]), strict=True))
    total = metric = count = 0.0
    gradients = []
    for rank in range(len(layout)):
        stream = stream_of(0.25)
        stream.begin_step(visits, [rows], [samples], rank)
        micros, loss = stream.mixed(samples, lambda *_, **__: pytest.fail("these are rows"), rank)
        for micro in micros:
            here = [of_row[one] for one in micro.batch.sample_ids.tolist()]
            log_probs = torch.cat([torch.zeros(0, dtype=torch.float64), *here]).requires_grad_()
            value, metrics = loss(
                MicroBatch(micro.batch, micro.response_positions), slice(0), log_probs=log_probs
            )
            gradients += torch.autograd.grad(value, log_probs)[0].tolist()
            total, metric = total + value.item(), metric + metrics["sft/loss"].item()
            count += metrics["sft/tokens"].item()
    assert total == pytest.approx(0.25 * -tokens.sum().item() / 6, abs=1e-15)
    assert metric == pytest.approx(-tokens.mean().item(), abs=1e-15) and count == 6
    assert gradients == pytest.approx([-0.25 / 6] * 6, abs=1e-16)


def test_samples_keep_their_own_loss():
    stream, samples = stream_of(1.0), MiniBatch((((4,),),), 5, 1)
    stream.begin_step({0: 1}, [MiniBatch((((0,),),), 1, 1)], [samples], 0)
    own = object()
    _, loss = stream.mixed(samples, lambda micro, rows, **outputs: own, 0)
    assert loss(SimpleNamespace(batch=object()), slice(0), log_probs=None) is own


def test_rows_are_walked_pass_after_pass_and_resumed():
    batch = SimpleNamespace(seed=3, max_tokens_per_micro_batch=64)
    config = SimpleNamespace(
        batch=batch, data=SimpleNamespace(shuffle=True), sft=SimpleNamespace(sft_batch_size=3)
    )

    def walk():
        rows = SftRows(config, 5)
        rows.sizes = [(4 + row, 2) for row in range(5)]
        return rows

    whole, seen, saved = walk(), [], None
    for step in range(5):
        if step == 2:
            saved = whole.state()
        visits, mini_batches = whole.next(2, dp=2, hidden_size=8)
        assert [m.num_sequences for m in mini_batches] == [3, 3] and len(visits) == 6
        planned = [[s for rank in range(2) for s in m.samples_of(rank)] for m in mini_batches]
        assert sorted(sum(planned, [])) == list(visits)
        seen.append(visits)
    order = [row for visits in seen for row in visits.values()]
    assert all(sorted(order[start : start + 5]) == [0, 1, 2, 3, 4] for start in range(0, 30, 5))
    resumed = walk()
    resumed.restore(saved)
    assert [resumed.next(2, 2, 8)[0] for _ in range(3)] == seen[2:]
    with pytest.raises(
        ValueError, match="--sft-data: the files have 5 rows, and the checkpoint was made with 9"
    ):
        walk().restore(saved | {"num_rows": 9})
