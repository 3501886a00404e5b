"""Write new weights into experts whose matrices vLLM has prepacked for its CPU kernels.

vLLM packs expert weights for its grouped matrix product and pads the intermediate size to a multiple of the
kernel's tile. There is no unpacked fallback. A weight transfer writes plain matrices, which are packed once
they are complete."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from megarl.rollout.plugin import check_version


@dataclass(frozen=True)
class PackedExperts:
    """One expert weight in vLLM's prepacked CPU format, and its twin as a plain matrix that weight transfers
    write.

    Args:
        plain: [E, 2F, h] (gates above ups) or [E, h, F], as a transfer writes it.
        padded: the plain tensor with F padded by zeros; `plain` itself if nothing is padded.
        packed: the live weight, with the shape of `padded`.
        isa: vLLM's name of the layout."""

    plain: torch.Tensor
    padded: torch.Tensor
    packed: torch.Tensor
    isa: str

    @classmethod
    def find(cls, module: torch.nn.Module) -> dict[str, PackedExperts]:
        """Return parameter name within the module -> its PackedExperts; {} if vLLM has prepacked no experts
        there."""
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
            return {}
        check_version()
        size, found = experts.moe_config.intermediate_size_per_partition, {}
        for name in ("w13_weight", "w2_weight"):
            packed = getattr(module, name).data
            num_experts, rows, cols = packed.shape
            shape = (num_experts, 2 * size, cols) if name == "w13_weight" else (num_experts, rows, size)
            plain = packed.new_zeros(shape)
            padded = plain if plain.shape == packed.shape else torch.zeros_like(packed)
            found[name] = cls(plain, padded, packed, experts.isa)
        return found

    def pack(self) -> None:
        """Pack the plain matrices into the live weight with vLLM's own kernel."""
        if self.padded is not self.plain:
            if self.plain.shape[1] == self.padded.shape[1]:  # down projection: [E, h, F]
                self.padded[:, :, : self.plain.shape[2]] = self.plain
            else:
                for plain, padded in zip(self.plain.chunk(2, 1), self.padded.chunk(2, 1), strict=True):
                    padded[:, : plain.shape[1]] = plain
        torch.ops._C.prepack_moe_weight(self.padded, self.packed, self.isa)
