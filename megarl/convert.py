"""Convert Hugging Face folders, megarl checkpoints and Megatron checkpoints (`megarl convert`).

    megarl convert --model M --save OUT --dtype bfloat16            another dtype, other shard sizes
    megarl convert --model M --load runs/a/checkpoint --save OUT    a megarl checkpoint to Hugging Face
    megarl convert --model M --load iter_0000100 --save OUT         a Megatron checkpoint (torch_dist)
    megarl convert --model M --save OUT --to checkpoint             a megarl checkpoint of the weights
    megarl convert --model M --save OUT --tensor-model-parallel-size 2
                                                                    through Megatron's shards, as a proof

Rows move from file to file without ranks, and memory does not grow with the model. A megarl checkpoint serves
any layout, so no layout has to be named. With a parallel size, ranks are started that load the weights as
training does at that layout, write them again, and compare every tensor. Then the log-probs of a few tokens
by Megatron are compared with those by plain transformers. This finds errors of the mapping that loading and
writing share, which change no tensor. --no-compare-forward leaves it out."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.flags import flag_name
from megarl.config.hf_config import ModelShape
from megarl.config.hub import local_model
from megarl.config.mesh import MeshSpec, megatron_mesh
from megarl.config.rules_files import free_name
from megarl.config.rules_layout import MegatronRole, parallel_errors
from megarl.config.schema import ModelConfig, ParallelConfig
from megarl.files.checkpoints import MANIFEST
from megarl.files.writing import obstacle
from megarl.reshard.hf_folder import is_sequence_classifier

if TYPE_CHECKING:
    import torch

    from megarl.checkpoint.sources import WeightSource
    from megarl.megatron.trained_model import TrainedModel

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_RANKS_WAIT_S = 1800.0
COMPARED_SEQUENCES, COMPARED_TOKENS = 4, 24
FORWARD_LIMIT = 1e-3
"""Largest difference of log-probs that rounding in fp32 explains. It was 1e-6 per layer at the measured
sizes; the limit leaves room for deep models."""
MOST_REROUTED = 0.1
"""Share of tokens that rounding may send to other experts of a mixture."""
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: list[str]) -> int:
    """Convert as the arguments say, and return the exit code: 0, 1 for a failure, 2 for arguments or weights
    that cannot be read."""
    arguments = parse(argv)
    is_rank = "RANK" in os.environ and arguments.sizes
    if not is_rank and (problems := find_problems(arguments)):
        sys.stderr.write("\n".join(problems) + "\n")
        return 2
    exit_code = 1 if is_rank else 2  # the arguments name no weights that can be read
    try:
        if is_rank:
            return convert_on_ranks(arguments)
        source = open_source(arguments)
        exit_code = 1  # the conversion fails
        source.check()
        if not arguments.sizes:
            return convert(arguments, source)
        from megarl.checkpoint.stream import check_room

        check_room(Path(arguments.save), source, load_shape(arguments), dtype_on_ranks(arguments, source))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"megarl convert: {error}\n")
        return exit_code
    from megarl.trainer.launch import launch_ranks

    return launch_ranks(argv, len(mesh_of(arguments).ranks), "megarl.convert")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "megarl convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        type=local_model,
        required=True,
        help="Hugging Face folder: config.json, tokenizer files, and the weights if --load is not given",
    )
    parser.add_argument(
        "--load",
        type=local_model,
        help="weights of this model: a checkpoint of megarl or Megatron, or another Hugging Face folder",
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
        help="default: that of the files; into a Hugging Face folder of a megarl checkpoint, that "
        "of the model that was trained",
    )
    parser.add_argument("--max-shard-size", default="5GB", help="of a file, such as 500MB; default: 5GB")
    for name in SIZES:
        parser.add_argument(
            f"--{flag_name(name)}",
            type=int,
            help="go through Megatron's shards on ranks, at this layout",
        )
    parser.add_argument(
        "--no-compare-forward",
        dest="compare_forward",
        action="store_false",
        help="with a parallel size: do not compare Megatron's log-probs with those of transformers, "
        "which needs the whole model in fp32 on rank 0",
    )
    arguments = parser.parse_args(argv)
    arguments.sizes = {name: size for name in SIZES if (size := getattr(arguments, name)) is not None}
    return arguments


def find_problems(arguments: argparse.Namespace) -> list[str]:
    """Return one line per error in the arguments, with a value that works, or []. Imports no torch."""
    shape, save = load_shape(arguments), Path(arguments.save)
    problems = []
    if save.exists() and (not save.is_dir() or any(save.iterdir())):
        problems.append(f"--save ({save}): exists and is not empty. Try --save {free_name(save)}.")
    elif save.is_symlink() and save.exists():
        problems.append(
            f"--save ({save}): is a link to a folder, and must be the folder itself, which the result "
            f"replaces. Try --save {save.resolve()}."
        )
    elif (why := obstacle(save)) is not None:
        problems.append(f"--save ({save}): cannot be written: {why}. Name a folder that can be created.")
    if arguments.load is None and not any(Path(arguments.model).glob("*.safetensors")):
        problems.append(
            f"--model ({arguments.model}): holds no *.safetensors. Give a folder with weights, or --load."
        )
    if arguments.load is not None and not Path(arguments.load).is_dir():
        problems.append(f"--load ({arguments.load}): there is no such folder.")
    if arguments.to == "checkpoint" and arguments.dtype == "float16" and arguments.sizes:
        problems.append(
            "--dtype (float16): Megatron's shards are float32 or bfloat16 here. Leave the parallel "
            "sizes out, or try --dtype bfloat16."
        )
    if shard_bytes(arguments.max_shard_size) is None:
        problems.append(
            f"--max-shard-size ({arguments.max_shard_size}): must be a number and KB, MB or GB. Try 5GB."
        )
    below_1 = {name: size for name, size in arguments.sizes.items() if size < 1}
    problems += [f"--{flag_name(name)} ({size}): must be at least 1." for name, size in below_1.items()]
    if not below_1:
        shared = frozenset(field.name for field in fields(ParallelConfig))
        problems += parallel_errors(MegatronRole("model", parallel_of(arguments), None, shape, shared))
    return problems


def load_shape(arguments: argparse.Namespace) -> ModelShape:
    """Return the sizes of the model of --model (layers, hidden size, ...), with a value head if the weights
    have one."""
    weights = Path(arguments.load or arguments.model)
    try:
        if (manifest := weights / MANIFEST).is_file():
            value_head = '"score.weight"' in manifest.read_text(encoding="utf-8", errors="replace")
        else:
            value_head = is_sequence_classifier(weights)
    except (OSError, ValueError, AttributeError, TypeError):
        value_head = False  # reading the shape or the weights reports the error with advice
    return ModelShape.load(arguments.model, value_head=value_head)


def shard_bytes(text: str) -> int | None:
    """Return the number of bytes that a text such as "5GB" means; None if it is not a size."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(KB|MB|GB)", text.upper())
    return max(1, int(float(match[1]) * UNITS[match[2]])) if match else None


