"""Every kernel beside what others use for the same, in one process, taking turns: time, peak extra memory and
error against float64.

    python tools/benchmarks/bench_kernels.py --json out.json [--repeats 5] [--threads 2] [--small]
                                             [--only head,head_entropy,head_half,head_losses,log_probs,policy_loss,gae]
    pip install --no-deps liger-kernel cut-cross-entropy      # contenders; a missing one is reported as missing

Contenders take turns, so that a drift of clocks hits them all; a number is the median of the repeats. Memory
is counted in a run of its own: on a CPU the growth of the peak resident size over what was resident before,
on CUDA that of the allocated bytes, gradients included. The error is that of log-probs (absolute, largest)
and gradients (relative Frobenius norm) against float64 on the same inputs. Floors are the parts that nobody
can leave out: the matrix products alone, or a copy of the data. The JSON is written after every case.
Exit code 1: a kernel of megarl is missing or has a wrong result. README.md beside this file has results."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.pop("TORCHDYNAMO_DISABLE", None)  # torch.compile is a contender

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.kernels.gae import gae
from megarl.kernels.log_probs import vocab_parallel_log_probs
from megarl.kernels.policy_loss import PolicyLossOptions, policy_loss

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]  # missing under PYTHONSAFEPATH
from checkout import commit
from head_contenders import CLIPS, DTYPE, eager_policy_loss, head_case, losses_case
from turns import CUDA, DEVICE, Case, Contender, Missing, compare

PACKAGES = ("torch", "triton", "megatron-core", "liger-kernel", "cut-cross-entropy")


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    # Megatron's kernels want a group.
    dist.init_process_group("nccl" if CUDA else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    report = describe(arguments.threads) | {"cases": {}}
    for name in arguments.only.split(","):
        report["cases"][name] = compare(CASES[name](arguments.small), arguments.repeats, arguments.limit)
        report["load_after"] = os.getloadavg()[0]
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()
    problems = [f"{name}: {line}" for name, case in report["cases"].items() for line in case["problems"]]
    for line in problems:
        print(f"FAILED {line}", flush=True)
    return bool(problems)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--repeats", type=int, default=30 if CUDA else 5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--limit",
        type=int,
        default=90,
        help="seconds for a contender's first run, with compilation; else it is missing",
    )
    parser.add_argument(
        "--small", action="store_true", help="sizes that finish in seconds, to see that everything runs"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.only.split(",")) - set(CASES):
        parser.error(f"--only {','.join(sorted(unknown))} must be some of {', '.join(CASES)}")
    return arguments


def describe(threads: int) -> dict:
    """What a number depends on beside the code."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    device = torch.cuda.get_device_name() if CUDA else platform.processor() or platform.machine()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": commit(),
        "command": sys.argv[1:],
        "device": device,
        "cpu": cpu_name(),
        "threads": threads,
        "versions": versions,
        "load_before": os.getloadavg()[0],
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def log_probs_case(small: bool) -> Case:
    """Logits given: log-probs and the gradient of the logits."""
    num_tokens, vocab_size = (8192, 131072) if CUDA else (1024, 32000)
    if small:
        num_tokens, vocab_size = 64, 1000
    generator = torch.Generator().manual_seed(0)
    source = (torch.randn(num_tokens, vocab_size, generator=generator) * 3).to(DEVICE, DTYPE)
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator).to(DEVICE)
    cotangent = torch.randn(num_tokens, generator=generator).to(DEVICE)
    buffer = source.clone()

    def fresh() -> Tensor:
        """In-place contenders destroy their input. Everybody gets it this way; the copy alone is the
        floor."""
        return buffer.detach().copy_(source).requires_grad_()

    def differentiate(
        function: Callable[[Tensor], Tensor], logits: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = fresh() if logits is None else logits
        log_probs = function(logits)
        (gradient,) = torch.autograd.grad(log_probs, logits, cotangent.to(log_probs.dtype))
        return {"log_probs": log_probs.detach(), "dlogits": gradient}

    def ours(logits):
        return vocab_parallel_log_probs(logits, targets, vocab_size=vocab_size, inplace=True)[0]

    def naive(logits):
        return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1).gather(
            1, targets[:, None]
        )[:, 0]

    compiled = torch.compile(naive, dynamic=False)
    functions = {
        "vocab_parallel_log_probs": ours,
        "naive": naive,
        "torch.compile": compiled,
        "megatron fused": megatron_log_probs(targets),
    }
    functions |= liger_log_probs(targets)
    contenders = [
        Contender(name, functools.partial(differentiate, function), is_megarl=function is ours)
        for name, function in functions.items()
    ]
    contenders.append(Contender("copy of the logits", lambda: fresh() is None or {}))
    title = f"log-probs of logits, forward and backward: T={num_tokens} V={vocab_size} {DTYPE}"
    return Case(title, contenders, lambda: differentiate(naive, source.double().requires_grad_()))


