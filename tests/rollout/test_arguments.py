"""What vLLM is told, and the process around it. No engine is started.

pytest tests/rollout/test_arguments.py"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.algorithms import GRPO
from megarl.config.hf_config import ModelShape
from megarl.config.installed import engine_args
from megarl.config.schema import (
    BatchConfig,
    DataConfig,
    ModelConfig,
    MoEConfig,
    PlacementConfig,
    ReshardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    StreamingConfig,
    TrainConfig,
)
from megarl.rollout.engine_arguments import engine_arguments
from megarl.rollout.engine_memory import sweep_shared_memory
from megarl.rollout.environment import engine_environment, prepare_environment, undisturbed
from megarl.rollout.judge import _cpu_kv_cache_bytes
from megarl.rollout.judge import _engine_arguments as judge_arguments
from megarl.rollout.kv_cache import MAX_CPU_KV_CACHE_BYTES, cpu_kv_cache_bytes
from megarl.rollout.out_of_process import _double_buffer
from megarl.rollout.processes import visible_devices
from megarl.rollout.vllm_engine import routed_experts
from tests.launch import run
from tests.rollout import jobs

SHAPE = ModelShape(
    model_type="qwen3",
    num_layers=2,
    hidden_size=128,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=32,
    ffn_hidden_size=256,
    vocab_size=283,
    tie_word_embeddings=False,
    qkv_bias=False,
    qk_layernorm=True,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=512,
    eos_token_ids=(1,),
    torch_dtype="float32",
)


def job(
    bf16: bool = False, tokenizer: str | None = None, sampling: dict | None = None, **rollout
) -> TrainConfig:
    return TrainConfig(
        algorithm=GRPO(),
        model=ModelConfig(model="folder", bf16=bf16, tokenizer_model=tokenizer),
        batch=BatchConfig(train_iters=1, seed=5),
        data=DataConfig(train_data=("unused.jsonl",)),
        run=RunConfig(save="unused"),
        rollout=RolloutConfig(**rollout),
        sampling=SamplingConfig(**{"max_prompt_length": 100, "max_response_length": 60, **(sampling or {})}),
    )


def test_training_depends_on_these_arguments():
    on_cpu, on_gpu = (engine_arguments(job(), SHAPE, on_cpu=cpu) for cpu in (True, False))
    for arguments in (on_cpu, on_gpu):
        assert arguments["logprobs_mode"] == "processed_logprobs" and arguments["weight_transfer_config"] == {
            "backend": "megarl"
        }
        assert (
            arguments["distributed_executor_backend"] == "external_launcher"
            and arguments["load_format"] == "dummy"
        )
        assert (
            arguments["max_model_len"] == 160
            and arguments["seed"] == 5
            and arguments["skip_tokenizer_init"] is True
        )
        assert (
            "max_num_batched_tokens" not in arguments and "block_size" not in arguments
        )  # None leaves vLLM's default
    assert on_cpu["enforce_eager"] and not on_gpu["enforce_eager"]
    assert (
        "gpu_memory_utilization" not in on_cpu
        and on_gpu["gpu_memory_utilization"] == 0.5
        and "kv_cache_memory_bytes" not in on_gpu
    )
    assert {"worker_cls", "scheduler_cls", "ir_op_priority"} & on_gpu.keys() == set()


@pytest.mark.parametrize(
    "bf16, dtype, expected",
    [(False, "auto", "float32"), (True, "auto", "bfloat16"), (True, "float32", "float32")],
)
def test_the_engine_computes_as_the_actor_trains(bf16, dtype, expected):
    assert engine_arguments(job(bf16, dtype=dtype), SHAPE, on_cpu=True)["dtype"] == expected


def test_bf16_logits_stay_fp32_on_a_gpu(tmp_path, monkeypatch):
    """The trainer's are. On a CPU they stay as they are: vLLM would convert the whole output layer at every
    token (model_executor/layers/logits_processor.py)."""
    from vllm.config import ModelConfig as EngineModelConfig
    from vllm.model_executor.models import registry

    # vLLM would ask what a class of models can do in a new process, which imports vLLM for 10 s.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function: function())
    jobs.make_folder(tmp_path, "qwen3")
    for bf16 in (True, False):
        on_gpu, on_cpu = (engine_arguments(job(bf16), SHAPE, on_cpu=cpu) for cpu in (False, True))
        assert "hf_overrides" not in on_cpu and ("hf_overrides" in on_gpu) == bf16
        names = ("dtype", "hf_overrides", "skip_tokenizer_init")
        given = {name: on_gpu[name] for name in names if name in on_gpu}
        taken = EngineModelConfig(model=str(tmp_path), **given)
        assert (taken.dtype, taken.head_dtype) == (getattr(torch, on_gpu["dtype"]), torch.float32)
    assert engine_arguments(job(True, dtype="float32"), SHAPE, on_cpu=False).get("hf_overrides") is None


def test_an_engines_groups_wait_as_long_as_the_jobs(monkeypatch):
    """Instead of PyTorch's half hour. vLLM's names are those of the installed version."""
    config = dataclasses.replace(job(), placement=PlacementConfig(call_timeout_s=7200))
    arguments = engine_arguments(config, SHAPE, on_cpu=False)
    names = ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds")
    assert {arguments[name] for name in names} == {7260} and set(names) <= engine_args().annotations.keys()


def test_other_engine_arguments_pass_through_but_not_those_that_training_needs():
    assert (
        engine_arguments(job(engine_args={"swap_space": 2, "enforce_eager": False}), SHAPE, on_cpu=True)[
            "enforce_eager"
        ]
        is False
    )
    with pytest.raises(
        ValueError,
        match=r"--rollout-logprobs-mode \(raw_logprobs\), --rollout-load-format \(auto\) cannot be chosen",
    ):
        engine_arguments(
            job(engine_args={"load_format": "auto", "logprobs_mode": "raw_logprobs"}), SHAPE, on_cpu=True
        )


EXPERTS = dataclasses.replace(
    SHAPE, model_type="qwen3_moe", num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=64
)


def test_the_engine_is_asked_for_its_experts():
    """--moe-routing-replay engine. vLLM's names are those of the installed version."""
    config = dataclasses.replace(job(), experts=MoEConfig(moe_routing_replay="engine"))
    assert engine_arguments(config, EXPERTS, on_cpu=False)["enable_return_routed_experts"] is True
    assert not {"enable_return_routed_experts"} & {
        *engine_arguments(job(), EXPERTS, on_cpu=False),
        *engine_arguments(config, SHAPE, on_cpu=False),
    }
    with pytest.raises(
        ValueError, match=r"--moe-routing-replay \(engine\): vLLM 0.32 .* Try --moe-routing-replay policy"
    ):
        engine_arguments(config, EXPERTS, on_cpu=True)
    assert "enable_return_routed_experts" in engine_args().annotations
    outputs = Path(importlib.util.find_spec("vllm").origin).with_name("outputs.py").read_text()
    assert "    routed_experts: np.ndarray | None = None  # [seq_len,layer_num,topk]" in outputs


