"""The processes of bench_reshard.py. Each sets itself up, says which ways it can run, and runs one when told
to."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from hf_buckets import buckets, full_hf_tensors
from torch import Tensor

from megarl.algorithms import GRPO
from megarl.config.hf_config import ModelShape
from megarl.config.schema import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    ReshardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
)
from megarl.reshard.atlas import Atlas
from megarl.reshard.copier import CopyPlan
from megarl.reshard.digest import Digest
from megarl.reshard.megatron_atlas import megatron_atlas
from megarl.reshard.hf_weights import load_hf
from megarl.reshard.plan import make_plan
from megarl.reshard.transfer import Transfer
from megarl.reshard.vllm_atlas import vllm_atlas

if TYPE_CHECKING:
    from megarl.rollout.engine import RolloutEngine

TP = 2
SHORT = {"bfloat16": "bf16", "float32": "fp32"}
SEVEN_B = {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def play(role: str, connection: Connection, arguments: argparse.Namespace, dtype: str) -> None:
    """Runs until told None. Way -> (what to run, bytes that it writes)."""
    name, _, rank = role.partition("_")
    try:
        torch.set_num_threads(arguments.threads)
        ways, digest = SETUPS[name](arguments, getattr(torch, dtype), int(rank or 0))
        connection.send(list(ways) if rank != "1" else [])
        while (told := connection.recv()) is not None:
            connection.send(digest() if told == "digest" else measure(*ways[told], arguments.device))
    except Exception:
        traceback.print_exc()
        raise
    finally:
        connection.close()
        sys.stdout.flush()
        os._exit(0)  # vLLM and gloo threads would be waited for


def measure(run: Callable[[], float | None], num_bytes: int, device: str) -> dict:
    """`run` may tell how many seconds of it count."""
    before = reset_peak_memory(device)
    start = time.perf_counter()
    if device == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        run()
        events[1].record()
        torch.cuda.synchronize()
        seconds = events[0].elapsed_time(events[1]) / 1e3
    else:
        told = run()
        seconds = told if isinstance(told, float) else time.perf_counter() - start
    return {"seconds": seconds, "bytes": num_bytes, "extra_bytes": max(0, peak_memory(device) - before)}


def reset_peak_memory(device: str) -> int:
    """Returns: bytes held now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_memory(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status_bytes("VmHWM")


def _status_bytes(key: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":")
    )
    return int(line.split()[1]) << 10


# ------------------------------------------------------------------ what is copied


def model_shape(arguments: argparse.Namespace) -> ModelShape:
    if arguments.device == "cpu":
        return ModelShape.load(arguments.model)
    import make_random_model

    folder = arguments.folder / "shape"
    folder.mkdir(exist_ok=True)
    config = make_random_model.CONFIG | (SEVEN_B if arguments.model_shape == "7b" else {})
    make_random_model.write_json(folder / "config.json", config)
    return ModelShape.load(folder)


