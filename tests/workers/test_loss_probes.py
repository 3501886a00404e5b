"""Token weights are measured, and losses of whole sequences are found out. `pytest
tests/workers/test_loss_probes.py`"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from megarl.algorithms import GRPO, PPO, SFT, Algorithm, LossInputs, ValueLossInputs
from megarl.algorithms.promised_weight import promised_weight
from megarl.kernels.aggregate import token_weights_ref
from megarl.workers.loss_probes import check_token_level, policy_weight, value_weight

LENGTHS = [3, 6, 1, 9, 2]
COUNTS = (sum(LENGTHS), len(LENGTHS), 12)
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"]


def lengths_of_tokens() -> torch.Tensor:
    lengths = torch.tensor(LENGTHS)
    return lengths.repeat_interleave(lengths)


def policy_inputs(algorithm: Algorithm) -> LossInputs:
    """Of a whole mini-batch, anywhere but on policy."""
    generator = torch.Generator().manual_seed(0)
    column = lambda: -torch.rand(COUNTS[0], generator=generator)
    names = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages")
    return LossInputs(
        response_lengths=lengths_of_tokens(),
        num_tokens=COUNTS[0],
        num_sequences=COUNTS[1],
        max_response_length=COUNTS[2],
        kl_coef=0.7,
        entropy=column() if algorithm.needs_entropy else None,
        ref_log_probs=column() if algorithm.needs_reference else None,
        **{name: column() for name in names},
    )


POLICIES = [
    {},
    {"policy_loss": "cispo"},
    {"clip_eps_low": 0.0, "clip_eps_high": 0.0, "clip_ratio_c": 1.01},
    {"tis_clip": 0.3},
    {"tis_clip": 3.0},
    *(
        {"kl_mode": "loss", "kl_coef": 0.1, "kl_estimator": kind, "entropy_coef": 0.5}
        for kind in ("k1", "abs", "k2", "k3")
    ),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options", POLICIES, ids=lambda options: "-".join(map(str, options.values())) or "ppo"
)
def test_the_weights_of_a_policy_loss_add_up_to_what_is_promised(options, mode):
    """And both to the sum of the specification's weights, in float64."""
    algorithm = GRPO(loss_aggregation=mode, **options)
    inputs = policy_inputs(algorithm)
    wanted = float(token_weights_ref(mode, lengths_of_tokens(), *COUNTS).sum()) * min(
        options.get("tis_clip", 1.0), 1.0
    )
    assert promised_weight(algorithm, "loss", *COUNTS) == pytest.approx(wanted, rel=1e-12)
    assert float(policy_weight(algorithm, inputs)) == pytest.approx(wanted, rel=1e-6)  # fp32 weights
    local = replace(inputs, num_tokens=COUNTS[0] // 3, num_sequences=1)  # of one rank
    assert float(policy_weight(algorithm, local)) > 1.5 * wanted


@pytest.mark.parametrize("mode", MODES)
def test_the_weights_of_a_value_loss_add_up_to_what_is_promised(mode):
    algorithm, column = PPO(loss_aggregation=mode, tis_clip=0.5), torch.linspace(-3, 3, COUNTS[0])
    inputs = ValueLossInputs(
        values=column,
        old_values=column.flip(0),
        returns=column.square(),
        response_lengths=lengths_of_tokens(),
        num_tokens=COUNTS[0],
        num_sequences=COUNTS[1],
        max_response_length=COUNTS[2],
    )
    wanted = float(token_weights_ref(mode, lengths_of_tokens(), *COUNTS).sum())
    assert promised_weight(algorithm, "value_loss", *COUNTS) == pytest.approx(wanted, rel=1e-12)
    assert float(value_weight(algorithm, inputs)) == pytest.approx(wanted, rel=1e-6)


def test_the_weights_of_sft_add_up_to_one():
    inputs = replace(policy_inputs(SFT()), old_log_probs=None, rollout_log_probs=None, advantages=None)
    assert promised_weight(SFT(), "loss", *COUNTS) == 1.0
    assert float(policy_weight(SFT(), inputs)) == pytest.approx(1.0, rel=1e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences(GRPO):
    """Each sequence's ratio is the geometric mean of its tokens' (as in GSPO)."""

    token_level: ClassVar[bool] = True

    def loss(self, inputs: LossInputs):
        log_ratio = inputs.log_probs - inputs.old_log_probs
        starts = torch.cat(
            [
                torch.tensor([0]),
                inputs.response_lengths.diff().nonzero()[:, 0] + 1,
                torch.tensor([len(log_ratio)]),
            ]
        )
        loss = sum(
            -part.mean().exp() * adv.mean()
            for part, adv in zip(
                log_ratio.split(starts.diff().tolist()), inputs.advantages.split(starts.diff().tolist())
            )
        )
        return loss / inputs.num_sequences, {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsplittable(GRPO):
    """Takes it for granted that sequences are whole."""

    def loss(self, inputs: LossInputs):
        lengths, at = [], 0
        while at < len(inputs.response_lengths):
            lengths.append(int(inputs.response_lengths[at]))
            at += lengths[-1]
        return -sum(
            part.sum() for part in (inputs.log_probs * inputs.advantages).split(lengths)
        ) / inputs.num_sequences, {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Centred(GRPO):
    """A token's gradient depends on the mean of all tokens that are there."""

    def loss(self, inputs: LossInputs):
        return -(
            (inputs.advantages - inputs.advantages.mean()) * inputs.log_probs
        ).sum() / inputs.num_tokens, {}


@pytest.mark.parametrize(
    "algorithm",
    [
        GRPO(),
        GRPO(policy_loss="cispo", kl_mode="loss", kl_coef=0.1, entropy_coef=0.1),
        PPO(tis_clip=2.0),
        SFT(),
    ],
)
def test_losses_of_tokens_pass(algorithm):
    inputs = policy_inputs(algorithm)
    assert check_token_level(algorithm, inputs, is_whole=True)
    one = replace(
        inputs,
        **{
            name: getattr(inputs, name)[:1]
            for name in ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "response_lengths")
        },
    )
    assert not check_token_level(algorithm, one, is_whole=True)  # nothing can be found out


@pytest.mark.parametrize(
    "algorithm, what",
    [
        (Sequences(), "of 21 tokens it is"),
        (Centred(), "of 21 tokens it is"),
        (Unsplittable(), "for a part of a micro-batch's tokens it raises"),
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_losses_of_sequences_are_named_with_what_to_set(algorithm, what, is_whole):
    name = type(algorithm).__name__
    with pytest.raises(
        ValueError,
        match=rf"{name}\.loss is no sum over tokens, .*{what}.*Set `token_level: ClassVar\[bool\] = False`",
    ):
        check_token_level(algorithm, policy_inputs(algorithm), is_whole)


def test_a_loss_that_fails_for_whole_micro_batches_fails_by_itself():
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Broken(GRPO):
        def loss(self, inputs: LossInputs):
            raise KeyError("mistake")

    with pytest.raises(KeyError, match="mistake"):
        check_token_level(Broken(), policy_inputs(Broken()), is_whole=True)


def test_a_loss_of_its_own_is_not_held_against_its_parents_promise():
    assert promised_weight(Centred(), "loss", *COUNTS) is None
    assert promised_weight(GRPO(), "value_loss", *COUNTS) is None

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Promising(Centred):
        def weight_sum(self, num_tokens, num_sequences, max_response_length):
            return 0.0

    assert promised_weight(Promising(), "loss", *COUNTS) == 0.0
