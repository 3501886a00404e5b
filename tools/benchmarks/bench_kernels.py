"""Every kernel beside what others use for the same, in one process, taking turns: time, peak extra memory and error against float64.

    python tools/benchmarks/bench_kernels.py --json out.json [--repeats 5] [--threads 2] [--small]
                                             [--only head,head_entropy,head_half,log_probs,policy_loss,gae]
    pip install --no-deps liger-kernel cut-cross-entropy      # contenders; a missing one is reported as missing

Contenders take turns, so that a drift of clocks hits them all; a number is the median of the repeats. Memory is counted in a run of its
own: on a CPU the growth of the peak resident size over what was resident before, on CUDA that of the allocated bytes, gradients included.
The error is that of log-probs (absolute, largest) and gradients (relative Frobenius norm) against float64 on the same inputs.
Floors are the parts that nobody can leave out: the matrix products alone, or a copy of the data. README.md beside this file has results."""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ.pop("TORCHDYNAMO_DISABLE", None)  # torch.compile is a contender

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.kernels.fused_linear_policy_loss import fused_linear_policy_loss
from megarl.kernels.linear_log_probs import linear_log_probs
from megarl.kernels.log_probs import vocab_parallel_log_probs
from megarl.kernels.policy_loss import policy_loss

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
CLIPS = dict(clip_eps_low=0.2, clip_eps_high=0.28)


@dataclass
class Contender:
    name: str
    run: Callable[[], dict[str, Tensor]]
    """One run; returns what is compared with float64, by name."""
    floor: bool = False


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    if not dist.is_initialized():  # Megatron's kernels want a group
        store = dist.HashStore()
        dist.init_process_group("nccl" if CUDA else "gloo", store=store, rank=0, world_size=1)
    report = {"device": torch.cuda.get_device_name() if CUDA else platform.processor() or platform.machine(), "threads": arguments.threads,
              "torch": torch.__version__, "load_before": os.getloadavg()[0], "cases": {}}  # fmt: skip
    for name in arguments.only.split(","):
        report["cases"][name] = CASES[name](arguments)
    report["load_after"] = os.getloadavg()[0]
    dist.destroy_process_group()
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--repeats", type=int, default=30 if CUDA else 5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--small", action="store_true", help="sizes that finish in seconds, to see that everything runs")
    arguments = parser.parse_args()
    if unknown := set(arguments.only.split(",")) - set(CASES):
        parser.error(f"--only {','.join(sorted(unknown))} must be some of {', '.join(CASES)}")
    return arguments


def policy_columns(num_tokens: int, old: Tensor, entropy_coef: float, idle: float) -> Callable[..., tuple[Tensor, dict]]:
    """A policy loss of all tokens: (log_probs, entropy, rows) -> (loss, {}). None is clipped; a share `idle` has no advantage."""
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(num_tokens, generator=generator)
    advantages[torch.randperm(num_tokens, generator=generator)[: int(idle * num_tokens)]] = 0
    advantages = advantages.to(DEVICE)
    weights = torch.full((num_tokens,), 1 / num_tokens, device=DEVICE)

    def loss(log_probs, entropy, rows):
        value = policy_loss(log_probs, old[rows].to(log_probs.dtype), advantages[rows], weights[rows], **CLIPS)[0]
        return (value - entropy_coef * (weights[rows] * entropy).sum() if entropy_coef else value), {}

    return loss


