"""LoRA (arXiv:2106.09685, eq. 3) on Megatron's parallel linear layers.

A layer computes y = W x + (alpha / r) B (A x), with W frozen.

    layer                          A [r, in]             B [out, r]           A x [T, r] between the ranks
    column-parallel  linear_qkv    whole on every rank   this rank's rows     gathered (sequence
                     linear_fc1                                               parallelism) or as it is
    row-parallel     linear_proj   this rank's columns   whole on every rank  all-reduced or
                     linear_fc2                                               reduce-scattered

Ranks exchange r numbers per token, never a hidden state. The layer's own communication does not change, and
every replicated matrix sees the whole gradient. Under sequence parallelism a matrix sees the gradient of this
rank's tokens, and finalize_model_grads sums the gradients. A fused layer has one A for its q, k and v, or its
gate and up. Its B has the rows of W in the order of W.

Adapters work on the input and output of the layer, so the same code serves Megatron's and Transformer
Engine's layers. The support of Transformer Engine's layers was written from its source and has not been
run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.config.schema import LoRAConfig
from megarl.megatron.cpu_shim import cpu_megatron

with cpu_megatron():
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.transformer import TransformerConfig

_ROW_PARALLEL = ("linear_proj", "linear_fc2")
_MERGE_ELEMENTS = 2**24  # number of elements of a matrix that are in fp32 at a time


class Adapter(torch.nn.Module):
    """A low-rank term that is added to the output of one layer.

    The weights are undefined until they are drawn or loaded."""

    def __init__(
        self,
        weight: Tensor,
        is_row_parallel: bool,
        lora: LoRAConfig,
        config: TransformerConfig,
        group: torch.distributed.ProcessGroup,
    ) -> None:
        """Build the adapter of a layer. `weight` is this rank's part of the layer's [out, in]."""
        super().__init__()
        self.is_row_parallel, self.sequence_parallel, self.group = (
            is_row_parallel,
            config.sequence_parallel,
            group,
        )
        self.scale, self.is_on = lora.lora_alpha / lora.lora_rank, True
        options = dict(bias=False, dtype=weight.dtype, device=weight.device)
        self.linear_in = torch.nn.utils.skip_init(torch.nn.Linear, weight.shape[1], lora.lora_rank, **options)
        self.linear_out = torch.nn.utils.skip_init(
            torch.nn.Linear, lora.lora_rank, weight.shape[0], **options
        )
        split, whole = (
            (self.linear_in, self.linear_out) if is_row_parallel else (self.linear_out, self.linear_in)
        )
        # The gradient norm counts unmarked weights on one rank only.
        split.weight.tensor_model_parallel = group.size() > 1
        split.weight.partition_dim, split.weight.partition_stride = (1 if is_row_parallel else 0), 1
        whole.weight.sequence_parallel = config.sequence_parallel  # this matrix sees only this rank's tokens

    def forward(self, x: Tensor) -> Tensor:
        """Map the layer's input x [T, b, in] to the term [T, b, out] that is added to its output."""
        return self.linear_out(self._between_ranks(self.linear_in(x)) * self.scale)

    def _between_ranks(self, hidden: Tensor) -> Tensor:
        # In the backward pass of a column-parallel layer each rank contributes the part of its rows of B, so
        # the parts are summed either way.
        exchange = {
            (True, True): reduce_scatter_to_sequence_parallel_region,
            (True, False): reduce_from_tensor_model_parallel_region,
            (False, True): gather_from_sequence_parallel_region,
            (False, False): copy_to_tensor_model_parallel_region,
        }[self.is_row_parallel, self.sequence_parallel]
        return exchange(hidden, group=self.group)


def _add_adapter(
    linear: torch.nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Forward hook of a linear layer that returns its output plus the adapter's term, or the output as it is
    while adapters are off.

    The layer returns (output, bias that is left to its caller)."""
    if not linear.adapter.is_on:
        return output
    return output[0] + linear.adapter(_normed(linear, inputs[0])), output[1]


def _normed(linear: torch.nn.Module, x: Tensor) -> Tensor:
    """Return the input that the layer multiplies with W, which is normalized first if the layer has a norm
    inside.

    Transformer Engine's LayerNormLinear applies its norm inside the layer."""
    if not hasattr(linear, "layer_norm_weight"):
        return x
    weight = 1 + linear.layer_norm_weight if linear.zero_centered_gamma else linear.layer_norm_weight
    return F.rms_norm(x, x.shape[-1:], weight, linear.eps)


class Adapters:
    """All LoRA adapters of this rank's part of a model.

    Construction freezes every other weight except a value head.

    Args:
        chunks: the model's stage, before DDP.
        group: the tensor-parallel group.
    Raises: ValueError for a target layer that the model does not have."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        lora: LoRAConfig,
        config: TransformerConfig,
        group: torch.distributed.ProcessGroup,
    ) -> None:
        self.lora = lora
        self._adapters: list[Adapter] = []
        self.merged: dict[str, Tensor] = {}
        """The merged weights W + (alpha / r) B A by name of W, once they are allocated."""
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(name.startswith("value_head."))
            if config.recompute_granularity is not None and chunk.pre_process:
                # A recomputed layer has gradients only if its input has them. The input of the first layer
                # comes from a frozen embedding.
                chunk.embedding.register_forward_hook(_require_grad)
        for target in lora.lora_target_modules:
            layers = [
                m
                for chunk in chunks
                for name, m in chunk.named_modules()
                if name.endswith(f".{target}") and ".experts." not in name
            ]
            if not layers:
                raise ValueError(
                    f"--lora-target-modules ({target}): this model has no such layer outside of "
                    "experts. Leave it out."
                )
            for layer in layers:
                layer.adapter = Adapter(layer.weight, target in _ROW_PARALLEL, lora, config, group)
                layer.register_forward_hook(_add_adapter, prepend=True)  # before Gemma's norm of the output
                self._adapters.append(layer.adapter)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Switch the adapters off inside this context, so that the model computes as it did before
        training."""
        for adapter in self._adapters:
            adapter.is_on = False
        try:
            yield
        finally:
            for adapter in self._adapters:
                adapter.is_on = True

    def allocate_merged(self, parameters: dict[str, Tensor]) -> None:
        """Allocate `merged`, the sums of weights and adapters, which are undefined until `merge`.
        `parameters` are the model's, by name."""
        names = (name.replace(_IN, ".weight") for name in parameters if name.endswith(_IN))
        self.merged = {name: torch.empty_like(parameters[name]) for name in names}

    @torch.no_grad()
    def merge(self, parameters: dict[str, Tensor]) -> None:
        """Write the current sums W + (alpha / r) B A into `merged`. They are computed in fp32 and rounded
        once."""
        scale = self.lora.lora_alpha / self.lora.lora_rank
        for name, merged in self.merged.items():
            layer = name.removesuffix(".weight")
            low, high = parameters[layer + _IN].float(), parameters[layer + _OUT].float()
            rows = max(1, _MERGE_ELEMENTS // merged.shape[1])
            for base, part, out in zip(
                parameters[name].split(rows), high.split(rows), merged.split(rows), strict=True
            ):
                out.copy_(torch.addmm(base.float(), part, low, alpha=scale))


_IN, _OUT = ".adapter.linear_in.weight", ".adapter.linear_out.weight"


def _require_grad(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()
