"""A job in fp32 computes in fp32 on a GPU too: what NVIDIA's libraries and Triton read is set before they are
loaded.

pytest tests/workers/test_fp32.py"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from megarl.rollout.environment import engine_environment
from tests.launch import succeed

NAMES = ("NVIDIA_TF32_OVERRIDE", "TRITON_F32_DEFAULT")
RANK = """
import importlib.abc, os, sys
class Torch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "triton"):
            print(name, *(os.environ.get(n) for n in %r), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Torch())
from megarl.train import main
main(sys.argv[1:])
""" % (NAMES,)  # noqa: UP031 (braces are Python's here)
"""A rank, up to where it imports torch."""
DOT = """
import sys
from megarl.runtime.process import compute_fp32_exactly
if sys.argv[1] == "exact":
    compute_fp32_exactly()
import importlib.util
spec = importlib.util.spec_from_file_location("dot_kernel", sys.argv[2])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.ptx().count("tf32"))
"""
KERNEL = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def dot(x, y, out):
    i = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + i, tl.dot(tl.load(x + i), tl.load(y + i)))

def ptx():
    source = ASTSource(dot, {"x": "*fp32", "y": "*fp32", "out": "*fp32"})
    return triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]
"""


def environment(**changed) -> dict[str, str | None]:
    return dict.fromkeys((*NAMES, "TRITON_INTERPRET")) | changed


def first_import(*flags, **changed) -> list[str]:
    """What a rank imports first of torch and triton, and the two variables then."""
    job = "--algorithm sft --model model --train-data rows.jsonl --save run --train-iters 1"
    env = environment(RANK="1", WORLD_SIZE="2", **changed)
    done = succeed("-P", "-c", RANK, *job.split(), *flags, environment=env, timeout=60)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    "flags, changed, expected",
    [
        ((), {}, ["0", "ieee"]),
        (("--bf16",), {}, ["None", "None"]),  # keeps its speed where it computes in fp32
        (("--bf16", "--num-actors", "2", "--no-actor-2-bf16"), {}, ["0", "ieee"]),
        ((), {"NVIDIA_TF32_OVERRIDE": "1"}, ["1", "ieee"]),  # the user's
    ],
)
def test_a_rank_knows_before_it_imports_torch(flags, changed, expected):
    assert first_import(*flags, **changed) == ["torch", *expected]


def test_engines_inherit_it(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "inherited")
    with engine_environment(None):
        assert [os.environ[name] for name in NAMES] == ["inherited"] * 2


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler, and no GPU")
def test_a_kernel_that_says_nothing_multiplies_in_fp32(tmp_path):
    """As vLLM's attention for fp32, triton_unified_attention.py. Compiled for sm_80; the variable is part of
    the key of Triton's cache."""
    vllm = Path(importlib.util.find_spec("vllm").origin).parent
    attention = (vllm / "v1/attention/ops/triton_unified_attention.py").read_text()
    assert "tl.dot(" in attention and "input_precision" not in attention and "allow_tf32" not in attention
    (tmp_path / "kernel.py").write_text(KERNEL)
    env = environment(TRITON_CACHE_DIR=str(tmp_path / "cache"))
    counts = {}
    for mode in ("default", "exact"):
        done = succeed("-P", "-c", DOT, mode, tmp_path / "kernel.py", environment=env, timeout=120)
        counts[mode] = int(done.stdout)
    assert counts["default"] > 0 and counts["exact"] == 0