def parallel_of(arguments: argparse.Namespace) -> ParallelConfig:
    sizes = arguments.sizes
    return ParallelConfig(**sizes, sequence_parallel=sizes.get("tensor_model_parallel_size", 1) > 1)


def mesh_of(arguments: argparse.Namespace) -> MeshSpec:
    """Return a mesh (ranks and parallel sizes) of as few ranks as the parallel sizes allow."""
    parallel = parallel_of(arguments)
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    stage = math.lcm(tp, ep * (parallel.expert_tensor_parallel_size or tp))
    return megatron_mesh(tuple(range(stage * parallel.pipeline_model_parallel_size)), parallel)


def open_source(arguments: argparse.Namespace) -> WeightSource:
    """Open the weights to convert. Raises: ValueError for weights that cannot be read, or not by ranks."""
    from megarl.checkpoint.sources import open_weights
    from megarl.checkpoint.torch_dist import MegatronWeights

    source = open_weights(Path(arguments.load or arguments.model), load_shape(arguments))
    if arguments.sizes and isinstance(source, MegatronWeights):
        raise ValueError(
            f"--load ({arguments.load}): Megatron's checkpoints are converted without ranks. Leave the "
            "parallel sizes out, or convert it first."
        )
    return source


def convert(arguments: argparse.Namespace, source: WeightSource) -> int:
    """Convert a Hugging Face folder or one of our checkpoints into the other, file by file in this process.
    Returns the exit code 0.

    Raises: ValueError or OSError if reading or writing fails."""
    from megarl.checkpoint.stream import write_checkpoint, write_hf

    shape, save = load_shape(arguments), Path(arguments.save)
    if save.exists():
        save.rmdir()  # it is empty; the folder appears when the conversion is complete
    limit, dtype = shard_bytes(arguments.max_shard_size), wanted_dtype(arguments, source)
    if arguments.to == "checkpoint":
        write_checkpoint(save, source, shape, dtype, limit)
    else:
        write_hf(save, source, shape, Path(arguments.model), dtype, limit)
    dtypes = sorted({str(dtype or stored) for stored, _ in source.tensors.values()})
    sys.stdout.write(f"{len(source.tensors)} tensors in {' and '.join(dtypes)}: {save}\n")
    return 0


