"""Run one of the two ranks of the self-test: `python -P -m megarl.doctor.probe RANK`. Every result is one
line of JSON on stdout, as soon as it is known.

    rank 0   opens a store, tells its port; reduces a sum with rank 1; describes the machine; tries driver, extension, kernel, Megatron
    rank 1   is told the port on stdin; reduces; imports what megarl needs of vLLM

With a GPU driver both also reduce over NCCL, each on a GPU of its own, or rank 0 alone if there is one GPU.

A part that dies takes its process along, and the one that started it sees which part that was."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from megarl.runtime.process import (
    end_with_parent,
    keep_checkout_off_path,
    listen_on_loopback,
    quiet_libraries,
)

_TIMEOUT = timedelta(seconds=60)
_MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def main(rank: int) -> None:
    end_with_parent(os.getppid(), signal.SIGKILL)
    keep_checkout_off_path()
    quiet_libraries()
    listen_on_loopback()
    os.environ.pop("MEGARL_KERNELS", None)
    if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/proc/driver/nvidia/version")):
        os.environ["TRITON_INTERPRET"] = "1"  # Triton decides when torch imports it
    if rank == 0:
        from megarl.runtime.job_store import job_store

        store = job_store()
        tell(port=store.port)
        attempt("two ranks add over gloo", lambda: add(store, rank))
        tell(begins="devices and features are looked at")
        from megarl.doctor.facts import devices, driver, features

        tell(devices=devices(), features=features())
        if driver():
            attempt("PyTorch sees the driver's GPUs", see_gpus)
            attempt("ranks add over NCCL", lambda: add_on_gpus(store, rank))
        attempt("the extension copies", copy)
        attempt("a kernel and its reference agree", kernel)
        attempt("Megatron updates a model", update)
    else:
        port = int(sys.stdin.readline())
        from megarl.doctor.facts import driver
        from megarl.runtime.mailbox import connect

        store = connect(f"127.0.0.1:{port}", "doctor", _TIMEOUT.seconds)
        add(store, rank)
        if driver():
            attempt("ranks add over NCCL, on rank 1", lambda: add_on_gpus(store, rank))
        attempt("vLLM imports", import_vllm)


def tell(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def attempt(name: str, work: Callable[[], str]) -> None:
    """Run one test and print its result as JSON. `work` returns what it saw, or raises if the test fails."""
    tell(begins=name)
    start = time.perf_counter()
    try:
        ok, text = True, work()
    except Exception as error:  # a library may raise anything, and the test reports it
        ok, text = False, f"{type(error).__name__}: {error}".splitlines()[0]
    tell(test=name, ok=ok, text=text, seconds=round(time.perf_counter() - start, 1))


def add(store, rank: int) -> str:
    import torch
    import torch.distributed as dist

    if rank == 0:
        store = dist.PrefixStore("doctor", store)
    group = dist.ProcessGroupGloo(store, rank, 2, _TIMEOUT)
    total = torch.tensor([float(rank + 1)])
    group.allreduce([total]).wait()
    if total.item() != 3.0:
        raise ValueError(f"1 + 2 is {total.item():g} on rank {rank}")
    return "1 + 2 = 3"


def see_gpus() -> str:
    import torch

    from megarl.doctor.facts import driver, driver_error

    if error := driver_error(torch.cuda.is_available(), torch.version.cuda):
        raise RuntimeError(error)
    return f"driver {driver()}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs"


def add_on_gpus(store, rank: int) -> str:
    """Add numbers over NCCL: two ranks on two GPUs, or rank 0 alone if there is only one GPU."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return "not tried: PyTorch sees no GPU"
    size = min(2, torch.cuda.device_count())
    if rank >= size:
        return "not tried: rank 0 is alone with the only GPU"
    torch.cuda.set_device(rank)
    if rank == 0:
        store = dist.PrefixStore("doctor", store)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    group = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
    total = torch.tensor([float(rank + 1)], device="cuda")
    group.allreduce([total]).wait()
    torch.cuda.synchronize()
    if total.item() != sum(range(1, size + 1)):
        raise ValueError(f"{size} ranks add up to {total.item():g} on rank {rank}")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{size} ranks, NCCL {version}" + ("" if size > 1 else ": a second GPU would say more")