def bench_head(arguments, entropy_coef: float = 0.0, idle: float = 0.0) -> dict:
    """Hidden states to policy loss and back: forward and backward of the output layer."""
    with_entropy = entropy_coef != 0
    num_tokens, num_hidden, vocab_size = (32768, 4096, 152064) if CUDA else (2048, 1024, 32000)
    if arguments.small:
        num_tokens, num_hidden, vocab_size = 128, 64, 1000
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(num_tokens, num_hidden, generator=generator) * 0.5).to(DEVICE, DTYPE).requires_grad_()
    weight = (torch.randn(vocab_size, num_hidden, generator=generator) * 0.05).to(DEVICE, DTYPE).requires_grad_()
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator).to(DEVICE)
    with torch.no_grad():
        old, _ = linear_log_probs(hidden, weight, targets, vocab_size=vocab_size)
    loss, rows = policy_columns(num_tokens, old, entropy_coef, idle), slice(0, num_tokens)

    def backward(value: Tensor, log_probs: Tensor | None = None) -> dict[str, Tensor]:
        value.backward()
        out = {"dhidden": hidden.grad, "dweight": weight.grad}
        hidden.grad = weight.grad = None
        return out if log_probs is None else out | {"log_probs": log_probs.detach()}

    def ours():
        fused = fused_linear_policy_loss(hidden, weight, targets, loss, vocab_size=vocab_size, with_entropy=with_entropy)
        return backward(fused.loss, fused.log_probs)

    def recompute():
        log_probs, entropy = linear_log_probs(hidden, weight, targets, vocab_size=vocab_size, with_entropy=with_entropy)
        return backward(loss(log_probs, entropy, rows)[0], log_probs)

    def softmax(logits):
        log_p = torch.log_softmax(logits, -1)
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1) if with_entropy else None

    def naive_log_probs(hidden, weight):
        return softmax((hidden @ weight.t()).float())

    def naive():
        log_probs, entropy = naive_log_probs(hidden, weight)
        return backward(loss(log_probs, entropy, rows)[0], log_probs)

    compiled_log_probs = torch.compile(naive_log_probs, dynamic=False)

    def compiled():
        log_probs, entropy = compiled_log_probs(hidden, weight)
        return backward(loss(log_probs, entropy, rows)[0], log_probs)

    def cut_cross_entropy():
        linear_cross_entropy = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        impl = dict(impl="cce", filter_eps=None) if CUDA else dict(impl="torch_compile")
        log_probs = -linear_cross_entropy(hidden, weight, targets, reduction="none", **impl)
        return backward(loss(log_probs, None, rows)[0], log_probs)

    def liger():
        module = importlib.import_module("liger_kernel.chunked_loss")
        per_sequence = min(1024, num_tokens)  # Liger walks over padded sequences; these have no padding
        shape = (num_tokens // per_sequence, per_sequence)
        head = module.LigerFusedLinearGRPOLoss(beta=0.0, compiled=CUDA, use_ref_model=False, epsilon_high=0.28, loss_type="bnpo")
        advantages = torch.ones(shape[0], device=DEVICE)  # one per sequence: timed, but not the same gradient
        value, _ = head(hidden.view(*shape, num_hidden), weight, targets.view(shape), torch.ones(shape, device=DEVICE), advantages,
                        old_per_token_logps=old.view(shape))  # fmt: skip
        backward(value)
        return {}

    def matrix_products():
        with torch.no_grad():
            logits = hidden @ weight.t()
            logits @ weight, logits.t() @ hidden
            return {}

    contenders = [
        Contender("fused_linear_policy_loss", ours), Contender("linear_log_probs", recompute), Contender("naive", naive),
        Contender("torch.compile", compiled), Contender("three matrix products", matrix_products, floor=True),
    ]  # fmt: skip
    if not with_entropy:  # which these do not have
        contenders[-1:-1] = [Contender("cut-cross-entropy", cut_cross_entropy), Contender("liger grpo", liger)]

    def float64() -> dict[str, Tensor]:
        wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        log_probs, gradients = torch.empty(num_tokens, dtype=torch.float64, device=DEVICE), [torch.zeros_like(x) for x in wide]
        for first in range(0, num_tokens, 512):
            part = slice(first, min(first + 512, num_tokens))
            log_p = torch.log_softmax(wide[0][part] @ wide[1].t(), -1)
            out, entropy = log_p.gather(1, targets[part, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
            log_probs[part] = out.detach()
            for total, gradient in zip(gradients, torch.autograd.grad(loss(out, entropy, part)[0], wide)):
                total += gradient
        return {"log_probs": log_probs, "dhidden": gradients[0], "dweight": gradients[1]}

    title = f"output layer, forward and backward: T={num_tokens} H={num_hidden} V={vocab_size} {DTYPE}"
    more = (", with entropy" if with_entropy else "") + (f", {idle:.0%} of the rows without advantage" if idle else "")
    return compare(title + more, contenders, float64, arguments)


def bench_log_probs(arguments) -> dict:
    """Logits given: log-probs and the gradient of the logits."""
    num_tokens, vocab_size = (8192, 131072) if CUDA else (1024, 32000)
    if arguments.small:
        num_tokens, vocab_size = 64, 1000
    generator = torch.Generator().manual_seed(0)
    source = (torch.randn(num_tokens, vocab_size, generator=generator) * 3).to(DEVICE, DTYPE)
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator).to(DEVICE)
    cotangent = torch.randn(num_tokens, generator=generator).to(DEVICE)
    buffer = source.clone()

    def fresh() -> Tensor:
        """In-place contenders destroy their input. Everybody gets it this way; the copy alone is the floor."""
        return buffer.detach().copy_(source).requires_grad_()

    def differentiate(function) -> dict[str, Tensor]:
        logits = fresh()
        log_probs = function(logits)
        (gradient,) = torch.autograd.grad(log_probs, logits, cotangent.to(log_probs.dtype))
        return {"log_probs": log_probs.detach(), "dlogits": gradient}

    def megatron(logits):
        with importlib.import_module("megarl.megatron.cpu_shim").cpu_megatron():
            fused = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
            loss = fused.fused_vocab_parallel_cross_entropy(logits.clone()[:, None], targets[:, None], dist.group.WORLD)
        return -loss[:, 0]

    def liger(logits):
        if not CUDA:
            raise RuntimeError("its Triton kernel needs CUDA")
        module = importlib.import_module("liger_kernel.transformers")
        return -module.LigerCrossEntropyLoss(reduction="none")(logits.clone(), targets)

    naive = lambda logits: torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0]
    compiled = torch.compile(naive, dynamic=False)

    def copy():
        fresh()
        return {}

    contenders = [
        Contender("vocab_parallel_log_probs", lambda: differentiate(
            lambda x: vocab_parallel_log_probs(x, targets, vocab_size=vocab_size, inplace=True)[0])),
        Contender("naive", lambda: differentiate(naive)), Contender("torch.compile", lambda: differentiate(compiled)),
        Contender("megatron fused", lambda: differentiate(megatron)), Contender("liger", lambda: differentiate(liger)),
        Contender("copy of the logits", copy, floor=True),
    ]  # fmt: skip

    def float64() -> dict[str, Tensor]:
        logits = source.double().requires_grad_()
        log_probs = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        return {"log_probs": log_probs.detach(), "dlogits": torch.autograd.grad(log_probs, logits, cotangent.double())[0]}

    return compare(f"log-probs of logits, forward and backward: T={num_tokens} V={vocab_size} {DTYPE}", contenders, float64, arguments)


def bench_policy_loss(arguments) -> dict:
    num_tokens = 1000 if arguments.small else 32768
    generator = torch.Generator().manual_seed(0)
    log_probs, noise, advantages = (torch.randn(num_tokens, generator=generator).to(DEVICE) for _ in range(3))
    old, weights = log_probs + 0.1 * noise, torch.full((num_tokens,), 1 / num_tokens, device=DEVICE)

    def eager(log_probs):
        ratio = (log_probs - old.to(log_probs.dtype)).exp()
        clipped = ratio.clamp(1 - CLIPS["clip_eps_low"], 1 + CLIPS["clip_eps_high"])
        return (torch.maximum(-advantages * ratio, -advantages * clipped) * weights).sum()

    def differentiate(function, dtype=torch.float32) -> dict[str, Tensor]:
        leaf = log_probs.to(dtype).requires_grad_()
        return {"dlog_probs": torch.autograd.grad(function(leaf), leaf)[0]}

    compiled = torch.compile(eager, dynamic=False)
    contenders = [
        Contender("policy_loss", lambda: differentiate(lambda x: policy_loss(x, old, advantages, weights, **CLIPS)[0])),
        Contender("eager", lambda: differentiate(eager)), Contender("torch.compile", lambda: differentiate(compiled)),
        Contender("copy of the columns", lambda: [x.clone() for x in (log_probs, old, advantages, weights)] and {}, floor=True),
    ]  # fmt: skip
    return compare(f"policy loss, forward and backward: N={num_tokens}", contenders, lambda: differentiate(eager, torch.float64), arguments)


def bench_gae(arguments) -> dict:
    """Packed sequences against a Python loop over the tokens."""
    num_sequences, length = (4, 100) if arguments.small else (64, 2048)
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(num_sequences * length, generator=generator).to(DEVICE) for _ in range(2))
    cu_seqlens = torch.arange(0, num_sequences * length + 1, length, device=DEVICE)
    gamma, gae_lambda = 0.99, 0.95

    def ours():
        gae = importlib.import_module("megarl.kernels.gae").gae
        mask = torch.ones_like(rewards, dtype=torch.bool)
        return {"advantages": gae(rewards, values, mask, cu_seqlens, gamma=gamma, gae_lambda=gae_lambda).advantages}

    def loop(dtype=torch.float32):
        r, v = rewards.view(-1, length).to(dtype), values.view(-1, length).to(dtype)
        advantages, last = torch.empty_like(r), torch.zeros_like(r[:, 0])
        for t in reversed(range(length)):
            following = v[:, t + 1] if t + 1 < length else 0.0
            last = r[:, t] + gamma * following - v[:, t] + gamma * gae_lambda * last
            advantages[:, t] = last
        return {"advantages": advantages.view(-1)}

    contenders = [Contender("gae", ours), Contender("loop over tokens", loop),
                  Contender("copy of the columns", lambda: [rewards.clone(), values.clone()] and {}, floor=True)]  # fmt: skip
    return compare(f"advantages: {num_sequences} x {length} tokens", contenders, lambda: loop(torch.float64), arguments)


