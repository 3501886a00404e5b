"""Limit how far the outputs of a step's first update may be from those of the pass before it, which has the
same weights and samples."""

from __future__ import annotations

import torch

from megarl.config.hf_config import ModelShape
from megarl.config.schema import TrainConfig
from megarl.gate_limits import FP32, HALF, rounding_unit
from megarl.megatron.loss_check import PassLimit

SAME_KERNELS = PassLimit(of_mean=False, limit=0.0, reason="both passes run the same kernels")


def log_prob_limit(config: TrainConfig, shape: ModelShape, device: torch.device) -> PassLimit:
    """Return how much a log-prob may differ between the pass before the updates and the first update.

    On a CPU both passes are the same matrix products of the same micro-batches, to the last bit. On a GPU
    Transformer Engine and cuBLAS may choose other kernels where gradients are recorded. The limit there is
    the rounding that the log-prob gate accepts: of the mean in bf16, of the largest difference in fp32."""
    if device.type == "cpu":
        return SAME_KERNELS
    of_mean = config.model.bf16
    flag = "--gate-mean-abs" if of_mean else "--gate-max-abs"
    limit = config.run.gate_mean_abs if of_mean else config.run.gate_max_abs
    if limit is None:
        multiple = HALF.mean * HALF.unsure if of_mean else FP32.maximum
        limit = multiple * rounding_unit(of_mean, shape.num_layers)
    return PassLimit(
        of_mean=of_mean, limit=limit, reason=f"what the log-prob gate takes for rounding, see {flag}"
    )


def value_limit(device: torch.device) -> PassLimit | None:
    """Return how much a critic's value may differ between the pass before the updates and the first update;
    None on a GPU.

    Returns: None on a GPU, because the scale of the values is unknown."""
    return SAME_KERNELS if device.type == "cpu" else None
