"""Save and load the checkpoint of a model that Megatron trains: weights, Adam's moments and step counts.

The tensors are views of live memory, cut into rectangles of the canonical tensors. A distributed optimizer
holds stretches of parameters, and each stretch is at most three rectangles. Where there are fp32 master
weights, the checkpoint stores them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.checkpoint.load import load, verify
from megarl.checkpoint.manifest import WEIGHTS
from megarl.checkpoint.rank_group import RankGroup
from megarl.checkpoint.rectangles import Rectangle, rectangles_of
from megarl.checkpoint.save import save
from megarl.config.hf_config import function_fields
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.inner_optimizers import inner_optimizers, local
from megarl.megatron.trained_model import TrainedModel
from megarl.reshard.atlas import EMBEDDING, Atlas, LocalParam, Sizes, hf_sizes
from megarl.reshard.lora_atlas import adapter_sizes

MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(
    folder: str | os.PathLike,
    model: TrainedModel,
    atlas: Atlas,
    state: dict[str, object] | None = None,
) -> None:
    """Write a model, its optimizer and its learning-rate schedule to `folder`, or raise CheckpointError on
    every rank. Collective over the model's ranks.

    To write while training goes on, call `save` with copies of `saved_rectangles` and `model_state` in a
    thread, with a separate process group.

    Args:
        atlas: the atlas of this rank.
        state: other data to store, for JSON. `load_checkpoint` returns it.
    Raises: CheckpointError, on every rank."""
    group = model.groups.intra_dist_opt
    save(folder, saved_rectangles(model, atlas), model_state(model, group) | {"job": state or {}}, group)


def load_checkpoint(
    folder: str | os.PathLike,
    model: TrainedModel,
    atlas: Atlas,
    weights_only: bool = False,
    digests: bool = True,
) -> dict[str, object]:
    """Restore a checkpoint, however many ranks wrote it, and return the `state` that was saved with it.
    Collective over the model's ranks.

    The learning rate is the one that this job's flags give at the restored step.

    Args:
        weights_only: leave moments and schedule as they are, e.g. for a checkpoint of `megarl convert`, which
            has none. A frozen model always reads only weights.
        digests: False if `verify_checkpoint` has just checked them.
    Returns: the `state` that was saved.
    Raises: CheckpointError, on every rank, if the folder holds no complete checkpoint of this model. The
        model is then unchanged."""
    resume = model.optimizer is not None and not weights_only
    state = load(
        folder,
        list(_loaded_rectangles(model, atlas, resume)),
        model.groups.intra_dist_opt,
        digests,
        _function_of(model),
    )
    for name, param in atlas.items():
        if param.padding_rows:
            model.parameters[name][param.rows - param.padding_rows :].zero_()
    if resume:
        _set_steps(model, state)
    return state["job"]


def verify_checkpoint(folder: str | os.PathLike, model: TrainedModel, atlas: Atlas) -> None:
    """Check a checkpoint without loading it, and raise CheckpointError on every rank if `load_checkpoint`
    would raise it. Collective."""
    rectangles = list(_loaded_rectangles(model, atlas, resume=model.optimizer is not None))
    verify(folder, rectangles, model.groups.intra_dist_opt, model=_function_of(model))


def model_state(model: TrainedModel, group: dist.ProcessGroup) -> dict[str, object]:
    """Return the part of a checkpoint that is the same on every rank: dtype, parallel sizes, model and step
    counts. Collective."""
    state: dict[str, object] = {
        "dtype": str(model.config.params_dtype).removeprefix("torch."),
        "mesh": model.mesh.shape | model.mesh.expert_shape,
        "model": _function_of(model),
    }
    if model.optimizer is not None:
        steps = RankGroup(group).all(lambda: _optimizer_steps(model), int)  # 0 on a rank that updates nothing
        state |= {"optimizer_steps": max(steps), "schedule_steps": model.scheduler.num_steps}
    return state


def _function_of(model: TrainedModel) -> dict[str, object]:
    return function_fields(model.shape, model.adapters.lora if model.adapters else None)


# ------------------------------------------------------------------ rectangles


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The optimizer's tensors for the elements [start, start + length) of a parameter, each [length].

    Args:
        master: fp32 master weights, or None if the parameter itself is fp32."""

    start: int
    master: Tensor | None
    moments: dict[str, Tensor]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (kind, values) of the moments and the master weights."""
        yield from self.moments.items()
        if self.master is not None:
            yield WEIGHTS, self.master


def saved_rectangles(model: TrainedModel, atlas: Atlas) -> list[Rectangle]:
    """Return the parts of Hugging Face tensors (weights and moments) that this rank saves, as views of live
    memory.

    The first stage saves a tied embedding, because the last stage's copy may be cut differently."""
    sizes, stretches, out = _canonical_sizes(model), _stretches(model), []
    parameters = dict(model.named_parameters())
    for name, values in model.parameters.items():
        param = _param(atlas, name)
        if name.endswith("output_layer.weight") and any(piece.hf_name == EMBEDDING for piece in param.pieces):
            continue
        if name in stretches:
            for kind, part in stretches[name].tensors():
                out += rectangles_of(kind, param, sizes, part, stretches[name].start)
        if not _has_masters(model, parameters.get(name)):
            out += rectangles_of(WEIGHTS, param, sizes, values.view(-1))
    return out


