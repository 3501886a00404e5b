"""`megarl reshard-plan` without torch, weights or data, on every configuration file; and how fast plans of
real sizes are.

pytest tests/reshard/test_report.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megarl import cli
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.reshard.atlas import hf_sizes
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.plan import make_plan
from megarl.reshard.vllm_atlas import vllm_atlases
from tests.launch import succeed

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*grpo*.args"))
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
JOB = ["--algorithm", "grpo"]


@pytest.fixture
def model(tmp_path):
    """model(config) -> a folder that holds config.json and nothing else."""

    def write(config: dict, name: str = "model") -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return str(tmp_path / name)

    return write


def output(capsys, *argv: str) -> str:
    assert cli.main(["reshard-plan", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.nightly
def test_real_sizes_are_planned(model):
    """0.05 s for 7B, 2 s for 128 experts; a plan that compares every piece with every other would run into
    the suite's deadline."""
    shape = ModelShape.load(model(QWEN_7B))
    plan = make_plan(
        megatron_atlases(shape, MeshSpec(tuple(range(8)), tp=4, pp=2)), vllm_atlases(shape, range(8), 2)
    )
    parameters = sum(rows * cols for rows, cols in hf_sizes(shape).values())
    assert sum(plan.num_bytes(2).values()) == 4 * (2 * parameters + 2 * _replicated(shape))

    shape = ModelShape.load(model(QWEN_30B_A3B))
    plan = make_plan(
        megatron_atlases(shape, MeshSpec(tuple(range(8)), tp=2, ep=4, etp=2)),
        vllm_atlases(shape, range(8), 2),
    )
    assert plan.ranks == tuple(range(8)) and sum(plan.num_bytes(2).values()) > 4 * 2 * 30e9


def _replicated(shape: ModelShape) -> int:
    """Elements that both ranks of an engine hold."""
    return sum(rows * cols for name, (rows, cols) in hf_sizes(shape).items() if "norm" in name)


def test_what_it_says_of_seven_billion_parameters(model, capsys):
    text = output(
        capsys,
        *JOB,
        "--model",
        model(QWEN_7B),
        "--bf16",
        "--nproc-per-node",
        "8",
        "--tensor-model-parallel-size",
        "4",
        "--pipeline-model-parallel-size",
        "2",
        "--rollout-tensor-parallel-size",
        "2",
    )
    assert "Megatron tp 4 pp 2 dp 1 (bfloat16) -> 4 vLLM engines of tp 2 (bfloat16)" in text
    assert "written: 60.927 GB, at most 7.616 GB on one rank; padding that is not written: 0 B" in text
    pairs = [float(size) for size in re.findall(r"^ +\d+ -> +\d+  ([\d.]+) GB$", text, re.M)]
    assert sum(pairs) == pytest.approx(60.927, abs=0.02)


def test_equal_layouts_are_aliased_and_take_no_time(model, capsys):
    same = [
        *JOB,
        "--model",
        model(QWEN_7B),
        "--bf16",
        "--nproc-per-node",
        "4",
        "--tensor-model-parallel-size",
        "4",
        "--rollout-tensor-parallel-size",
        "4",
    ]
    text = output(capsys, *same)
    assert "aliased: 15.232 GB, 100.0 % of what is written" in text and "expected: 0.00 ms per sync" in text
    assert "aliased: 0 B, 0.0 % of what is written: the dtypes differ" in output(
        capsys, *same, "--rollout-dtype", "float32"
    )


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--no-reshard-alias", "--no-reshard-alias"),
        ("--rollout-engine out-of-process", "the engines are in other processes"),
        ("--staleness 1 --weight-update wait", "--weight-update wait"),
    ],
)
def test_nothing_is_aliased_where_a_job_would_copy(model, capsys, flags, reason):
    job = [*JOB, "--model", model(QWEN_7B), "--bf16", *"--nproc-per-node 2 --qkv-layout stacked".split()]
    assert ", 100.0 % of what is written\n" in output(capsys, *job)
    assert f"aliased: 0 B, 0.0 % of what is written: {reason}\n" in output(capsys, *job, *flags.split())