CASES = {"head": bench_head, "head_entropy": functools.partial(bench_head, entropy_coef=0.01),
         "head_half": functools.partial(bench_head, idle=0.5), "log_probs": bench_log_probs, "policy_loss": bench_policy_loss, "gae": bench_gae}  # fmt: skip


def compare(title: str, contenders: list[Contender], float64: Callable[[], dict[str, Tensor]], arguments) -> dict:
    """Run them all in turns and print a table. Returns name -> seconds, bytes, errors, or why it is missing."""
    print(f"\n{title}", flush=True)
    expected, results, running = float64(), {}, []
    for contender in contenders:
        try:
            contender.run()  # compiles, warms up
            memory, values = extra_memory(contender.run)
            results[contender.name] = {"extra_bytes": memory, "errors": errors(values, expected), "seconds": []}
            del values
            running.append(contender)
        except Exception as error:  # another's software, on a device that it may not know: report, and go on
            results[contender.name] = {
                "missing": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]
            }
    del expected
    for _ in range(arguments.repeats):
        for contender in running:
            results[contender.name]["seconds"].append(seconds(contender.run))
    ours = contenders[0].name
    for name, result in results.items():
        if "missing" in result:
            print(f"  {name:26} missing: {result['missing']}")
            continue
        result["median_s"] = median(result["seconds"])
        ratio = result["median_s"] / results[ours]["median_s"] if "median_s" in results[ours] else float("nan")
        result["time_relative_to_ours"] = ratio
        shown = "  ".join(f"{key} {value:.1e}" for key, value in result["errors"].items())
        print(
            f"  {name:26} {result['median_s'] * 1e3:10.3f} ms  {ratio:6.2f}x  +{result['extra_bytes'] / 2**20:8.1f} MiB  {shown}",
            flush=True,
        )
    return {"title": title, "results": results}


def seconds(run: Callable[[], object]) -> float:
    if not CUDA:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    flush = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    flush.zero_()  # nobody finds their inputs in the L2 cache
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def extra_memory(run: Callable[[], dict[str, Tensor]]) -> tuple[int, dict[str, Tensor]]:
    """(bytes that a run needs beyond what is held before it, at its worst moment; what it returned)."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        values = run()
        return torch.cuda.max_memory_allocated() - before, values
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
    before = resident("VmRSS")
    values = run()
    return max(resident("VmHWM") - before, 0), values


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    out = {}
    for name, value in actual.items():
        difference = value.double() - expected[name]
        out[name] = (difference.abs().max() if name == "log_probs" else difference.norm() / expected[name].norm()).item()
    return out


if __name__ == "__main__":
    sys.exit(main())