@pytest.mark.parametrize(
    "num_experts, theirs, ours", [(8, np.uint8, torch.uint8), (300, np.uint16, torch.int16)]
)
def test_experts_are_those_of_every_token(num_experts, theirs, ours):
    """vLLM has no row of the last token, which it has not seen."""
    shape = dataclasses.replace(EXPERTS, num_moe_experts=num_experts)
    rows = np.random.default_rng(0).integers(0, num_experts, (6, 2, 2)).astype(theirs)
    found = routed_experts(rows, 7, shape)
    assert found.dtype == ours and found.tolist() == [*rows.tolist(), rows[-1].tolist()]
    for wrong in (None, rows[:5], rows[:, :1]):
        with pytest.raises(RuntimeError, match=r"experts of .*, not of \(6, 2, 2\)"):
            routed_experts(wrong, 7, shape)


def test_stop_strings_need_a_hugging_face_tokenizer(tmp_path):
    assert (
        engine_arguments(job(tokenizer="t", sampling={"stop": ("x",)}), SHAPE, on_cpu=True)["tokenizer"]
        == "t"
    )
    assert "tokenizer" not in engine_arguments(job(tokenizer="t"), SHAPE, on_cpu=True)
    (tmp_path / "spiece.model").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"--stop x needs a Hugging Face tokenizer, .*spiece.model\) is a SentencePiece file"
    ):
        engine_arguments(
            job(tokenizer=str(tmp_path / "spiece.model"), sampling={"stop": ("x",)}), SHAPE, on_cpu=True
        )


