"""Measure how a loss function weights its tokens, by calling it with chosen numbers.

policy_weight, value_weight    the sum of the weights that the loss gives its tokens
check_token_level              whether the loss is a sum over tokens, as `token_level` says"""

from __future__ import annotations

from dataclasses import replace

import torch

from megarl.algorithms.base import Algorithm, LossInputs, ValueLossInputs

_TOKEN_LEVEL_TOLERANCE = 1e-4
"""Relative tolerance for sums of fp32 numbers in another order.

The error of a loss of whole sequences is far larger."""


def policy_weight(algorithm: Algorithm, inputs: LossInputs) -> torch.Tensor:
    """Return the sum of the weights that the algorithm's policy loss gives these tokens, a float64 scalar.

    The sum is the slope of the loss where all log-probs are equal, all advantages are -1, and there is no KL.
    """
    zeros, output = torch.zeros_like(inputs.log_probs), _output(inputs)
    others = {name: None if getattr(inputs, name) is None else zeros for name in _OTHER_COLUMNS}
    others["advantages"] = zeros - 1
    if inputs.correction_weights is not None:
        others["correction_weights"] = zeros + 1
    if inputs.selected_tokens is not None:
        others["selected_tokens"] = zeros
    if inputs.ce_weights is not None:
        others["ce_weights"] = zeros
    if inputs.behavior_weights is not None:
        others["behavior_weights"] = zeros + 1
    return _slope(
        lambda values: algorithm.loss(replace(inputs, kl_coef=0.0, **others, **{output: values}))[0],
        zeros,
    )


def _output(inputs: LossInputs) -> str:
    """Return the field with the model's output that the loss differentiates."""
    return "log_probs" if inputs.divergence is None else "divergence"


def value_weight(algorithm: Algorithm, inputs: ValueLossInputs) -> torch.Tensor:
    """Return the sum of the weights that the algorithm's value loss gives these tokens, a float64 scalar.

    The sum is the slope of the loss where all values are as before and 1 above the returns."""
    zeros = torch.zeros_like(inputs.values)
    return _slope(
        lambda values: algorithm.value_loss(
            replace(inputs, values=values, old_values=zeros, returns=zeros - 1)
        )[0],
        zeros,
    )


def _slope(loss, at: torch.Tensor) -> torch.Tensor:
    leaf = at.clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(loss(leaf), leaf)
    return slope.double().sum().abs()


def check_token_level(algorithm: Algorithm, inputs: LossInputs, is_whole: bool) -> bool:
    """Raise ValueError if the loss is no sum over tokens. Returns whether there were enough tokens to decide.

    The loss of all tokens must equal the sum of the losses of two parts. The same must hold for its gradient,
    wherever the cut is.

    Args:
        inputs: shapes, lengths and counts; the other numbers do not matter.
        is_whole: whether the tokens are a whole micro-batch, for which the loss must work in any case.
    Raises: ValueError naming the setting to change, if the loss is no sum over tokens."""
    count = len(inputs.log_probs)
    # with more tokens a cut behind the first token lies within a response
    if count < 2 or inputs.response_lengths[0] < 2:
        return False
    position = torch.arange(count, dtype=torch.float64, device=inputs.log_probs.device)
    # These numbers look random and are far from on-policy, where losses of sequences and of tokens are alike.
    noise = {name: ((position + 1) * step % 1).to(inputs.log_probs.dtype) for name, step in _STEPS.items()}
    columns = {
        name: -0.1 - 2 * noise[name]
        for name in ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs")
    }
    columns |= {"advantages": 2 * noise["advantages"] - 1, "entropy": noise["entropy"]}
    columns["divergence"], output = noise["entropy"], _output(inputs)
    columns["correction_weights"] = noise["correction_weights"]
    columns["ce_weights"] = columns["behavior_weights"] = noise["correction_weights"]
    columns["selected_tokens"] = (noise["correction_weights"] > 0.5).to(inputs.log_probs.dtype)
    columns = {
        name: column
        for name, column in columns.items()
        if name in ("log_probs", "advantages") or getattr(inputs, name) is not None
    }

    def loss_and_slope(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        of_rows = {name: column[rows] for name, column in columns.items()}
        of_rows[output] = of_rows[output].clone().requires_grad_()
        if inputs.sequence_ids is not None:
            of_rows["sequence_ids"] = inputs.sequence_ids[rows]
        with torch.enable_grad():
            loss, _ = algorithm.loss(
                replace(inputs, response_lengths=inputs.response_lengths[rows], **of_rows)
            )
        (slope,) = torch.autograd.grad(loss, of_rows[output])
        return loss.detach(), slope

    whole = loss_and_slope(slice(0, count)) if is_whole else None
    name, cuts = type(algorithm).__name__, {1, count // 2, count - 1}
    advice = (
        f"{name}.loss is no sum over tokens, and {name}.token_level is True: %s. Set `token_level: "
        "ClassVar[bool] = False` in the class. Then the loss is called for all tokens of a micro-batch at once."
    )
    try:
        loss, slope = whole or loss_and_slope(slice(0, count))
        parts = {cut: (loss_and_slope(slice(0, cut)), loss_and_slope(slice(cut, count))) for cut in cuts}
    except Exception as error:  # the user's code may raise anything
        what = f"for a part of a micro-batch's tokens it raises {type(error).__name__}: {error}"
        raise ValueError(advice % what) from error
    for cut, ((first, first_slope), (second, second_slope)) in parts.items():
        size = slope.abs().sum() + loss.abs() + first.abs() + second.abs()
        gap = (torch.cat([first_slope, second_slope]) - slope).abs().max()
        is_sum = (first + second - loss).abs() <= _TOKEN_LEVEL_TOLERANCE * size
        if not is_sum or not gap <= _TOKEN_LEVEL_TOLERANCE * slope.abs().max():
            what = (
                f"of {count} tokens it is {float(loss):.6g}, of the first {cut} and of the others "
                f"{float(first):.6g} and {float(second):.6g}, or its gradients differ as much"
            )
            raise ValueError(advice % what)
    return True


_OTHER_COLUMNS = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "entropy")
_STEPS = {
    "log_probs": 0.6180339887,
    "old_log_probs": 0.7548776662,
    "rollout_log_probs": 0.5698402910,
    "ref_log_probs": 0.8191725134,
    "advantages": 0.6710436067,
    "entropy": 0.5497004779,
    "correction_weights": 0.4142135624,
}
