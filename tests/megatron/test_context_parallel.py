"""How a packed micro-batch is split over context-parallel ranks, without any. `pytest
tests/megatron/test_context_parallel.py`"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megarl.batch import Batch, MicroBatch
from megarl.megatron import model
from megarl.megatron.context_parallel import ContextShard

LENGTHS = ((3, 5), (1, 1), (9, 2), (1, 15))
"""Of prompt and response: short ones that are mostly padding, one that needs none."""


def make_micro(lengths=LENGTHS) -> MicroBatch:
    """Every token's id is where it is, from 1 on."""
    ids = iter(range(1, 1000))
    prompts, responses = (
        [[next(ids) for _ in range(n)] for n in sizes] for sizes in (zip(*lengths) if lengths else ((), ()))
    )
    batch = Batch.from_samples(list(range(len(lengths))), prompts, responses)
    batch.tokens = torch.arange(1, len(batch.tokens) + 1)
    return MicroBatch.of(batch)


def test_the_example_of_the_docstring():
    batch = make_micro(((3, 5),)).batch
    assert [ContextShard.of(batch, 2, rank, 1).take(batch.tokens, 0).tolist() for rank in (0, 1)] == [
        [1, 2, 7, 8],
        [3, 4, 5, 6],
    ]


@pytest.mark.parametrize("lengths", [LENGTHS, ()])
@pytest.mark.parametrize("size, multiple", [(1, 1), (1, 4), (2, 1), (2, 2), (2, 3), (4, 1), (3, 4)])
def test_shards_make_up_the_padded_sequences(size, multiple, lengths):
    batch = make_micro(lengths).batch
    shards = [ContextShard.of(batch, size, rank, multiple) for rank in range(size)]
    whole = shards[0]
    assert all(shard.lengths == whole.lengths and shard.num_tokens == whole.num_tokens for shard in shards)
    assert (
        whole.num_tokens * size == sum(whole.lengths)
        and whole.num_tokens % multiple == 0
        and whole.num_tokens > 0
    )
    assert all(length % (2 * size) == 0 for length in whole.lengths) or size == 1
    assert sum(whole.lengths) - len(batch.tokens) <= 2 * size * (
        len(lengths) + multiple
    )  # no more padding than that takes
    gathered = torch.cat([shard.take(batch.tokens, 0) for shard in shards])
    if size > 1:
        assert all(torch.equal(shard.gather_order, whole.gather_order) for shard in shards)
        assert torch.equal(whole.gather_order.sort().values, torch.arange(len(gathered)))
        gathered = gathered[whole.gather_order]
    sequences = gathered.split(whole.lengths)
    own = batch.tokens.split(batch.lengths.tolist())
    for i, sequence in enumerate(sequences):
        real = own[i] if i < len(own) else batch.tokens[:0]
        assert torch.equal(sequence[: len(real)], real) and not sequence[len(real) :].any()


@pytest.mark.parametrize("size", (2, 4))
def test_every_response_token_is_predicted_once_where_its_predecessor_is(size):
    micro = make_micro()
    found = torch.zeros(len(micro.targets), dtype=torch.int64)
    for rank in range(size):
        shard = ContextShard.of(micro.batch, size, rank, 1)
        positions, rows = shard.select(micro.predict_positions)
        part = MicroBatch(micro.batch, micro.response_positions[rows])
        found[rows] += 1
        predecessors = shard.take(micro.batch.tokens, 0)[positions]
        assert torch.equal(predecessors, micro.batch.tokens[micro.predict_positions][rows])
        assert torch.equal(part.targets, micro.targets[rows]) and torch.equal(part.targets, predecessors + 1)
        assert torch.equal(part.response_length_of_token, micro.response_length_of_token[rows])
    assert (found == 1).all()


def test_transformer_engine_is_not_asked_for_a_sliding_window(monkeypatch):
    monkeypatch.setattr(model, "uses_transformer_engine", lambda: True)
    with pytest.raises(ValueError, match=r"--context-parallel-size \(2\).* \(512 tokens\).*Set it to 1"):
        model._layer_specs(SimpleNamespace(context_parallel_size=2, window_size=(511, 0)), None, "grouped")


def test_under_a_causal_mask_all_ranks_have_the_same_work():
    """Token i of a sequence looks at i + 1 of them."""
    batch = make_micro(((16, 32),)).batch
    assert {int(ContextShard.of(batch, 4, rank, 1).take(batch.tokens, 0).sum()) for rank in range(4)} == {
        48 * 49 // 2 // 4
    }
