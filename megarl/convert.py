"""`megarl convert`: carry a Hugging Face folder through Megatron's shards into another Hugging Face folder.

    megarl convert --model IN --save OUT [--tensor-model-parallel-size 2] [--pipeline-model-parallel-size 2] [--bf16]

Loads the weights as training would at that layout, exports them, and compares: without a change of dtype the result must be
bit-equal. Use it to change the dtype, or to prove that a model survives the way into training and back."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megarl.config.check_parallel import split_findings
from megarl.config.check_paths import free_name
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import ModelConfig, ParallelConfig


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    world_size = arguments.tensor_model_parallel_size * arguments.pipeline_model_parallel_size
    if "RANK" in os.environ:
        return convert(arguments, world_size)
    problems = find_problems(arguments)
    if problems:
        sys.stderr.write("\n".join(problems) + "\n")
        return 2
    from megarl.driver.launch import launch

    return launch(world_size, argv, "megarl.convert")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("megarl convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    parser.add_argument("--model", required=True, help="folder to read: config.json and *.safetensors")
    parser.add_argument("--save", required=True, help="folder to write; must not exist, or be empty")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1, help="layout to go through")
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1, help="layout to go through")
    parser.add_argument("--bf16", action="store_true", help="write bfloat16; default: float32")
    return parser.parse_args(argv)


def find_problems(arguments: argparse.Namespace) -> list[str]:
    """Everything that is wrong with the arguments, each with a value that works."""
    shape, save = ModelShape.load(arguments.model), Path(arguments.save)
    tp, pp = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    problems = []
    if save.exists() and (not save.is_dir() or any(save.iterdir())):
        problems.append(f"--save ({save}): exists and is not empty. Try --save {free_name(save)}.")
    if not any(Path(arguments.model).glob("*.safetensors")):
        problems.append(f"--model ({arguments.model}): holds no *.safetensors. Give a folder with weights.")
    for name, size in (("tensor", tp), ("pipeline", pp)):
        if size < 1:
            problems.append(f"--{name}-model-parallel-size ({size}): must be at least 1.")
    return problems + (list(split_findings(shape, tp, pp)) if min(tp, pp) >= 1 else [])


def convert(arguments: argparse.Namespace, world_size: int) -> int:
    """One rank's part. Rank 0 compares what was written with what was read."""
    from megarl.workers.process import quiet_libraries

    quiet_libraries()
    import torch
    import torch.distributed as dist

    from megarl.megatron.mesh import create_groups
    from megarl.megatron.policy import Policy
    from megarl.reshard.transfer import load_hf, save_hf
    from megarl.workers.megatron_role import megatron_atlases
    from megarl.workers.worker import join_world

    join_world(timeout_s=1800)
    mesh = MeshSpec(tuple(range(world_size)), arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size)
    create_groups(mesh)
    shape = ModelShape.load(arguments.model)
    parallel = ParallelConfig(tensor_model_parallel_size=mesh.tp, pipeline_model_parallel_size=mesh.pp)
    policy = Policy(shape, mesh, ModelConfig(model=arguments.model, bf16=arguments.bf16), parallel)
    atlases = megatron_atlases(shape, mesh, parallel)
    load_hf(arguments.model, atlases[dist.get_rank()], policy.parameters, shape)
    save_hf(arguments.save, arguments.model, shape, atlases, policy.parameters)
    if dist.get_rank() == 0:
        compare(arguments.model, arguments.save, torch.bfloat16 if arguments.bf16 else torch.float32)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def compare(source: str, written: str, dtype) -> None:
    """Read both folders again and compare every tensor, in `dtype`. Raises RuntimeError naming those that differ."""
    import torch
    from safetensors import safe_open

    from megarl.reshard.transfer import weight_files

    def read(files: dict, name: str):
        with safe_open(files[name], framework="pt") as file:
            return file.get_tensor(name)

    before, after = weight_files(source), weight_files(written)
    different = [name for name in after if not torch.equal(read(before, name).to(dtype), read(after, name))]
    if different:
        raise RuntimeError(f"{len(different)} tensors changed on the way, first {different[0]}: this is a bug in megarl, please report it")
    sys.stdout.write(f"{len(after)} tensors, equal to {source} in {dtype}: {written}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