def wanted_dtype(arguments: argparse.Namespace, source: WeightSource) -> torch.dtype | None:
    """Return the dtype that all tensors are written in, or None if each tensor keeps its own."""
    import torch

    if arguments.dtype is not None:
        return getattr(torch, arguments.dtype)
    return source.dtype if arguments.to == "hf" else None


def dtype_on_ranks(arguments: argparse.Namespace, source: WeightSource) -> torch.dtype:
    """Return the dtype in which ranks write.

    Their model is in bf16, or in fp32, which holds every value of fp16."""
    import torch

    stored = {dtype for dtype, _ in source.tensors.values()}
    dtype = wanted_dtype(arguments, source) or (stored.pop() if len(stored) == 1 else torch.float32)
    return dtype if arguments.to == "hf" or dtype == torch.bfloat16 else torch.float32


def convert_on_ranks(arguments: argparse.Namespace) -> int:
    """Load and write the weights through Megatron's shards, as one of the ranks, and return 0.

    Raises: RuntimeError if a tensor changed on the way; ValueError or OSError if reading or writing fails."""
    from megarl.runtime.process import DRIVER_PID, end_with_parent, quiet_libraries

    if launcher := os.environ.get(DRIVER_PID):
        end_with_parent(int(launcher))
    quiet_libraries()
    import torch
    import torch.distributed as dist

    from megarl.checkpoint.sources import HFWeights, open_weights
    from megarl.config.mesh import group_timeout
    from megarl.megatron.mesh import create_groups
    from megarl.megatron.training_state import load_checkpoint, save_checkpoint
    from megarl.reshard.hf_weights import load_hf, save_hf
    from megarl.workers.megatron_role import megatron_atlases
    from megarl.workers.worker import join_world

    join_world(_RANKS_WAIT_S)
    mesh, shape, parallel = mesh_of(arguments), load_shape(arguments), parallel_of(arguments)
    folder, source = Path(arguments.load or arguments.model), open_source(arguments)
    dtype = dtype_on_ranks(arguments, source)
    create_groups(mesh, group_timeout(_RANKS_WAIT_S))
    bf16 = dtype == torch.bfloat16
    model = model_of(shape, mesh, ModelConfig(model=arguments.model, bf16=bf16), parallel)
    atlases = megatron_atlases(shape, mesh, parallel)
    atlas = atlases[dist.get_rank()]
    if isinstance(source, HFWeights):
        load_hf(folder, atlas, model.parameters, shape)
    else:
        load_checkpoint(folder, model, atlas, weights_only=True, digests=launcher is None)
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
    if arguments.compare_forward:
        del model
        with hf_folder_of(arguments, source, shape) as written:
            compare_forward(written, shape, mesh, parallel)
    dist.destroy_process_group()
    return 0


def model_of(shape: ModelShape, mesh: MeshSpec, model: ModelConfig, parallel: ParallelConfig) -> TrainedModel:
    """Return this rank's part of a Megatron policy, or of a value model if the shape has a value head. Its
    weights are not loaded."""
    from megarl.megatron.policy import Policy
    from megarl.megatron.value_model import ValueModel

    return (ValueModel if shape.value_head else Policy)(shape, mesh, model, parallel)