def test_kv_cache_on_cpu_holds_every_sequence_within_a_bound():
    per_token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, head_dim, bytes
    # 256 sequences of 160 tokens, each in two blocks of 128, and the block that vLLM keeps for itself
    assert cpu_kv_cache_bytes(SHAPE, 1, 4, 256, 160, 128) == per_token * 128 * (256 * 2 + 1)
    assert cpu_kv_cache_bytes(SHAPE, 2, 4, 256, 160, 128) == per_token // 2 * 128 * (256 * 2 + 1)
    assert cpu_kv_cache_bytes(SHAPE, 4, 2, 256, 160, 128) == per_token // 4 * 128 * (
        256 * 2 + 1
    )  # two ranks share a head
    large = dataclasses.replace(SHAPE, num_layers=64, num_query_groups=4, head_dim=128)
    assert (
        MAX_CPU_KV_CACHE_BYTES
        <= cpu_kv_cache_bytes(large, 1, 4, 256, 2048, 128)
        <= 1.05 * MAX_CPU_KV_CACHE_BYTES
    )
    assert (
        cpu_kv_cache_bytes(large, 1, 4, 256, 32768, 128) >= 2 * 32768 * 2 * 64 * 4 * 128 * 4
    )  # two long sequences fit whatever it takes


def test_kv_cache_on_cpu_is_for_the_sequences_that_the_job_has():
    config = job(
        sampling={"max_prompt_length": 1024, "max_response_length": 1024}
    )  # 16 prompts x 8 samples a step

    def num_sequences(config: TrainConfig, num_engines: int) -> float:
        return (
            engine_arguments(config, SHAPE, True, num_engines)["kv_cache_memory_bytes"]
            / (2 * 2 * 2 * 32 * 4 * 128)
            - 1
        ) / 16

    evaluated = dataclasses.replace(
        config, data=dataclasses.replace(config.data, eval_data=("unused.jsonl",))
    )
    of_200_rows = dataclasses.replace(evaluated, run=dataclasses.replace(config.run, eval_num_prompts=200))
    assert [num_sequences(config, n) for n in (1, 2, 3)] == [
        128,
        64,
        48,
    ]  # of 3 engines the busiest answers 6 prompts
    assert [num_sequences(of_200_rows, n) for n in (1, 2, 4)] == [200, 100, 50]
    assert [num_sequences(evaluated, n) for n in (1, 2)] == [
        256,
        256,
    ]  # how many rows is not known: as many as run at once
    assert num_sequences(dataclasses.replace(config, rollout=RolloutConfig(max_num_seqs=20)), 1) == 20

    def stale(config: TrainConfig, staleness: int, **streaming: object) -> TrainConfig:
        asked = StreamingConfig(staleness=staleness, **streaming)
        rollout = dataclasses.replace(config.rollout, max_num_seqs=460)
        return dataclasses.replace(config, streaming=asked, rollout=rollout)

    # With --staleness 1 the responses of two steps, four canaries, and the held-out rows beside them.
    assert [num_sequences(stale(config, 1), n) for n in (1, 2, 3)] == [256 + 4, 128 + 4, 88 + 4]
    assert [num_sequences(stale(of_200_rows, 1), n) for n in (1, 2)] == [256 + 200 + 4, 128 + 100 + 4]
    assert num_sequences(stale(config, 2, num_canaries=0), 1) == 3 * 128
    assert num_sequences(stale(config, 7), 1) == 460


# ------------------------------------------------------------------ environment