def megatron_log_probs(targets: Tensor) -> Callable[[Tensor], Tensor]:
    """Megatron's fused cross-entropy of a split vocabulary, in a group of one."""

    def log_probs(logits: Tensor) -> Tensor:
        on_cpu = (
            contextlib.nullcontext
            if CUDA
            else importlib.import_module("megarl.megatron.cpu_shim").cpu_megatron
        )
        with on_cpu():
            fused = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
            if (
                logits.dtype == torch.float32
            ):  # it subtracts the maximum in place, from fp32 logits without making a copy first
                logits = logits.clone()
            return -fused.fused_vocab_parallel_cross_entropy(
                logits[:, None], targets[:, None], dist.group.WORLD
            )[:, 0]

    return log_probs


def liger_log_probs(targets: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Liger's two cross-entropies of given logits."""

    def module():
        transformers = importlib.import_module("liger_kernel.transformers")
        if not CUDA:
            raise Missing("its Triton kernels need a GPU")
        return transformers

    def split_vocabulary(logits: Tensor) -> Tensor:
        return -module().LigerVocabParallelCrossEntropy()(logits[:, None], targets[:, None])[:, 0]

    def whole(logits: Tensor) -> Tensor:
        return -module().LigerCrossEntropyLoss(reduction="none")(logits, targets)

    return {"liger vocab-parallel": split_vocabulary, "liger": whole}


def policy_loss_case(small: bool) -> Case:
    num_tokens = 1000 if small else 32768
    generator = torch.Generator().manual_seed(0)
    log_probs, noise, advantages = (torch.randn(num_tokens, generator=generator).to(DEVICE) for _ in range(3))
    columns = log_probs + 0.1 * noise, advantages, torch.full((num_tokens,), 1 / num_tokens, device=DEVICE)
    options = PolicyLossOptions(**CLIPS)

    def differentiate(
        function: Callable[..., Tensor], dtype: torch.dtype = torch.float32
    ) -> dict[str, Tensor]:
        leaf = log_probs.to(dtype).requires_grad_()
        return {"dlog_probs": torch.autograd.grad(function(leaf, *columns), leaf)[0]}

    compiled = torch.compile(eager_policy_loss, dynamic=False)
    contenders = [
        Contender(
            "policy_loss",
            lambda: differentiate(lambda *columns: policy_loss(*columns, options)[0]),
            is_megarl=True,
        ),
        Contender("eager", lambda: differentiate(eager_policy_loss)),
        Contender("torch.compile", lambda: differentiate(compiled)),
        Contender("copy of the columns", lambda: [x.clone() for x in (log_probs, *columns)] and {}),
    ]
    title = f"policy loss, forward and backward: N={num_tokens}"
    return Case(title, contenders, lambda: differentiate(eager_policy_loss, torch.float64))


def gae_case(small: bool) -> Case:
    """Packed sequences of equal length against a Python loop over the tokens."""
    num_sequences, length = (4, 100) if small else (64, 2048)
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(num_sequences * length, generator=generator).to(DEVICE) for _ in range(2))
    mask = torch.ones_like(rewards, dtype=torch.bool)
    cu_seqlens = torch.arange(0, num_sequences * length + 1, length, device=DEVICE)
    gamma, gae_lambda = 0.99, 0.95

    def ours() -> dict[str, Tensor]:
        out = gae(rewards, values, mask, cu_seqlens, gamma=gamma, gae_lambda=gae_lambda)
        return {"advantages": out.advantages, "returns": out.returns}

    def loop(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        r, v = rewards.view(-1, length).to(dtype), values.view(-1, length).to(dtype)
        advantages, last = torch.empty_like(r), torch.zeros_like(r[:, 0])
        for t in reversed(range(length)):
            following = v[:, t + 1] if t + 1 < length else 0.0
            last = r[:, t] + gamma * following - v[:, t] + gamma * gae_lambda * last
            advantages[:, t] = last
        return {"advantages": advantages.view(-1), "returns": (advantages + v).view(-1)}

    contenders = [
        Contender("gae", ours, is_megarl=True),
        Contender("loop over tokens", loop),
        Contender("copy of the columns", lambda: [x.clone() for x in (rewards, values, mask)] and {}),
    ]
    return Case(
        f"advantages and returns: {num_sequences} x {length} tokens", contenders, lambda: loop(torch.float64)
    )


CASES: dict[str, Callable[[bool], Case]] = {
    "head": head_case,
    "head_entropy": functools.partial(head_case, entropy_coef=0.01),
    "head_half": functools.partial(head_case, idle=0.5),
    "head_losses": losses_case,
    "log_probs": log_probs_case,
    "policy_loss": policy_loss_case,
    "gae": gae_case,
}


if __name__ == "__main__":
    sys.exit(main())
