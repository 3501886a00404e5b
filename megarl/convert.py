"""`megarl convert`: Hugging Face folders, megarl checkpoints and Megatron's checkpoints into Hugging Face folders or megarl checkpoints.

    megarl convert --model M --save OUT --dtype bfloat16                      another dtype, other shard sizes
    megarl convert --model M --load runs/a/checkpoint --save OUT              of a megarl checkpoint, a Hugging Face folder
    megarl convert --model M --load iter_0000100 --save OUT                   of a Megatron checkpoint (--ckpt-format torch_dist)
    megarl convert --model M --save OUT --to checkpoint                       a checkpoint of the weights
    megarl convert --model M --save OUT --tensor-model-parallel-size 2        through Megatron's shards: the proof that nothing is lost

Rows move from file to file, without ranks; memory does not grow with the model. A checkpoint serves any layout, so there is none to name.
With a parallel size, ranks are started that load the weights as training does at that layout, write them again, and compare every tensor."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.check_parallel import MegatronRole, parallel_findings
from megarl.config.check_paths import free_name
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec, megatron_mesh
from megarl.config.schema import ModelConfig, ParallelConfig

if TYPE_CHECKING:
    import torch

    from megarl.checkpoint.sources import WeightSource

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    through_megatron = any(getattr(arguments, name) is not None for name in SIZES)
    if "RANK" in os.environ and through_megatron:
        return convert_on_ranks(arguments)
    problems = find_problems(arguments)
    if problems:
        sys.stderr.write("\n".join(problems) + "\n")
        return 2
    if through_megatron:
        from megarl.driver.launch import launch_ranks

        return launch_ranks(argv, len(mesh_of(arguments).ranks), "megarl.convert")
    return convert(arguments)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "megarl convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        required=True,
        help="Hugging Face folder: config.json, tokenizer files, and the weights if --load is not given",
    )
    parser.add_argument(
        "--load",
        help="weights of this model: a megarl checkpoint, a Megatron checkpoint, or another Hugging Face folder",
    )
    parser.add_argument("--save", required=True, help="folder to write; must not exist, or be empty")
    parser.add_argument(
        "--to",
        choices=("hf", "checkpoint"),
        default="hf",
        help="what to write; default: hf, a Hugging Face folder",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: that of the files; into a Hugging Face folder of a megarl checkpoint, that of the model that was trained",
    )
    parser.add_argument("--max-shard-size", default="5GB", help="of a file, such as 500MB; default: 5GB")
    for name in SIZES:
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            help="go through Megatron's shards on ranks, at this layout",
        )
    return parser.parse_args(argv)


def find_problems(arguments: argparse.Namespace) -> list[str]:
    """Everything that is wrong with the arguments, each with a value that works. Without torch."""
    shape, save = load_shape(arguments), Path(arguments.save)
    problems = []
    if save.exists() and (not save.is_dir() or any(save.iterdir())):
        problems.append(f"--save ({save}): exists and is not empty. Try --save {free_name(save)}.")
    if arguments.load is None and not any(Path(arguments.model).glob("*.safetensors")):
        problems.append(
            f"--model ({arguments.model}): holds no *.safetensors. Give a folder with weights, or --load."
        )
    if arguments.load is not None and not Path(arguments.load).is_dir():
        problems.append(f"--load ({arguments.load}): there is no such folder.")
    if (
        arguments.to == "checkpoint"
        and arguments.dtype == "float16"
        and any(getattr(arguments, name) is not None for name in SIZES)
    ):
        problems.append(
            "--dtype (float16): Megatron's shards are float32 or bfloat16 here. Leave the parallel sizes out, or try --dtype bfloat16."
        )
    if shard_bytes(arguments.max_shard_size) is None:
        problems.append(
            f"--max-shard-size ({arguments.max_shard_size}): must be a number and KB, MB or GB. Try 5GB."
        )
    for name in SIZES:
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            problems.append(f"--{name.replace('_', '-')} ({getattr(arguments, name)}): must be at least 1.")
    if all((getattr(arguments, name) or 1) >= 1 for name in SIZES):
        shared = frozenset(field.name for field in fields(ParallelConfig))
        problems += parallel_findings(MegatronRole("model", parallel_of(arguments), None, shape, shared))
    return problems


def load_shape(arguments: argparse.Namespace) -> ModelShape:
    """Of --model; with a value head if the weights have one."""
    config = Path(arguments.model) / "config.json"
    try:
        names = json.loads(config.read_text()).get("architectures") or [] if arguments.load is None else []
    except (OSError, ValueError, AttributeError):
        names = []  # ModelShape.load says it better
    if arguments.load is not None and (manifest := Path(arguments.load) / "checkpoint.json").is_file():
        names = (
            ["ForSequenceClassification"]
            if '"score.weight"' in manifest.read_text(encoding="utf-8", errors="replace")
            else []
        )
    return ModelShape.load(
        arguments.model, value_head=any(name.endswith("ForSequenceClassification") for name in names)
    )


def shard_bytes(text: str) -> int | None:
    """The size that is meant by 5GB; None if none is."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(KB|MB|GB)", text.upper())
    return max(1, int(float(match[1]) * UNITS[match[2]])) if match else None


def parallel_of(arguments: argparse.Namespace) -> ParallelConfig:
    sizes = {name: size for name in SIZES if (size := getattr(arguments, name)) is not None}
    return ParallelConfig(**sizes, sequence_parallel=sizes.get("tensor_model_parallel_size", 1) > 1)


