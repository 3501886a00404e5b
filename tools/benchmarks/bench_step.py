"""Time of a Megatron training step on one device, and the share of the device's matrix rate that it uses (MFU).

    python tools/benchmarks/bench_step.py --json out.json [--models 0.5b 1.5b] [--tokens 8192] [--length 2048]
                                          [--fp32] [--repeats 5] [--small]

For each model, with random weights of the shape of Qwen2.5: the log-probs of all response tokens (a forward
pass), and an update (forward, backward, Adam), of samples that are packed into micro-batches of --tokens.
The floating-point operations are those of the model: 2 per weight and token in each matrix and the output
layer, 2 per pair of tokens and channel in each of attention's two products (half of the pairs: causal), and
three times that with the backward pass; activation recompute is not counted. The rate is that of a large
matrix product on the same device in the same process, taken before and after each model, not a datasheet's.

--small is a rehearsal on a CPU with a tiny model; its numbers say nothing."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
import torch
import torch.distributed as dist

from megarl.batch import Batch, MicroBatch
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megarl.megatron.initialize import random_weights
from megarl.megatron.mesh import create_groups
from megarl.megatron.policy import Policy
from megarl.megatron.transformer_engine import transformer_engine_version, uses_transformer_engine
from megarl.reshard.megatron_atlas import megatron_atlases

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the first is missing under PYTHONSAFEPATH
from checkout import commit
from make_random_model import CONFIG

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
MESH = MeshSpec((0,))
MODELS = {
    "0.5b": {},
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "small": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
              "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip


def main() -> int:
    arguments = parse_arguments()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if CUDA else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    if CUDA:
        torch.cuda.set_device(0)
    create_groups(MESH)
    report: dict = {
        "device": torch.cuda.get_device_name() if CUDA else "cpu",
        "torch": torch.__version__,
        "transformer_engine": transformer_engine_version() or "none: Megatron's local spec",
        "dtype": "fp32" if arguments.fp32 else "bf16",
        "commit": commit(),
        "command": sys.argv,
        "models": {},
    }
    for name in arguments.models:
        rate = matrix_rate(arguments)
        numbers = measure(name, arguments)
        collect_garbage()  # the model is in reference cycles, and would count in the next one's peak
        rate = max(rate, matrix_rate(arguments))
        for part in ("log_probs", "update"):
            numbers[part]["mfu"] = numbers[part]["flops"] / numbers[part]["seconds"] / rate
        report["models"][name] = numbers | {"matrix_rate": rate}
        for part in ("log_probs", "update"):
            each = numbers[part]
            print(
                f"{name} {part}: {each['seconds'] * 1e3:.1f} ms, {each['tokens_per_s']:,.0f} tokens/s, "
                f"MFU {each['mfu']:.1%} of {rate / 1e12:.3g} TFLOP/s, peak {numbers['peak_bytes'] / 1e9:.1f} GB"
            )
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.5b", "1.5b"])
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2, help="of an update")
    parser.add_argument(
        "--length", type=int, default=2048, help="tokens of a sample, a quarter of them prompt"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fp32", action="store_true", help="instead of bf16")
    parser.add_argument("--small", action="store_true", help="a rehearsal: a tiny model, few tokens")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.models, arguments.tokens, arguments.length, arguments.repeats = ["small"], 64, 32, 2
    if not CUDA and not arguments.small:
        parser.error("there is no GPU here, and a CPU takes hours: --small rehearses")
    if arguments.tokens % arguments.length:
        parser.error(f"--tokens ({arguments.tokens}) must be a multiple of --length ({arguments.length})")
    return arguments


def matrix_rate(arguments: argparse.Namespace) -> float:
    """Return the FLOP/s of a large matrix product in the dtype of the weights, the median of several."""
    size = 256 if arguments.small else 8192
    dtype = torch.float32 if arguments.fp32 else torch.bfloat16
    left, right = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
    return 2 * size**3 / timed(lambda: left @ right, repeats=20)


def timed(work: Callable[[], object], repeats: int) -> float:
    """Return the median of the seconds of `repeats` runs, after two that do not count."""
    seconds = []
    for _ in range(repeats + 2):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def collect_garbage() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def measure(name: str, arguments: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG | MODELS[name]))
        shape = ModelShape.load(folder)
        config = ModelConfig(model=folder, bf16=not arguments.fp32)
        policy = Policy(shape, MESH, config, ParallelConfig(), OptimizerConfig(lr=1e-6))
    atlas = megatron_atlases(shape, MESH, uses_transformer_engine())[0]
    random_weights(shape, atlas, policy.parameters, seed=0)
    policy.parameters_changed()
    batches = micro_batches(shape.vocab_size, arguments)
    num_responses = sum(len(micro.response_positions) for micro in batches)

    def loss(micro, log_probs, entropy, rows):
        return -log_probs.sum() / num_responses, {}

    def update() -> None:
        policy.advance_schedule()
        policy.update(batches, loss, temperature=1.0)

    collect_garbage()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    seconds = {
        "update": timed(update, arguments.repeats),
        "log_probs": timed(lambda: policy.log_probs(batches, 1.0), arguments.repeats),
    }
    num_tokens = arguments.tokens * len(batches)
    forward = forward_flops(policy, shape, num_tokens, num_responses, arguments.length)
    return {
        part: {
            "seconds": seconds[part],
            "tokens_per_s": num_tokens / seconds[part],
            "flops": forward * (3 if part == "update" else 1),
        }
        for part in seconds
    } | {
        "tokens": num_tokens,
        "length": arguments.length,
        "peak_bytes": torch.cuda.max_memory_allocated() if CUDA else 0,
    }


def micro_batches(vocab_size: int, arguments: argparse.Namespace) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)
    prompt = arguments.length // 4
    batches = []
    for first in range(arguments.micro_batches):
        count = arguments.tokens // arguments.length
        prompts, responses = (
            torch.randint(3, vocab_size, (count, size), generator=generator).tolist()
            for size in (prompt, arguments.length - prompt)
        )
        ids = list(range(first * count, (first + 1) * count))
        batches.append(MicroBatch.of(Batch.from_samples(ids, prompts, responses)))
    return batches


def forward_flops(
    policy: Policy, shape: ModelShape, num_tokens: int, num_responses: int, length: int
) -> float:
    """Return the operations of a forward pass: the output layer sees the response tokens only."""
    layers = sum(
        weight.numel()
        for name, weight in policy.parameters.items()
        if weight.dim() == 2 and min(weight.shape) > 1 and ".layers." in name  # not biases and norms
    )
    channels = shape.num_attention_heads * shape.head_dim
    attention = shape.num_layers * 2 * 2 * channels * length / 2  # scores and values, per token
    return num_tokens * (2 * layers + attention) + num_responses * 2 * shape.hidden_size * shape.vocab_size


if __name__ == "__main__":
    sys.exit(main())
