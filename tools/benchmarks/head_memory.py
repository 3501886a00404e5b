"""How the memory of the output layer, forward and backward, grows with the number of tokens: a process of its
own per number and way.

    python tools/benchmarks/head_memory.py --json out.json [--tokens 1024 2048 4096 8192] [--num-hidden 256]
    [--vocab-size 32000]

Extra memory is the growth of the peak resident size over what was resident before, on CUDA that of the
allocated bytes, after a run that has loaded everything; the gradients of hidden states and weight are in it,
and shown. Then the growth per token, beside what the gradient of the hidden states takes of it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]  # missing under PYTHONSAFEPATH
from bench_kernels import describe
from head_contenders import Head
from turns import extra_memory

WAYS = ("fused", "recompute", "naive")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--num-hidden", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--way", choices=WAYS, help="measure this one here, for the first of --tokens, and print the bytes"
    )
    arguments = parser.parse_args()
    if arguments.way:
        print(measure(arguments))
        return 0
    report = describe(arguments.threads) | {
        "num_hidden": arguments.num_hidden,
        "vocab_size": arguments.vocab_size,
        "extra_bytes": {},
    }
    print(
        f"extra MiB, forward and backward, H={arguments.num_hidden} V={arguments.vocab_size}; T = "
        f"{arguments.tokens}"
    )
    for way in WAYS:
        extra = [in_a_process(arguments, way, num_tokens) for num_tokens in arguments.tokens]
        report["extra_bytes"][way] = dict(zip(arguments.tokens, extra))
        growth = (
            (extra[-1] - extra[0]) / (arguments.tokens[-1] - arguments.tokens[0])
            if len(extra) > 1
            else float("nan")
        )
        print(
            f"  {way:10}"
            + "".join(f"{size / 2**20:9.1f}" for size in extra)
            + f"   {growth:9.0f} bytes per token",
            flush=True,
        )
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def in_a_process(arguments: argparse.Namespace, way: str, num_tokens: int) -> int:
    sizes = dict(
        zip(
            ("--tokens", "--num-hidden", "--vocab-size", "--threads"),
            (num_tokens, arguments.num_hidden, arguments.vocab_size, arguments.threads),
        )
    )
    command = [
        sys.executable,
        __file__,
        "--way",
        way,
        *(str(word) for flag in sizes.items() for word in flag),
    ]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(arguments.threads)
    getattr(
        Head.random(64, arguments.num_hidden, 1000, entropy_coef=0.01, idle=0.0), arguments.way
    )()  # loads everything
    head = Head.random(
        arguments.tokens[0], arguments.num_hidden, arguments.vocab_size, entropy_coef=0.01, idle=0.0
    )
    return extra_memory(getattr(head, arguments.way))[0]


if __name__ == "__main__":
    sys.exit(main())