def mesh_of(arguments: argparse.Namespace) -> MeshSpec:
    """The fewest ranks that the sizes allow."""
    parallel = parallel_of(arguments)
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    stage = math.lcm(tp, ep * (parallel.expert_tensor_parallel_size or tp))
    return megatron_mesh(tuple(range(stage * parallel.pipeline_model_parallel_size)), parallel)


def convert(arguments: argparse.Namespace) -> int:
    """From file to file, in this process."""
    from megarl.checkpoint.sources import open_weights
    from megarl.checkpoint.stream import write_checkpoint, write_hf

    shape, save = load_shape(arguments), Path(arguments.save)
    if save.exists():
        save.rmdir()  # it is empty; a folder appears when it is whole
    limit = shard_bytes(arguments.max_shard_size)
    try:
        source = open_weights(Path(arguments.load or arguments.model), shape)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"megarl convert: {error}\n")
        return 2
    dtype = wanted_dtype(arguments, source)
    try:
        source.check()
        if arguments.to == "checkpoint":
            write_checkpoint(save, source, shape, dtype, limit)
        else:
            write_hf(save, source, shape, Path(arguments.model), dtype, limit)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"megarl convert: {error}\n")
        return 1
    dtypes = sorted({str(dtype or stored) for stored, _ in source.tensors.values()})
    sys.stdout.write(f"{len(source.tensors)} tensors in {' and '.join(dtypes)}: {save}\n")
    return 0


def wanted_dtype(arguments: argparse.Namespace, source: WeightSource) -> torch.dtype | None:
    """Of the files; None: each tensor's own."""
    import torch

    if arguments.dtype is not None:
        return getattr(torch, arguments.dtype)
    return source.dtype if arguments.to == "hf" else None


def convert_on_ranks(arguments: argparse.Namespace) -> int:
    """One rank's part of the way through Megatron. Rank 0 compares what was written with what was read."""
    from megarl.driver.torchrun import DRIVER_PID
    from megarl.workers.process import end_with_parent, quiet_libraries

    if launcher := os.environ.get(DRIVER_PID):
        end_with_parent(int(launcher))
    quiet_libraries()
    import torch
    import torch.distributed as dist

    from megarl.checkpoint.sources import CheckpointWeights, HFWeights, open_weights
    from megarl.megatron.mesh import create_groups
    from megarl.megatron.policy import Policy
    from megarl.megatron.training_state import load_checkpoint, save_checkpoint
    from megarl.megatron.value_model import ValueModel
    from megarl.reshard.transfer import load_hf, save_hf
    from megarl.workers.megatron_role import megatron_atlases
    from megarl.workers.worker import join_world

    join_world(timeout_s=1800)
    mesh, shape, parallel = mesh_of(arguments), load_shape(arguments), parallel_of(arguments)
    folder = Path(arguments.load or arguments.model)
    source = open_weights(folder, shape)
    if not isinstance(source, (CheckpointWeights, HFWeights)):
        raise ValueError(
            f"--load ({folder}): Megatron's checkpoints are converted without ranks. Leave the parallel sizes out, or convert it first."
        )
    stored = {dtype for dtype, _ in source.tensors.values()}
    dtype = wanted_dtype(arguments, source) or (stored.pop() if len(stored) == 1 else torch.float32)
    create_groups(mesh)
    bf16 = dtype == torch.bfloat16  # else fp32, which holds every value of fp16
    model = (ValueModel if shape.value_head else Policy)(
        shape, mesh, ModelConfig(model=arguments.model, bf16=bf16), parallel
    )
    atlases = megatron_atlases(shape, mesh, parallel)
    atlas = atlases[dist.get_rank()]
    if isinstance(source, HFWeights):
        load_hf(folder, atlas, model.parameters, shape)
    else:
        load_checkpoint(folder, model, atlas, weights_only=True)
    if arguments.to == "hf":
        save_hf(
            arguments.save,
            arguments.model,
            shape,
            atlases,
            model.parameters,
            dtype=dtype,
            max_shard_bytes=shard_bytes(arguments.max_shard_size),
        )
    else:
        if dist.get_rank() == 0 and Path(arguments.save).exists():
            Path(arguments.save).rmdir()
        dist.barrier()
        save_checkpoint(arguments.save, model, atlas)
    if dist.get_rank() == 0:
        compare(source, open_weights(Path(arguments.save), shape), folder, arguments.save)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def compare(source: WeightSource, written: WeightSource, folder: Path, save: str) -> None:
    """Read both again and compare every tensor, in the dtype of the second. Raises RuntimeError naming those that differ."""
    from megarl.checkpoint.stream import row_blocks

    different = [
        name
        for name, (dtype, _) in written.tensors.items()
        if not all(
            source.read(name, *rows).to(dtype).equal(written.read(name, *rows))
            for rows in row_blocks(source, name)
        )
    ]
    if different:
        raise RuntimeError(
            f"{len(different)} tensors changed on the way, first {different[0]}: this is a bug in megarl, please report it"
        )
    dtypes = " and ".join(sorted({str(dtype) for dtype, _ in written.tensors.values()}))
    sys.stdout.write(f"{len(written.tensors)} tensors, equal to {folder} in {dtypes}: {save}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