def allocate(atlas: Atlas, dtype: torch.dtype, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """(one block, as Megatron keeps its parameters; [rows, cols] views of it)."""
    block = torch.zeros(sum(param.rows * param.cols for param in atlas.values()), dtype=dtype, device=device)
    parts = block.split([param.rows * param.cols for param in atlas.values()])
    return block, {
        name: part.view(param.rows, param.cols)
        for (name, param), part in zip(atlas.items(), parts, strict=True)
    }


def shard(
    arguments: argparse.Namespace, shape: ModelShape, dtype: torch.dtype, rank: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """One rank's Megatron parameters with the folder's weights; random ones on a GPU."""
    atlas = megatron_atlas(shape, TP, rank)
    block, tensors = allocate(atlas, dtype, arguments.device)
    if arguments.device == "cuda":
        block.normal_(std=0.02)
    else:
        load_hf(arguments.model, atlas, tensors, shape)
    return block, tensors


def weights_digest(tensors: dict[str, Tensor]) -> Callable[[], list[int]]:
    return lambda: Digest([tensors[name] for name in sorted(tensors)]).full()


def copies(arguments: argparse.Namespace, dtype: torch.dtype, _: int) -> tuple[dict, Callable]:
    """megarl's copies from both shards, and the same bytes in one block."""
    shape = model_shape(arguments)
    shards = [shard(arguments, shape, dtype, rank) for rank in range(TP)]
    sources = {rank: tensors for rank, (_, tensors) in enumerate(shards)}
    atlas = vllm_atlas(shape, 1, 0)
    plan = make_plan({rank: megatron_atlas(shape, TP, rank) for rank in range(TP)}, {0: atlas})
    ways: dict[str, tuple[Callable[[], None], int]] = {}
    for target in (torch.bfloat16, torch.float32):
        if dtype == torch.bfloat16 != target:
            continue
        block, tensors = allocate(atlas, target, arguments.device)
        dst, src = [], []
        for (source, _), rects in plan.copies.items():
            for r in rects:
                src.append(
                    sources[source][r.src_name][
                        r.src_row : r.src_row + r.rows, r.src_col : r.src_col + r.cols
                    ]
                )
                dst.append(
                    tensors[r.dst_name][r.dst_row : r.dst_row + r.rows, r.dst_col : r.dst_col + r.cols]
                )
        copy, label = CopyPlan(dst, src, arguments.threads), f"{short(dtype)}->{short(target)}"
        ways[f"copy {label}"] = copy.run, copy.bytes
        if arguments.device == "cpu":
            ways |= whole_block_copies(arguments, block, label)
        ends = [Digest(src, target, arguments.threads), Digest(dst, num_threads=arguments.threads)]
        ways[f"sampled digests {label}"] = (
            lambda ends=ends: check_equal(*(end.sampled(1) for end in ends)),
            copy.bytes,
        )
        ways[f"full digests {label}"] = (
            lambda ends=ends: check_equal(*(end.full() for end in ends)),
            copy.bytes,
        )
        if arguments.device == "cuda":  # after the digests, because it overwrites what they compare
            ways[f"memcpy {label}"] = device_copy([source for source, _ in shards], block)
        if target == dtype == torch.bfloat16:
            kept = tensors
    return ways, weights_digest(kept) if dtype == torch.bfloat16 else (lambda: [])


def short(dtype: torch.dtype) -> str:
    return SHORT[str(dtype).removeprefix("torch.")]


def whole_block_copies(
    arguments: argparse.Namespace, block: Tensor, label: str
) -> dict[str, tuple[Callable[[], None], int]]:
    """Of as many bytes as `block` holds."""
    plain, num_bytes = torch.zeros_like(block), block.numel() * block.element_size()
    into = torch.zeros_like(block)
    from megarl import _C

    return {
        f"memcpy {label}": (
            lambda: _C.memcpy(into.data_ptr(), plain.data_ptr(), num_bytes, arguments.threads),
            num_bytes,
        ),
        f"torch copy_ {label}": (lambda: into.copy_(plain), num_bytes),
    }


def device_copy(sources: list[Tensor], block: Tensor) -> tuple[Callable[[], None], int]:
    """(cudaMemcpyAsync of one source's bytes after another's until `block` is full, the number of bytes). Into the
    block itself: 7B in fp32 leave no room for another."""
    into, pieces, begin = block.view(torch.uint8), [], 0
    for source in sources:
        piece = source.view(torch.uint8)[: len(into) - begin]
        pieces.append((into[begin : begin + len(piece)], piece))
        begin += len(piece)

    def run() -> None:
        for to, piece in pieces:
            to.copy_(piece)

    return run, begin


def check_equal(sent: list[int], received: list[int]) -> None:
    if sent != received:
        raise RuntimeError("the digests of source and destination differ")


def transfer(arguments: argparse.Namespace, dtype: torch.dtype, rank: int) -> tuple[dict, Callable]:
    shape = model_shape(arguments)
    dist.init_process_group(
        "gloo", init_method=f"file://{arguments.folder}/transfer", rank=rank, world_size=TP
    )
    atlas = vllm_atlas(shape, 1, 0)
    _, sources = shard(arguments, shape, dtype, rank)
    destinations = allocate(atlas, dtype, "cpu")[1] if rank == 0 else {}
    plan = make_plan({r: megatron_atlas(shape, TP, r) for r in range(TP)}, {0: atlas})
    built: list[Transfer] = []

    def run() -> None:
        if not built:  # in the first run, so that its buffers count as extra memory
            built.append(Transfer(plan, rank, sources, destinations, dict.fromkeys(atlas, dtype)))
        built[0].run()

    return {"send/recv bf16->bf16": (run, plan.num_bytes(dtype.itemsize)[1, 0])}, weights_digest(destinations)


# ------------------------------------------------------------------ vLLM


def start_vllm(arguments: argparse.Namespace):
    """(LLM, its model)."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM

    llm = LLM(
        str(arguments.model),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
    )
    return llm, llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def engine_config(arguments: argparse.Namespace, with_alias: bool) -> TrainConfig:
    return TrainConfig(
        algorithm=GRPO(),
        model=ModelConfig(model=str(arguments.model), bf16=True),
        batch=BatchConfig(train_iters=1),
        data=DataConfig(train_data=("unused.jsonl",)),
        run=RunConfig(save="unused"),
        reshard=ReshardConfig(reshard_alias=with_alias),
        rollout=RolloutConfig(max_num_seqs=4),
        sampling=SamplingConfig(max_prompt_length=128, max_response_length=128),
    )


def start_engine(
    arguments: argparse.Namespace, dtype: torch.dtype, qkv_layout: str, with_alias: bool
) -> RolloutEngine:
    """Beside a trainer of the same parallelism that holds the folder's weights; it has generated once."""
    from megarl.rollout.engine import RolloutEngine

    shape = model_shape(arguments)
    dist.init_process_group(
        "gloo", init_method=f"file://{arguments.folder}/engine-{qkv_layout}", rank=0, world_size=1
    )
    atlas = megatron_atlas(shape, 1, 0, qkv_layout=qkv_layout)
    _, tensors = allocate(atlas, dtype, "cpu")
    engine = RolloutEngine(engine_config(arguments, with_alias), shape, [0], {0: atlas}, tensors)
    load_hf(arguments.model, atlas, tensors, shape)
    engine.sync(0)
    engine.generate(
        [[1, 2, 3]], [0], temperature=1.0, max_tokens=2
    )  # from here on there is a prefix cache to clear
    torch.set_num_threads(arguments.threads)
    return engine


def sync(arguments: argparse.Namespace, dtype: torch.dtype, _: int) -> tuple[dict, Callable]:
    """A whole sync that copies everything: both ends' digests, copies, vote, commit, prefix cache."""
    engine, versions, spent = (
        start_engine(arguments, dtype, "grouped", with_alias=False),
        itertools.count(1),
        0.0,
    )
    sampled = Digest.sampled

    def timed(digest: Digest, version: int) -> list[int]:
        nonlocal spent
        start = time.perf_counter()
        result = sampled(digest, version)
        spent += time.perf_counter() - start
        return result

    def digests() -> float:
        nonlocal spent
        spent = 0.0
        engine.sync(next(versions))
        return spent

    Digest.sampled, label = timed, f"{short(dtype)}->bf16"

    def whole() -> None:
        engine.sync(next(versions))

    return {
        f"sync {label}": (whole, engine.bytes_per_sync),
        f"digests of a sync {label}": (digests, engine.bytes_per_sync),
    }, weights_digest(engine.tensors[0])


def alias(arguments: argparse.Namespace, dtype: torch.dtype, _: int) -> tuple[dict, Callable]:
    """A whole sync of an engine whose weights are all the trainer's memory."""
    engine, versions = start_engine(arguments, dtype, "stacked", with_alias=True), itertools.count(1)

    def run() -> None:
        num_bytes = engine.sync(next(versions))
        if num_bytes:
            raise RuntimeError(f"a sync of aliased weights wrote {num_bytes} bytes")

    return {"aliased sync bf16": (run, 0)}, weights_digest(engine.tensors[0])


def reload(arguments: argparse.Namespace, _: torch.dtype, __: int) -> tuple[dict, Callable]:
    llm, _ = start_vllm(arguments)
    size = (arguments.model / "model.safetensors").stat().st_size
    run = lambda: llm.collective_rpc("reload_weights", kwargs={"weights_path": str(arguments.model)})  # noqa: E731
    return {"reload bf16->bf16": (run, size)}, lambda: []


def gather(arguments: argparse.Namespace, dtype: torch.dtype, rank: int) -> tuple[dict, Callable]:
    """Rank 0 also holds the engine, with the plain parameters that it has on a GPU: on a CPU vLLM packs them
    where load_weights no longer reaches. So this path is spared what `reload` does besides."""
    shape = model_shape(arguments)
    _, sources = shard(arguments, shape, dtype, rank)
    model = None
    if rank == 0:
        from vllm.model_executor.layers import utils

        utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
            layer, "cpu_linear", torch.nn.functional.linear
        )
        _, model = start_vllm(arguments)
    # vLLM owns the default group of its process.
    group = dist.ProcessGroupGloo(dist.FileStore(f"{arguments.folder}/gather", TP), rank, TP)

    def run() -> None:
        for bucket in buckets(full_hf_tensors(shape, sources, group)):
            if model is not None:
                received = bucket[0].clone()
                model.load_weights(
                    (name, received[start:end].view(dtype).view(size)) for name, start, end, size in bucket[1]
                )

    atlas = vllm_atlas(shape, 1, 0)
    held = (
        {}
        if model is None
        else {name: p.data.view(atlas[name].rows, atlas[name].cols) for name, p in model.named_parameters()}
    )
    return {
        "gather + load bf16->bf16": (run, sum(t.numel() for t in held.values()) * dtype.itemsize)
    }, weights_digest(held)


SETUPS = {
    "copies": copies,
    "reload": reload,
    "gather": gather,
    "transfer": transfer,
    "sync": sync,
    "alias": alias,
}
