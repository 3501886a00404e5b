"""An engine gives the memory of its KV cache back and takes it again, on a simulated GPU: vLLM's own calls,
its refusals, requests that go on, and how its size follows from what is free.

pytest tests/rollout/test_kv_cache.py"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.rollout.gpu_memory import (
    GRAPH_BYTES,
    cuda_graph_bytes,
    engine_activation_bytes,
    gpu_kv_cache_bytes,
)
from megarl.rollout.kv_cache import useful_kv_cache_bytes
from tests.launch import succeed
from tests.rollout.test_arguments import EXPERTS, SHAPE, job

VLLM = Path(importlib.util.find_spec("vllm").origin).parent


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("kv_cache")
    succeed(Path(__file__).with_name("run_kv_cache.py"), folder, timeout=240, preloaded=True)
    return json.loads((folder / "report.json").read_text())


def test_the_memory_leaves_once_and_comes_back(report):
    """Allocated, released, released again, synced, restored. A sync needs no KV cache."""
    size = report["num_bytes"]
    assert size > 0 and report["resident"] == [size, 0, 0, 0, size]
    count = report["log"].count("unmap")
    assert report["log"] == [*["map"] * count, *["unmap"] * count, *["map"] * count]


def test_samples_are_the_same_and_weights_stay(report):
    assert report["same"] and report["weights_stay"]


def test_unfinished_requests_compute_their_prefixes_anew(report):
    """The content of the cache was destroyed, and the tokens are those of requests that were left alone."""
    found = report["unfinished"]
    assert found["bytes"] == 0 and found["num_tokens"] == 16 * 24
    assert found["same"] and found["gap"] < 1e-5


def test_a_rank_that_kept_its_cache_forgets_prefixes_too(report):
    before, after = report["cached"]
    assert before > 0 and after == 0


def test_what_vllm_or_the_driver_refuses_is_raised(report):
    assert "the driver refuses to map" in report["no_room"] and not report["resident_after_refusal"]
    assert "release_kv_cache_memory() requires" in report["not_paused"]


def test_upstream_is_what_the_code_relies_on():
    """Lines of vLLM 0.32 that the comments name."""
    lines = {
        "v1/engine/core.py:1021": "def release_kv_cache_memory(self)",
        "entrypoints/llm.py:861": "def release_kv_cache_memory(self)",
        "device_allocator/cumem.py:382": "Expandable segments are incompatible with the memory pool used for",
        "device_allocator/cumem.py:399": "if tag != old_tag:",
        "config/vllm.py:2304": "cudagraph_capture_sizes = [1, 2, 4] + list(range(8, 256, 8)) + list(",
        "engine/arg_utils.py:2923": "if device_memory >= 160 * GiB_bytes:",
        "v1/worker/utils.py:761": "if init_snapshot.free_memory < requested_memory:",
    }
    for place, text in lines.items():
        file, _, line = place.partition(":")
        assert text in (VLLM / file).read_text().splitlines()[int(line) - 1], place


# ------------------------------------------------------------------ sizes


def test_cuda_graphs_are_counted_by_vllms_sizes():
    """256 sequences: 51 batches up to 512 tokens, and 35 up to 256 for decoding, as vLLM's log says
    (vllm-project/vllm#39559)."""
    assert cuda_graph_bytes(job()) == (51 + 35) * GRAPH_BYTES
    assert cuda_graph_bytes(job(max_num_seqs=4)) == (4 + 3) * GRAPH_BYTES
    assert cuda_graph_bytes(job(enforce_eager=True)) == 0


def test_the_activations_of_an_engine_are_its_widest_layer_or_its_logits():
    """SHAPE: hidden 128, an MLP of 256, 283 tokens of vocabulary."""
    assert engine_activation_bytes(job(max_num_batched_tokens=1000), SHAPE, 2, None) == 1000 * (256 + 768) * 2
    assert engine_activation_bytes(job(max_num_batched_tokens=1), SHAPE, 2, None) == 3 * 256 * 283 * 4
    small, large = (engine_activation_bytes(job(), SHAPE, 2, size) for size in (40 << 30, 80 << 30))
    assert large == 2 * small
    experts = engine_activation_bytes(job(max_num_batched_tokens=1000), EXPERTS, 2, None)
    assert experts == 1000 * (256 + max(768, 2 * (128 + 3 * 64))) * 2


def test_a_cache_is_a_share_of_what_is_free():
    assert gpu_kv_cache_bytes(job(), 1000, 0.9, None) == 900 and gpu_kv_cache_bytes(job(), -5, 0.9, 10) == 0


def test_a_step_fills_this_much():
    """SHAPE: keys and values of 2 layers, 2 heads of 32 in fp32, 1024 bytes a token. 8 prompts with 4 samples on 2 engines are 16
    sequences of 160 tokens, each with room for 128 more; and one spare. At most max_num_seqs."""
    config = job()
    config = replace(config, batch=replace(config.batch, num_prompts=8, num_samples_per_prompt=4))
    assert useful_kv_cache_bytes(config, SHAPE, 2, 4) == 17 * 288 * 1024
    few = replace(config, rollout=replace(config.rollout, max_num_seqs=3))
    assert useful_kv_cache_bytes(few, SHAPE, 2, 4) == 4 * 288 * 1024
    episodes = replace(config, episodes=replace(config.episodes, env="file.py:Env"))
    assert useful_kv_cache_bytes(episodes, SHAPE, 2, 4) is None


def test_a_cache_is_no_larger_than_a_steps_sequences_unless_asked():
    assert (
        gpu_kv_cache_bytes(job(), 1000, 0.9, 700) == 700 and gpu_kv_cache_bytes(job(), 500, 0.9, 700) == 450
    )
    assert gpu_kv_cache_bytes(job(free_gpu_memory_fraction=0.9), 1000, 0.9, 700) == 900