def _loaded_rectangles(model: TrainedModel, atlas: Atlas, resume: bool) -> Iterator[Rectangle]:
    """Yield the parts of Hugging Face tensors that this rank loads, as views of the live memory to fill.

    They are all of its weights, also those whose master weights are on other ranks, and its own moments if it
    resumes."""
    sizes, stretches = _canonical_sizes(model), _stretches(model)
    for name, values in model.parameters.items():
        param = _param(atlas, name)
        yield from rectangles_of(WEIGHTS, param, sizes, values.view(-1))
        for kind, part in stretches[name].tensors() if name in stretches else ():
            if resume or kind == WEIGHTS:
                yield from rectangles_of(kind, param, sizes, part, stretches[name].start)


def _canonical_sizes(model: TrainedModel) -> Sizes:
    """Return (rows, columns) of each Hugging Face tensor of the model, including those of adapters."""
    return hf_sizes(model.shape) | (adapter_sizes(model.shape, model.adapters.lora) if model.adapters else {})


def _param(atlas: Atlas, name: str) -> LocalParam:
    if name not in atlas:
        raise ValueError(
            f"{name} is a parameter of the model, and of no canonical tensor: it cannot be saved or loaded"
        )
    return atlas[name]


# ------------------------------------------------------------------ Megatron's optimizers


def _has_masters(model: TrainedModel, parameter: torch.nn.Parameter | None) -> bool:
    """Return whether a parameter has master weights on any rank. `parameter` is None for a buffer."""
    return (
        model.optimizer is not None
        and parameter is not None
        and parameter.requires_grad
        and parameter.dtype != torch.float32
    )


def _stretches(model: TrainedModel) -> dict[str, _Stretch]:
    """Return parameter name -> the part that this rank's Adam updates; Adam's state is created before the
    first step. Raises ValueError under --optimizer-cpu-offload."""
    model.memory.use("parameters", *(["optimizer"] if model.optimizer is not None else []))
    out: dict[str, _Stretch] = {}
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    for inner in inner_optimizers(model.optimizer):
        if inner.config.use_precision_aware_optimizer:
            raise ValueError(
                "--optimizer-cpu-offload: its state cannot be saved or loaded yet. Leave it out."
            )
        _make_state(inner)
        for parameter, start, main in _updated(inner, model):
            state = inner.optimizer.state[main]
            out[name_of[parameter]] = _Stretch(
                start,
                local(main.data).view(-1) if _has_masters(model, parameter) else None,
                {kind: local(state[kind]).view(-1) for kind in MOMENTS},
            )
    return out


def _updated(inner, model: TrainedModel) -> Iterator[tuple[torch.nn.Parameter, int, Tensor]]:
    """Yield (model parameter, first element, tensor that Adam updates).

    `inner` is an optimizer of Megatron 0.19.2."""
    if model.sharded:
        yield from (found for ddp in model.sharded for found in ddp.optimized() if local(found[2]).numel())
    elif hasattr(
        inner, "gbuf_ranges"
    ):  # distributed: each rank has a range of each bucket of the gradient buffers
        for parameter, main in (
            *_pairs(inner.model_fp32_groups, inner.shard_fp32_groups),
            *_pairs(inner.model_float16_groups, inner.shard_fp32_from_float16_groups),
        ):
            yield parameter, inner._get_model_param_range_map(parameter)["param"].start, main
    elif hasattr(inner, "float16_groups"):
        for parameter, main in _pairs(inner.float16_groups, inner.fp32_from_float16_groups):
            yield parameter, 0, main
        for parameter in itertools.chain.from_iterable(inner.fp32_from_fp32_groups):
            yield parameter, 0, parameter
    else:
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, 0, parameter


def _pairs(parameters: list[list], mains: list[list]) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    return zip(itertools.chain.from_iterable(parameters), itertools.chain.from_iterable(mains), strict=True)


def _make_state(inner) -> None:
    """Create Adam's state as the first step would.

    Megatron's own function leaves out the counter that PyTorch's Adam keeps beside each parameter."""
    with cpu_megatron():
        inner.init_state_fn(inner.optimizer, inner.config)
    if isinstance(inner.optimizer, torch.optim.AdamW):
        for group in inner.optimizer.param_groups:
            # A fused kernel reads the counter beside the parameter (torch/optim/adam.py, `_init_group`).
            on_device = group["fused"] or group["capturable"]
            for parameter in group["params"]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
                inner.optimizer.state[parameter].setdefault("step", step)


def _optimizer_steps(model: TrainedModel) -> int:
    """Return the number of steps of this rank's optimizers, or 0 if the rank updates nothing."""
    steps = []
    for inner in inner_optimizers(model.optimizer):
        steps += [state["step"] for state in inner.optimizer.state.values() if "step" in state]
        # Transformer Engine's Adam keeps the counter in the parameter group.
        steps += [group["step"] for group in inner.optimizer.param_groups if "step" in group]
    return int(max(steps, default=0))


def _set_steps(model: TrainedModel, state: dict[str, object]) -> None:
    for inner in inner_optimizers(model.optimizer):
        if isinstance(inner.optimizer, torch.optim.AdamW):
            for of_parameter in inner.optimizer.state.values():
                of_parameter["step"].fill_(float(state["optimizer_steps"]))
        else:
            for group in inner.optimizer.param_groups:
                group["step"] = state["optimizer_steps"]
    model.scheduler.num_steps = state["schedule_steps"]
    model.scheduler.step(0)  # the learning rate of that step
