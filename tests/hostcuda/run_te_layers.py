"""Run under torchrun with 2 ranks: build every family from Transformer Engine's layers, and compare names,
shapes and tensor-parallel marks of the parameters with the atlas.

The classes are Transformer Engine's own. Its compiled extension is not there: whoever calls a kernel gets an
error. Writes report_<rank>.json for test_te_layers.py.

    torchrun --nproc-per-node 2 tests/hostcuda/run_te_layers.py OUT_FOLDER [gemma3 ...]"""

from __future__ import annotations

import functools
import json
import os
import sys
import types
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))
from families import CONFIGS, LAYOUTS, config

if TYPE_CHECKING:
    from megarl.megatron.trained_model import TrainedModel


class Extension(types.ModuleType):
    """Stands for the compiled module transformer_engine_torch: types without members, and no kernels."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _type_of(name) if name[0].isupper() else functools.partial(_refuse, name)
        setattr(self, name, value)
        return value


class _Enum(type):
    """Gives an enumeration any member that is asked for. A member is a number, as the real ones can be turned into.

    `__members__` has those that were asked for."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls.__members__.setdefault(name, zlib.crc32(f"{cls.__name__}.{name}".encode()))


def _type_of(name: str) -> type:
    return _Enum(name, (), {"__members__": {}})


def _refuse(name: str, *arguments: object, **options: object) -> None:
    raise NotImplementedError(f"transformer_engine_torch.{name} is a kernel, and was not built")


def supply_extension() -> None:
    """Make `import transformer_engine.pytorch` work without the compiled extension."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # do not look for CUDA's libraries
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the extension is missing
        import transformer_engine.common as common
    extension = Extension("transformer_engine_torch")
    extension.get_cudnn_version = lambda: 92000
    extension.get_cublasLt_version = lambda: 130000
    extension.get_num_cublas_streams = lambda: 4
    common.load_framework_extension = lambda framework: sys.modules.update({extension.__name__: extension})


def build(folder: Path, layout: str) -> TrainedModel:
    from run_families import MESHES, parallel

    from megarl.config.hf_config import ModelShape
    from megarl.config.schema import ModelConfig
    from megarl.megatron.policy import Policy

    config = ModelConfig(model=str(folder), bf16=False)
    return Policy(ModelShape.load(folder), MESHES[layout], config, parallel(layout))


def differences(policy: TrainedModel, layout: str) -> list[str]:
    """Return a line per parameter of this rank that is not what the atlas says."""
    from run_families import parallel

    from megarl.reshard.megatron_atlas import megatron_atlases

    mesh = policy.mesh
    atlases = megatron_atlases(policy.shape, mesh, te_spec=True, qkv_layout=parallel(layout).qkv_layout)
    atlas = atlases[dist.get_rank()]
    found = {name: tuple(parameter.shape) for name, parameter in policy.parameters.items()}
    expected = {name: (param.rows, param.cols) for name, param in atlas.items()}
    lines = [
        f"{name}: {found.get(name)}, and {expected.get(name)} in the atlas"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    for name, parameter in policy.named_parameters():
        if mesh.tp == 1 or ".experts." in name or name not in atlas:
            continue
        whole = all(atlases[rank][name].pieces == atlas[name].pieces for rank in mesh.ranks)
        marked = getattr(parameter, "tensor_model_parallel", False)
        if marked == whole:
            lines.append(f"{name}: {'whole' if whole else 'split'}, and marked {marked}")
    return lines


def find_planted(policy: TrainedModel, layout: str) -> None:
    """Plant a norm that is marked as split and a weight that is too long. Exactly these must be reported."""
    name, norm = next((n, p) for n, p in policy.named_parameters() if n.endswith("layer_norm_weight"))
    norm.tensor_model_parallel = True
    longer = next(name for name in policy.parameters if name.endswith("linear_fc2.weight"))
    policy.parameters[longer] = torch.cat([policy.parameters[longer]] * 2)
    assert sorted(line.partition(":")[0] for line in differences(policy, layout)) == sorted([name, longer])


def main(out: Path, *only: str) -> None:
    supply_extension()
    from run_families import MESHES

    from megarl.megatron.mesh import create_groups
    from megarl.megatron.transformer_engine import transformer_engine_problem
    from megarl.workers.worker import join_world

    assert transformer_engine_problem() is None, transformer_engine_problem()
    names, rank, report = only or tuple(CONFIGS), int(os.environ["RANK"]), {}
    join_world(60)
    for mesh in MESHES.values():
        create_groups(mesh)
    for name in names:
        if rank == 0:
            config(name).save_pretrained(out / name)
        dist.barrier()
        for layout in LAYOUTS[name]:
            if rank in MESHES[layout].ranks:
                policy = build(out / name, layout)
                report[f"{name}/{layout}"] = {
                    "different": differences(policy, layout),
                    "of Transformer Engine": sum(
                        type(module).__module__.startswith("transformer_engine")
                        for module in policy.chunks[0].modules()
                    ),
                }
    policy = build(out / "qwen3", "tp2")
    find_planted(policy, "tp2")
    (out / f"report_{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