def copy() -> str:
    import torch

    from megarl.reshard.copier import copy_rects, extension_for

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if extension_for(device) is None:
        return f"not there for {device}: PyTorch copies instead"
    source = torch.arange(3000, dtype=torch.float32, device=device).view(50, 60)
    copied = torch.zeros(50, 60, dtype=torch.bfloat16, device=device)
    copy_rects([copied], [source])
    if not torch.equal(copied, source.bfloat16()):
        raise ValueError("fp32 to bf16: other numbers than PyTorch's")
    return f"50 x 60, fp32 to bf16, on {device}"


def kernel() -> str:
    """Compare a Triton kernel, on a CPU in Triton's interpreter, with PyTorch in fp64. Returns the error as
    text; raises ValueError if it is too large."""
    import torch

    gpu = torch.cuda.is_available()
    if importlib.util.find_spec("triton") is None:
        return "no Triton: PyTorch computes instead"
    from megarl.kernels.log_probs import vocab_parallel_log_probs, vocab_parallel_log_probs_ref

    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)).to("cuda" if gpu else "cpu")
    targets = torch.tensor([0, 50, 96], device=logits.device)
    os.environ["MEGARL_KERNELS"] = "triton" if gpu else "interpret"
    try:
        actual, _ = vocab_parallel_log_probs(logits, targets, vocab_size=97)
    finally:
        del os.environ["MEGARL_KERNELS"]  # Megatron's model below takes what jobs on this machine take
    error = (actual - vocab_parallel_log_probs_ref(logits, targets, vocab_size=97)[0]).abs().max().item()
    if not error < 1e-5:  # fp32 rounds a log-prob of about 5 by 5e-7
        raise ValueError(f"log-probs differ by {error:.1e}")
    return f"log-probs, {'on the GPU' if gpu else 'interpreted'}: {error:.0e}"


def update() -> str:
    """Update a small Megatron model in a world of this rank alone. Returns the log-prob before and after as
    text; raises ValueError if it did not rise."""
    import torch
    import torch.distributed as dist

    from megarl.batch import Batch, MicroBatch
    from megarl.config.hf_config import ModelShape
    from megarl.config.mesh import MeshSpec
    from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
    from megarl.megatron.initialize import random_weights
    from megarl.megatron.mesh import create_groups
    from megarl.megatron.policy import Policy
    from megarl.megatron.transformer_engine import uses_transformer_engine
    from megarl.reshard.megatron_atlas import megatron_atlases

    mesh = MeshSpec((0,))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    create_groups(mesh, _TIMEOUT)
    with tempfile.TemporaryDirectory(prefix="megarl-doctor-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        shape = ModelShape.load(folder)
        policy = Policy(shape, mesh, ModelConfig(model=folder), ParallelConfig(), OptimizerConfig(lr=1e-2))
    random_weights(
        shape, megatron_atlases(shape, mesh, uses_transformer_engine())[0], policy.parameters, seed=0
    )
    policy.parameters_changed()
    micro_batches = [MicroBatch.of(Batch.from_samples([0, 1], [[3, 4], [5]], [[6, 7, 8], [9, 10]]))]

    def loss(micro, log_probs, entropy, rows):
        return -log_probs.sum() / 5, {}

    before = sum(part.sum().item() for part in policy.log_probs(micro_batches, 1.0))
    policy.advance_schedule()
    policy.update(micro_batches, loss, temperature=1.0)
    after = sum(part.sum().item() for part in policy.log_probs(micro_batches, 1.0))
    if not after > before:
        raise ValueError(
            f"5 tokens are less likely after an update towards them: log-prob {before:.2f} to {after:.2f}"
        )
    return f"log-prob {before:.1f} to {after:.1f}"


def import_vllm() -> str:
    from megarl.rollout.environment import prepare_environment

    prepare_environment()
    from megarl.rollout.plugin import can_free_kv_cache, check_version, register

    check_version()
    register()
    from megarl.rollout import weight_transfer  # the parts of vLLM that a job uses

    device = weight_transfer.current_platform.device_type
    text = f"and takes megarl's weight transfer ({device})"
    if device != "cuda":
        return text
    return f"{text}; it {'can' if can_free_kv_cache() else 'cannot'} free its KV cache between rollouts"


if __name__ == "__main__":
    main(int(sys.argv[1]))
