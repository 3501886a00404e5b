"""vLLM's weights as destinations of a reshard plan: the weight-transfer engine that vLLM builds in its worker.

    built                 at the end of load_model: every weight becomes a plain [rows, cols] tensor
    init_transfer_engine  in the trainer's process: hands the tensors over; in one of vLLM's own: makes a Puller
    start / receive / finish_weight_update   one version: receive copies, finish makes it the one that generates"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from megarl.config.hf_config import ModelShape
from megarl.reshard.atlas import Atlas
from megarl.reshard.copier import View
from megarl.reshard.vllm_atlas import vllm_atlas
from megarl.rollout.plugin import check_version
from megarl.rollout.puller import Puller


@dataclass
class InitInfo(WeightTransferInitInfo):
    """From the rank that drives the engine."""

    expose: Callable[[dict[str, View]], None] | None = None
    """In its process: is called with the live weights, by the names of the atlas."""
    ranks: list[int] | None = None
    """Else: rank in the plan of each tensor-parallel rank of the engine."""
    double_buffer: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    copy: Callable[[], object] | None = None
    """In the trainer's process: fills the weights. Collective over the ranks whose weights travel as messages."""
    order: bytes = b""
    """Else: a pickled Order."""


class MegarlWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls, update_info_cls, supports_draft_weight_update = InitInfo, UpdateInfo, False

    def __init__(self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        shape = ModelShape.load(vllm_config.model_config.model)
        self.atlas = vllm_atlas(shape, get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank())
        self.tensors = expose_weights(model, self.atlas)
        self.puller: Puller | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if init_info.expose is not None:
            init_info.expose(self.tensors)
        else:
            rank = init_info.ranks[get_tensor_model_parallel_rank()]
            self.puller = Puller(rank, self.model, self.tensors, init_info.double_buffer)

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """In a process of vLLM's own with two buffers this returns at once; `Puller.wait` says when it is over."""
        if update_info.copy is not None:
            update_info.copy()
        else:
            self.puller.begin(pickle.loads(update_info.order))

    def finish_weight_update(self) -> None:
        if self.puller is not None:
            self.puller.commit()

    def shutdown(self) -> None:
        self.puller = None


def expose_weights(model: torch.nn.Module, atlas: Atlas) -> dict[str, torch.Tensor]:
    """Name -> [rows, cols] view of each live weight. Undoes the CPU prepack.

    On CPU vLLM moves the weights of linear layers into oneDNN's format and leaves empty parameters behind; they get storage
    again (0 until the first transfer), and each layer multiplies with it by vLLM's own fallback. lm_head keeps its parameter
    but multiplies with a packed copy, as does a tied one, which owns no parameter: so *every* module is switched.

    Raises: RuntimeError if the model's parameters are not those of the atlas."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != atlas.keys():
        raise RuntimeError(f"vLLM's parameters are not those that megarl knows for this model. Only in vLLM: "
                           f"{sorted(parameters.keys() - atlas.keys())}; only in the atlas: {sorted(atlas.keys() - parameters.keys())}")
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            check_version()
            module.cpu_linear = F.linear
    for name, param in atlas.items():
        weight = parameters[name]
        if weight.numel() == 0:
            weight.data = torch.zeros(param.rows, param.cols, dtype=weight.dtype, device=weight.device)
        if weight.numel() != param.rows * param.cols or not weight.is_contiguous():
            raise RuntimeError(f"vLLM's {name} is {list(weight.shape)} with strides {weight.stride()}; the atlas has "
                               f"{param.rows} x {param.cols}")
    for name, param in atlas.items():  # vocabulary padding: vLLM masks its logits, but it must hold numbers
        if param.padding_rows:
            parameters[name].data[param.rows - param.padding_rows :].zero_()
    return {name: parameters[name].data.view(param.rows, param.cols) for name, param in atlas.items()}
