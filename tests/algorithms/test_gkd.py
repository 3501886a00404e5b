"""The loss of generalized knowledge distillation: its weights, its parts on several ranks, and hints in
prompts.

pytest tests/algorithms/test_gkd.py"""

import json
import math

import pytest
import torch

from megarl.algorithms import REGISTRY, AdvantageInputs, LossInputs
from megarl.batch import Batch
from megarl.config.errors import FieldErrors
from megarl.data.columns import Prompt
from megarl.kernels.divergence import Divergence
from megarl.data.hints import hint_errors, with_hint
from megarl.data.prompts import PromptDataset
from megarl.workers.teaching import HintedPrompts

GKD = REGISTRY["gkd"]
LENGTHS = [3, 1, 4]
VALUES = [0.5, 1.0, 0.25, 2.0, 0.125, 0.5, 0.75, 3.0]


def loss(algorithm, rows=slice(None)):
    divergence = torch.tensor(VALUES)[rows].requires_grad_()
    lengths = torch.tensor(LENGTHS).repeat_interleave(torch.tensor(LENGTHS))[rows]
    inputs = LossInputs(
        log_probs=torch.zeros(len(divergence)),
        divergence=divergence,
        response_lengths=lengths,
        num_tokens=10,
        num_sequences=4,
        max_response_length=8,
        kl_coef=0.0,
        rollout_log_probs=torch.full((len(divergence),), -2.0),
    )
    value, metrics = algorithm.loss(inputs)
    (slope,) = torch.autograd.grad(value, divergence)
    return value.item(), slope.tolist(), {name: float(one) for name, one in metrics.items()}


@pytest.mark.parametrize(
    "aggregation, weights",
    {
        "token-mean": [0.1] * 8,
        "seq-mean-token-mean": [1 / 12] * 3 + [1 / 4] + [1 / 16] * 4,
        "seq-mean-token-sum": [1 / 4] * 8,
        "dr-grpo": [1 / 32] * 8,
    }.items(),
)
def test_each_token_counts_by_the_aggregation_with_global_denominators(aggregation, weights):
    value, slope, metrics = loss(GKD(loss_aggregation=aggregation))
    assert slope == pytest.approx(weights, rel=1e-6)
    assert value == pytest.approx(sum(w * v for w, v in zip(weights, VALUES)), rel=1e-6)
    assert metrics["distill/divergence"] == pytest.approx(sum(VALUES) / 10)
    assert metrics["policy/entropy"] == pytest.approx(1.6)
    parts = [loss(GKD(loss_aggregation=aggregation), rows)[0] for rows in (slice(0, 3), slice(3, 8))]
    assert sum(parts) == pytest.approx(value, rel=1e-6)


def test_flags_make_the_divergence_and_what_the_teacher_writes():
    assert GKD().teacher_divergence() == Divergence("reverse-kl") and GKD().is_taught
    assert GKD(divergence="jsd", jsd_beta=0.2).teacher_divergence() == Divergence("jsd", 0.2)
    assert GKD().loss_reads == ("old_log_probs", "advantages", "teacher_hidden")
    assert GKD(teacher_top_k=4).loss_reads == ("old_log_probs", "advantages", "teacher_top_k")
    assert not GKD(teacher_hint_key="solution").is_taught
    with pytest.raises(FieldErrors, match="is for --divergence jsd"):
        GKD(jsd_beta=0.2)


def test_the_update_waits_for_rewards_and_failed_ones_are_counted():
    flow = GKD().flow(["actor", "reference", "reward", "rollout"])
    nodes = {node.name: node for node in flow.nodes}
    assert "rewards" in nodes["actor.advantages"].reads and "advantages" in nodes["actor.update"].reads
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, math.nan, 0.0]),
        group_ids=torch.tensor([7, 7, 7]),
        rows=torch.tensor([2, 1]),
        response_lengths=torch.tensor([3, 2]),
        kl_coef=0.0,
        sum_over_ranks=lambda values: values,
    )
    columns, metrics = GKD().compute_advantages(inputs)
    assert columns["advantages"].tolist() == [0.0] * 5 and metrics == {"reward/failed": 1.0}


def test_a_hint_ends_the_prompt():
    said = ({"role": "system", "content": "s"}, {"role": "user", "content": "2+2 ?"})
    row = with_hint(Prompt(0, "", said, extra_info={"solution": "It is 4."}), "solution")
    assert row.messages == (said[0], {"role": "user", "content": "2+2 ?\n\nIt is 4."})
    assert with_hint(Prompt(messages="2+2", extra_info={"a": "4"}), "a").messages == "2+2\n\n4"
    for extra_info in ({}, {"a": ""}, {"a": 4}):
        with pytest.raises(ValueError, match="extra_info.a is .* wanted a string that is not empty"):
            with_hint(Prompt(messages="2+2", extra_info=extra_info), "a")


def test_a_row_without_a_hint_is_named(tmp_path):
    rows = [{"prompt": "1+1", "extra_info": {"a": "2"}}, {"prompt": "2+2", "extra_info": {"b": "4"}}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (error,) = hint_errors(PromptDataset.load(file), "a")
    assert error.startswith("--teacher-hint-key (a): ") and "rows.jsonl:2 of --train-data" in error
    assert [*hint_errors(PromptDataset.load(file), None)] == [] == [*hint_errors(None, "a")]


def test_the_teacher_reads_another_prompt_and_the_same_response():
    class Prompts:
        def prompts(self, rows):
            return [[100 + row] * (row + 1) for row in rows]

    hints = HintedPrompts.__new__(HintedPrompts)
    hints._encoder = Prompts()
    batch = Batch.from_samples([7, 9], [[1, 2], [3]], [[4, 5, 6], [8]], holes=[[(1, 2)], []])
    longer = hints.extended(batch, {7: 2, 9: 0})
    assert longer.tokens.tolist() == [102, 102, 102, 4, 5, 6, 100, 8]
    assert longer.response_mask.int().tolist() == [0, 0, 0, 1, 0, 1, 0, 1]
    assert longer.cu_seqlens.tolist() == [0, 6, 8] and longer.sample_ids.tolist() == [7, 9]
    nothing = Batch.from_samples([], [], [])
    assert len(hints.extended(nothing, {}).tokens) == 0