@contextlib.contextmanager
def hf_folder_of(arguments: argparse.Namespace, source: WeightSource, shape: ModelShape) -> Iterator[Path]:
    """Give the `with` block a Hugging Face folder with the converted weights, the same on all ranks.

    It is the folder that was written or read. If neither is one, rank 0 makes a temporary folder."""
    import torch.distributed as dist

    from megarl.checkpoint.sources import HFWeights, open_weights
    from megarl.checkpoint.stream import write_hf

    if arguments.to == "hf" or isinstance(source, HFWeights):
        yield Path(arguments.save if arguments.to == "hf" else arguments.load or arguments.model)
        return
    save, model = Path(arguments.save), Path(arguments.model)
    made = save.with_name(f".{save.name}.compared")
    try:
        if dist.get_rank() == 0:
            write_hf(made, open_weights(save, shape), shape, model, None, shard_bytes("5GB"))
        dist.barrier()
        yield made
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(made, ignore_errors=True)


def compare_forward(folder: Path, shape: ModelShape, mesh: MeshSpec, parallel: ParallelConfig) -> None:
    """Raise RuntimeError if Megatron's log-probs (or values) of a few random sequences differ from those by
    plain transformers, in fp32.

    Collective over the mesh. The tokens are random, because every weight takes part in the result. In a
    mixture of experts a few tokens may differ: rounding decides between experts with nearly equal scores.

    Raises: RuntimeError if the results differ by more than rounding."""
    import torch
    import torch.distributed as dist

    from megarl.batch import Batch, MicroBatch
    from megarl.collectives import all_gather_messages
    from megarl.reshard.hf_weights import load_hf
    from megarl.workers.megatron_role import megatron_atlases

    generator = torch.Generator().manual_seed(0)
    length = min(COMPARED_TOKENS, shape.max_position_embeddings)
    tokens = torch.randint(0, shape.vocab_size, (COMPARED_SEQUENCES, length), generator=generator)
    batch = Batch.from_samples(list(range(len(tokens))), tokens[:, :1].tolist(), tokens[:, 1:].tolist())
    model = model_of(shape, mesh, ModelConfig(model=str(folder)), parallel)
    load_hf(folder, megatron_atlases(shape, mesh, parallel)[dist.get_rank()], model.parameters, shape)
    micro_batches = [MicroBatch.of(batch)]
    ours = model.values(micro_batches) if shape.value_head else model.log_probs(micro_batches, 1.0)
    del model
    of_ranks = all_gather_messages(None if ours is None else ours[0].tolist(), list[float] | None)
    if dist.get_rank() == 0:
        expected = transformers_outputs(folder, shape, tokens)
        errors = torch.stack(
            [(torch.tensor(found) - expected).abs() for found in of_ranks if found is not None]
        )
        share = float((errors > FORWARD_LIMIT).float().mean())
        what = "values" if shape.value_head else "log-probs"
        told = (
            f"{what} of {expected.numel()} tokens by Megatron and by transformers differ by up "
            f"to {float(errors.max()):.2g}"
        )
        if not errors.isfinite().all() or share > (MOST_REROUTED if shape.is_moe else 0):
            raise RuntimeError(
                f"{told}, and rounding explains {FORWARD_LIMIT:g}: a tensor is not where the model reads "
                f"it; this is a bug in megarl, please report it. Do not use {folder}."
            )
        sys.stdout.write(f"{told}\n")
    dist.barrier()


def transformers_outputs(folder: Path, shape: ModelShape, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probs (or values) of all tokens but the first of each sequence by transformers' own
    model, as one flat tensor.

    They are computed by transformers' own model on a CPU in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = AutoModelForSequenceClassification if shape.value_head else AutoModelForCausalLM
    model = kind.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
    ).eval()
    with torch.no_grad():
        if shape.value_head:
            return model.score(model.base_model(tokens).last_hidden_state)[:, :-1, 0].flatten()
        return model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None]).flatten()


def compare(source: WeightSource, written: WeightSource, folder: Path, save: str) -> None:
    """Read source and result again, and raise RuntimeError if a tensor differs in the dtype of the result."""
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
            f"{len(different)} tensors changed on the way, first {different[0]}: this is a bug in "
            "megarl, please report it"
        )
    dtypes = " and ".join(sorted({str(dtype) for dtype, _ in written.tensors.values()}))
    sys.stdout.write(f"{len(written.tensors)} tensors, equal to {folder} in {dtypes}: {save}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