def test_the_layout_is_that_of_the_backend(model, capsys):
    """Hugging Face's layout has q, k, v, gate and up apart, so it shares less with Megatron's."""
    job = [*JOB, "--model", model(QWEN_7B), "--bf16", "--nproc-per-node", "1"]
    vllm, transformers = (
        output(capsys, *job, "--rollout-backend", name) for name in ("vllm", "transformers")
    )
    assert "1 vLLM engines of tp 1" in vllm and "1 transformers engines of tp 1" in transformers
    shared = [float(re.search(r"aliased: ([\d.]+) GB", text)[1]) for text in (vllm, transformers)]
    assert 0 < shared[1] < shared[0]


def test_a_model_without_a_table_of_the_engines_layout_is_refused(model, capsys):
    config = {"model_type": "qwen2_moe", "head_dim": 64, "num_hidden_layers": 2}
    config = QWEN_30B_A3B | config | {"shared_expert_intermediate_size": 5632}
    job = ["reshard-plan", *JOB, "--model", model(config), "--nproc-per-node", "1"]
    assert cli.main(job) == 2
    assert (
        "there is no table of vLLM's layout of qwen2_moe. A job asks its engines" in capsys.readouterr().err
    )
    assert "1 transformers engines" in output(capsys, *job[1:], "--rollout-backend", "transformers")


def test_the_stacked_layout_is_aliased_at_several_query_groups_per_rank(model, capsys):
    job = [*JOB, "--model", model(QWEN_7B), "--bf16", "--nproc-per-node", "2"]
    assert "100.0 % of what is written" not in output(capsys, *job)
    assert "100.0 % of what is written" in output(capsys, *job, "--qkv-layout", "stacked")


def test_bandwidths_and_nodes_decide_the_time(model, capsys):
    job = [
        *JOB,
        "--model",
        model(QWEN_7B),
        "--bf16",
        "--world-size",
        "2",
        "--actor-ranks",
        "0",
        "--rollout-ranks",
        "0-1",
    ]
    one_way = 15.231  # GB: rank 1 gets the whole model
    seconds = (
        float(re.search(r"expected: ([\d.]+) ms", output(capsys, *job, "--link-bandwidth", "100"))[1]) / 1e3
    )
    assert seconds == pytest.approx(one_way / 100, rel=0.01)
    text = output(capsys, *job, "--ranks-per-node", "1", "--network-bandwidth", "10")
    assert "between nodes: 15.231 GB" in text
    assert float(re.search(r"expected: ([\d.]+) ms", text)[1]) == pytest.approx(1e3 * one_way / 10, rel=0.01)


def test_what_is_wrong_is_named_without_looking_at_data_or_weights(model, capsys):
    assert (
        cli.main(
            [
                "reshard-plan",
                *JOB,
                "--model",
                model(QWEN_7B),
                "--nproc-per-node",
                "3",
                "--tensor-model-parallel-size",
                "3",
            ]
        )
        == 2
    )
    assert (
        "--tensor-model-parallel-size (3): must divide the model's attention heads (28)"
        in capsys.readouterr().err
    )
    assert cli.main(["reshard-plan", "--algorithm", "sft", "--model", model(QWEN_7B)]) == 2
    assert "--algorithm (sft): has no rollout engine" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["reshard-plan", "--ranks-per-node", "0"])
    assert "argument --ranks-per-node: 0: must be above 0" in capsys.readouterr().err
    for flag, value in (("--world-size", "1" + "0" * 12), ("--link-bandwidth", "nan")):
        with pytest.raises(SystemExit):
            cli.main(["reshard-plan", flag, value])
        assert f"argument {flag}: {value}: must be above 0 and at most" in capsys.readouterr().err


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_file_without_torch(path, model):
    script = (
        "import sys; sys.modules.update(torch=None, vllm=None, megatron=None); import "
        "megarl.cli; sys.exit(megarl.cli.main(sys.argv[1:]))"
    )
    small = {**QWEN_7B, "num_hidden_layers": 2}
    argv = ["reshard-plan", f"@{path}", "--model", model(small)]
    done = succeed("-c", script, *argv, timeout=60)
    assert "expected: " in done.stdout
