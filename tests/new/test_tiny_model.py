"""Tiny models of every family are what Megatron-Core, vLLM and transformers take them for.

pytest tests/new/test_tiny_model.py              # folders, refusals, `megarl check`, transformers
pytest tests/new/test_tiny_model.py -m nightly   # a step of GRPO with each family"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from megarl import cli
from megarl.config.hf_config import ModelShape
from megarl.config.hf_families import FAMILIES
from megarl.config.rollout_backends import ROLLOUT_BACKENDS
from megarl.data.tokenizer import load_tokenizer
from megarl.new.tiny_config import TinySizes, size_errors
from megarl.new.tiny_model import NUM_BYTE_TOKENS
from megarl.reshard.atlas import hf_sizes
from tests.launch import succeed

ROW = {"prompt": [{"role": "user", "content": "Reverse cat"}], "reward_model": {"ground_truth": "tac"}}
REWARD = """
def reward(data_source, solution_str, ground_truth, extra_info):
    return float(sum(letter in ground_truth for letter in solution_str))
"""


def write(folder: Path, *flags: object) -> Path:
    assert cli.main(["tiny-model", "--out", str(folder), *map(str, flags)]) == 0
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Family -> its default tiny model."""
    folder = tmp_path_factory.mktemp("models")
    return {family: write(folder / family, "--family", family) for family in FAMILIES}


