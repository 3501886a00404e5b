"""Make vLLM receive its weights from the training ranks, by a plan of copies between both sides' layouts.

vLLM builds this weight-transfer engine in its worker:

built
    at the end of load_model: every weight becomes a plain [rows, cols] tensor, or the trainer's own memory
init_transfer_engine
    in the trainer's process: hands the tensors over; in a vLLM process: makes a Puller
start / receive / finish_weight_update
    one version: receive copies, finish makes the copied version the one that generates
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.platforms import current_platform

from megarl.config.hf_config import FAMILIES, ModelShape
from megarl.messages import decode
from megarl.reshard.atlas import Atlas, hf_sizes
from megarl.reshard.hf_weights import checkpoint_sizes
from megarl.reshard.vllm_atlas import TABLES, vllm_atlas
from megarl.rollout.latents import DerivedLatents
from megarl.rollout.offer import Offer, alias_weights
from megarl.rollout.plugin import check_version
from megarl.rollout.puller import Order, Puller

if TYPE_CHECKING:
    from megarl.rollout.cpu_experts import PackedExperts

logger = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Settings that the rank that drives the engine sends to its workers once."""

    expose: Callable[[Atlas, dict[str, torch.Tensor]], None] | None = None
    """Callback in the trainer's process that receives the atlas and the live weights by name."""
    ranks: list[int] | None = None
    """Rank in the plan of each tensor-parallel rank of the engine; in another process."""
    double_buffer: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    copy: Callable[[], object] | None = None
    """Function that fills the weights; in the trainer's process.

    Collective over the ranks whose weights travel as messages."""
    order: bytes = b""
    """An Order (puller.py) as a message; in another process."""


_offer: ContextVar[Offer | None] = ContextVar("_offer", default=None)


@contextlib.contextmanager
def offering(offer: Offer) -> Iterator[None]:
    """Offer the trainer's memory to the engine that is built inside this context. The engine sets
    `offer.taken`, which says for which weights it uses that memory.

    CUDA graphs and compiled code keep memory addresses. These can still be chosen while vLLM builds the
    weight-transfer engine."""
    token = _offer.set(offer)
    try:
        yield
    finally:
        _offer.reset(token)


class MegarlWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls, update_info_cls, supports_draft_weight_update = InitInfo, UpdateInfo, False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.atlas = engine_atlas(vllm_config)
        self.packed, self.latents = (
            find_packed_experts(model),
            DerivedLatents(model, vllm_config.model_config.dtype),
        )
        offer = _offer.get()
        if offer is not None:
            offer.taken = alias_weights(
                model, {name: param for name, param in self.atlas.items() if name not in self.packed}, offer
            )
            free_replaced_weights(vllm_config)
        self.tensors = expose_weights(model, self.atlas, self.packed, self.latents.names)
        self.puller: Puller | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if init_info.expose is not None:
            init_info.expose(self.atlas, self.tensors)
        else:
            rank = init_info.ranks[get_tensor_model_parallel_rank()]
            self.puller = Puller(
                rank, self.model, self.tensors, init_info.double_buffer, staged=self.packed.keys()
            )

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Copy the weights of a new version.

        In a vLLM process with two buffers this returns at once, and `Puller.wait` waits for the copies."""
        if update_info.copy is not None:
            update_info.copy()
            self._derive()
        else:
            self.puller.begin(decode(update_info.order, Order))

    def finish_weight_update(self) -> None:
        if self.puller is not None and self.puller.commit():
            self._derive()

    def _derive(self) -> None:
        """Compute the parameters that vLLM derives from weights and that a transfer does not write."""
        for experts in self.packed.values():
            experts.pack()
        self.latents.update()

    def shutdown(self) -> None:
        self.puller = None


def engine_atlas(vllm_config: VllmConfig) -> Atlas:
    """Return which part of which Hugging Face tensor each weight of this engine rank holds, from the tables
    or from vLLM's own loader.

    Raises: ValueError or FileNotFoundError if the trainer does not know the model type either and the folder
    holds no weights. The trace needs their sizes."""
    folder, model_type = vllm_config.model_config.model, vllm_config.model_config.hf_config.model_type
    if model_type in TABLES:
        return vllm_atlas(
            ModelShape.load(folder), get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        )
    from megarl.rollout.trace import empty_model, trace_vllm_atlas

    sizes = hf_sizes(ModelShape.load(folder)) if model_type in FAMILIES else checkpoint_sizes(folder)
    logger.info("%s: vLLM's layout is read off its loader, there is no table of it", model_type)
    return trace_vllm_atlas(empty_model(vllm_config), sizes)


def free_replaced_weights(vllm_config: VllmConfig) -> None:
    """Return the memory of the weights that the trainer's memory has replaced to the device.

    In sleep mode the weights come from a pool of vLLM's, which keeps what is freed in it after the model is
    loaded. Entering the pool again trims it (vllm/device_allocator/cumem.py:399)."""
    if vllm_config.model_config.enable_cumem_allocator:
        from vllm.device_allocator import get_mem_allocator_instance

        with get_mem_allocator_instance().use_memory_pool(tag="weights"):
            pass


def find_packed_experts(model: torch.nn.Module) -> dict[str, PackedExperts]:
    """Return parameter name -> PackedExperts of every expert weight that vLLM prepacks on a CPU.

    The result is empty on a GPU and for dense models."""
    if not current_platform.is_cpu():
        return {}
    from megarl.rollout.cpu_experts import PackedExperts

    return {
        f"{prefix}.{name}": packed
        for prefix, module in model.named_modules()
        for name, packed in PackedExperts.find(module).items()
    }


def expose_weights(
    model: torch.nn.Module,
    atlas: Atlas,
    packed: dict[str, PackedExperts],
    derived: Collection[str],
) -> dict[str, torch.Tensor]:
    """Return a [rows, cols] view of each live weight, by name; of the plain matrix if vLLM prepacks that
    expert weight.

    Undoes the CPU prepack of linear layers.

    Args:
        derived: parameters that vLLM derives from others.

    On CPU vLLM moves the weights of linear layers into oneDNN's format and leaves empty parameters behind.
    These parameters get storage again (0 until the first transfer), and each layer uses vLLM's own fallback.
    lm_head keeps its parameter but multiplies with a packed copy. A tied lm_head owns no parameter and does
    the same. Therefore *every* module is switched.

    Raises: RuntimeError if the model's parameters are not those of the atlas."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if name not in derived}
    parameters |= {name: experts.plain for name, experts in packed.items()}
    if parameters.keys() != atlas.keys():
        raise RuntimeError(
            f"vLLM's parameters are not those that megarl knows for this model. Only in vLLM: "
            f"{sorted(parameters.keys() - atlas.keys())}; only in the atlas: "
            f"{sorted(atlas.keys() - parameters.keys())}"
        )
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            check_version()
            module.cpu_linear = F.linear
    for name, param in atlas.items():
        weight = parameters[name]
        if weight.numel() == 0:
            weight.data = torch.zeros(param.rows, param.cols, dtype=weight.dtype, device=weight.device)
        if weight.numel() != param.rows * param.cols or not weight.is_contiguous():
            raise RuntimeError(
                f"vLLM's {name} is {list(weight.shape)} with strides {weight.stride()}; the atlas has "
                f"{param.rows} x {param.cols}"
            )
        if param.padding_rows:  # vLLM masks the logits of padding, but the memory must hold numbers
            weight.data[param.rows - param.padding_rows :].zero_()
    return {name: parameters[name].data.view(param.rows, param.cols) for name, param in atlas.items()}