def test_an_engine_is_no_rank_and_keeps_what_the_user_set(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_MODEL_MIRROR", "/data/models")
    with engine_environment(None):
        assert "LOCAL_RANK" not in os.environ and os.environ["LOCAL_MODEL_MIRROR"] == "/data/models"
    assert os.environ["LOCAL_RANK"] == "1"


def test_environment_keeps_what_the_user_set(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    prepare_environment()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG" and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_our_kernels_under_vllms_name_are_refused():
    """Started in the checkout without PYTHONSAFEPATH, Python would find triton_kernels/ there."""
    checkout = Path(__file__).parents[2]
    code = "from megarl.rollout.environment import prepare_environment; prepare_environment()"
    found, safe = (
        run("-c", code, folder=checkout, environment={"PYTHONSAFEPATH": value}, timeout=60)
        for value in (None, "1")
    )
    assert found.returncode != 0 and "Start with PYTHONSAFEPATH=1" in found.stderr
    assert safe.returncode == 0, safe.stderr


def test_random_state_is_put_back():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    with undisturbed():
        torch.manual_seed(9), np.random.seed(9), random.seed(9)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


@pytest.mark.parametrize("before", [None, "libown.so"])
def test_processes_beside_the_engines_preload_no_library_of_vllm(monkeypatch, before):
    """LD_PRELOAD cannot name a path with blanks: the linker would complain in every process of a reward."""
    monkeypatch.setenv("LD_PRELOAD", before or "")
    if before is None:
        monkeypatch.delenv("LD_PRELOAD")
    with undisturbed():
        os.environ["LD_PRELOAD"] = "/a b/libgomp.so"
    assert os.environ.get("LD_PRELOAD") == before


def test_shared_memory_of_dead_jobs_is_swept():
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait(timeout=30)
    shm = Path("/dev/shm")
    dead, alive, foreign = (shm / f"megarl-{name}-test" for name in (gone.pid, os.getpid(), "notes"))
    try:
        for path in (dead, alive, foreign):
            path.touch()
        assert dead.name in sweep_shared_memory()
        assert not dead.exists() and alive.exists() and foreign.exists()
    finally:
        for path in (dead, alive, foreign):
            path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("wanted", "enforce_eager", "on_gpu", "expected"),
    [
        (None, None, False, True),
        (None, None, True, False),
        (False, None, False, False),
        (True, None, False, True),
        (True, True, True, True),
        (False, None, True, False),
        (True, None, True, "add --rollout-enforce-eager"),
    ],
)
def test_a_second_buffer_is_kept_where_nothing_has_kept_addresses(
    wanted, enforce_eager, on_gpu, expected, monkeypatch
):
    """CUDA graphs hold the addresses of the weights. Out of process the default is a second buffer where the
    engine runs eagerly, as on a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    config = dataclasses.replace(
        job(enforce_eager=enforce_eager), reshard=ReshardConfig(reshard_double_buffer=wanted)
    )
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            _double_buffer(config)
    else:
        assert _double_buffer(config) is expected


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_judges_engine_has_a_bounded_cache(on_gpu, tmp_path, monkeypatch):
    """On a CPU by its bytes, since vLLM would take half of the memory there; on a GPU by its share."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64})
    )
    arguments = judge_arguments(job(), str(tmp_path), 1, num_template_characters=50)
    sizes = {
        name: arguments.get(name)
        for name in ("gpu_memory_utilization", "enforce_eager", "kv_cache_memory_bytes")
    }
    if on_gpu:
        expected = {"gpu_memory_utilization": 0.3, "enforce_eager": None, "kv_cache_memory_bytes": None}
    else:
        tokens = arguments["max_model_len"]
        expected = {
            "gpu_memory_utilization": None,
            "enforce_eager": True,
            "kv_cache_memory_bytes": _cpu_kv_cache_bytes(
                {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, tokens
            ),
        }
        assert expected["kv_cache_memory_bytes"] >= 2 * 2 * 64 * 4 * tokens, "keys and values of a request"
    assert sizes == expected


@pytest.fixture
def gpu_rank(monkeypatch):
    """gpu_rank(rank) makes this process that rank of a job with four ranks and four GPUs on a node."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c,d")

    def become(rank: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setenv("LOCAL_RANK", str(rank % 4))

    return become


@pytest.mark.parametrize(
    "ranks, visible",
    [
        ([0, 1], "a,b,c,d"),
        ([2, 3], "c,d,a,b"),
        ([0, 2], "a,c,b,d"),  # --rollout-ranks 0,2
        ([5, 7], "b,d,a,c"),  # of the second node
        ([7, 4], "d,a,b,c"),
    ],
)
def test_an_engine_sees_the_gpus_of_its_ranks_first(gpu_rank, ranks, visible):
    gpu_rank(ranks[0])
    assert visible_devices(ranks, "--flag") == visible


@pytest.mark.parametrize("ranks, fits", [([2, 4], 1), ([4, 6, 8], 2), ([1, 5], 1)])
def test_an_engine_on_two_nodes_is_refused_by_the_names_of_its_ranks(gpu_rank, ranks, fits):
    gpu_rank(ranks[0])
    first = ranks[0] // 4 * 4
    with pytest.raises(ValueError) as error:
        visible_devices(ranks, "--rollout-tensor-parallel-size")
    assert str(error.value) == (
        f"--rollout-tensor-parallel-size ({len(ranks)}): an out-of-process engine runs on one node. The "
        f"engine of the ranks {', '.join(map(str, ranks))} has rank {ranks[0]} on the node of the ranks "
        f"{first} to {first + 3}, and rank {ranks[-1]} on another. Try {fits}, or other ranks."
    )