def job(folder: Path, model: Path) -> list[str]:
    """The arguments of a GRPO job of one step; its files are written into `folder`."""
    (folder / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n" * 2)
    (folder / "reward.py").write_text(REWARD)
    text = f"""--algorithm grpo --model {model} --train-data {folder}/rows.jsonl --save {folder}/run
        --reward-function {folder}/reward.py:reward --nproc-per-node 1 --train-iters 1 --num-prompts 2
        --num-samples-per-prompt 4 --global-batch-size 8 --max-prompt-length 32 --max-response-length 8"""
    return text.split()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_the_check(family, models, tmp_path, capsys):
    assert cli.main(["check", *job(tmp_path, models[family])]) == 0, capsys.readouterr()
    out = capsys.readouterr().out
    assert out.startswith("ok"), out


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_finds_every_weight_and_no_other(family, models):
    """A name that is missing would be drawn anew, so that vLLM and Megatron-Core had another model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(models[family], output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.architectures == [FAMILIES[family].architecture]
    tokenizer = AutoTokenizer.from_pretrained(models[family])
    ids = tokenizer.apply_chat_template(ROW["prompt"], add_generation_prompt=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(ids if torch.is_tensor(ids) else ids["input_ids"]).logits[0, -1]
    assert torch.isfinite(logits).all() and 0.01 < logits.std() < 3  # neither dead nor certain


@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_have_experts_and_dense_models_none(family, models):
    shape = ModelShape.load(models[family])
    assert shape.num_moe_experts == (4 if FAMILIES[family].is_moe else 0)
    assert (shape.num_layers, shape.hidden_size, shape.num_attention_heads) == (2, 128, 4)
    assert FAMILIES[family].has_latents or (shape.head_dim, shape.num_query_groups) == (32, 2)


def test_sizes_are_as_asked(tmp_path):
    flags = "--family qwen3_moe --hidden 96 --layers 3 --heads 6 --kv-heads 2 --ffn 40 --experts 6"
    shape = ModelShape.load(write(tmp_path / "m", *flags.split(), "--experts-per-token", 3, "--context", 100))
    assert (shape.hidden_size, shape.num_layers, shape.head_dim, shape.num_query_groups) == (96, 3, 16, 2)
    assert (shape.moe_ffn_hidden_size, shape.num_moe_experts, shape.moe_router_topk) == (40, 6, 3)
    assert shape.max_position_embeddings == 100


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    one, same, other = (write(tmp_path / name, "--seed", seed) for name, seed in zip("abc", (1, 1, 2)))
    files = sorted(path.name for path in one.iterdir())
    assert "model.safetensors" in files and "tokenizer.json" in files
    assert all((one / name).read_bytes() == (same / name).read_bytes() for name in files)
    assert [name for name in files if (one / name).read_bytes() != (other / name).read_bytes()] == [
        "model.safetensors"
    ]


def test_weights_in_bf16_are_those_in_fp32_rounded(tmp_path):
    import torch
    from safetensors.torch import load_file as load_torch

    flags = ("--family", "deepseek_v3", "--layers", 2)
    exact = load_file(write(tmp_path / "fp32", *flags) / "model.safetensors")
    rounded = load_torch(write(tmp_path / "bf16", *flags, "--dtype", "bfloat16") / "model.safetensors")
    assert exact.keys() == rounded.keys() == hf_sizes(ModelShape.load(tmp_path / "bf16")).keys()
    for name, tensor in rounded.items():
        kept = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(tensor, torch.from_numpy(exact[name]).to(tensor.dtype)), name


def test_without_weights(tmp_path, capsys):
    folder = write(tmp_path / "m")
    write(folder, "--no-weights")  # a model in the folder is replaced
    assert not (folder / "model.safetensors").exists() and "--random-init" in capsys.readouterr().out
    assert cli.main(["check", *job(tmp_path, folder), "--random-init"]) == 0, capsys.readouterr()


def test_a_token_is_a_byte_or_what_is_frequent_in_rows(tmp_path):
    rows = tmp_path / "rows.jsonl"
    answer = {"role": "assistant", "content": "übermorgen"}
    rows.write_text(
        f"{json.dumps(ROW)}\n{json.dumps({'messages': [*ROW['prompt'], answer]})}\n"
        + '{"prompt": "yesterday"}\n'
    )
    plain = load_tokenizer(str(write(tmp_path / "plain")), "--model")
    learnt_folder = write(tmp_path / "learnt", "--tokenizer-from", rows, "--vocab-size", 270)
    learnt = load_tokenizer(str(learnt_folder), "--model")
    assert plain.vocab_size == NUM_BYTE_TOKENS == 262 and learnt.vocab_size == 270
    assert ModelShape.load(learnt_folder).vocab_size == 270
    for text in ("Reverse cat", "12 übermorgen", "日本", "<|end|>"):
        assert plain.decode_batch([plain.encode_responses([text])[0]]) == [text if text != "<|end|>" else ""]
    assert len(plain.encode_responses(["Reverse cat"])[0]) == len("Reverse cat")
    assert len(learnt.encode_responses(["Reverse"])[0]) < 7 and len(learnt.encode_responses(["12"])[0]) == 2


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--family qwen4", "--family (qwen4): must be one of qwen2, qwen3, "),
        (
            "--hidden 60",
            "--hidden (60): must be a multiple of 32, the size of a head unless --heads is given. Try 64.",
        ),
        ("--hidden 96 --heads 5", "--heads (5): must divide --hidden (96). Try 4 or 6."),
        ("--hidden 12 --heads 4", "--heads (4): heads of --hidden (12) / 4 = 3 must have an even size"),
        ("--hidden 96 --heads 6 --kv-heads 4", "--kv-heads (4): must divide --heads (6). Try 2 or 3."),
        ("--family deepseek_v2 --kv-heads 1", "--kv-heads (1): must be --heads (4) for deepseek_v2"),
        ("--experts 4", "--experts (4): qwen3 has no experts. Leave it out, or try --family qwen3_moe, "),
        ("--experts-per-token 1", "--experts-per-token (1): qwen3 has no experts."),
        (
            "--family mixtral --experts-per-token 5",
            "--experts-per-token (5): must be at most --experts (4). Try 2.",
        ),
        ("--layers 0", "--layers (0): must be a whole number of at least 1. Try 2."),
        ("--vocab-size 300", "--vocab-size (300): needs --tokenizer-from, "),
        ("--tokenizer-from none.jsonl", "--tokenizer-from (none.jsonl): "),
        ("--tokenizer-from bad.jsonl", "--tokenizer-from (bad.jsonl): bad.jsonl:1: "),
        (
            "--tokenizer-from bad.jsonl --vocab-size 100",
            "--vocab-size (100): must be a whole number of at least 262",
        ),
        ("--seed 4294967296", "--seed (4294967296): must be at most 4294967295. Try 0."),
        ("--hiden 64", "--hiden: no such flag of megarl tiny-model. Did you mean --hidden?"),
    ],
)
def test_refusals(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"prompt": []}\n')
    assert cli.main(["tiny-model", "--out", "m", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert not Path("m").exists()


def test_all_errors_come_at_once_and_folders_of_others_are_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    assert cli.main(["tiny-model", "--out", "mine", "--heads", "5", "--experts", "2"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("3 configuration errors:") and "--out (mine): exists and holds no model." in err
    assert [path.name for path in Path("mine").iterdir()] == ["notes.txt"]


def test_what_an_error_proposes_has_no_errors():
    assert not list(size_errors(TinySizes(hidden=96, heads=6, kv_heads=3)))
    assert not list(size_errors(TinySizes(hidden=12, heads=6)))


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ROLLOUT_BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_a_step(family, backend, models, tmp_path):
    """The step passes the log-prob gate: the engine and Megatron-Core have the same model."""
    arguments = [*job(tmp_path, models[family]), "--rollout-backend", backend]
    succeed("-m", "megarl.cli", "train", *arguments, timeout=240, preloaded=True)
    [step] = [
        row
        for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if "reward/mean" in row
    ]
    assert step["mismatch/max_abs"] < 1e-4 and step["policy/grad_norm"] >= 0
