"""Weights through real processes and real files: gloo with three ranks, safetensors in and out.

Expected shards are cut by hand (cuts.py). Copies are exact; fp32 -> bf16 equals torch's own rounding exactly.

    pytest tests/reshard/test_transfer.py"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.hf_config import ModelShape
from megarl.files.writing import WriteError
from megarl.reshard.atlas import hf_atlas
from megarl.reshard.export_folder import new_folder
from megarl.reshard.megatron_atlas import megatron_atlas
from megarl.reshard.plan import make_plan
from megarl.reshard.hf_weights import load_hf, save_hf
from megarl.reshard.transfer import Transfer, _chunks, _rounds
from megarl.reshard.vllm_atlas import vllm_atlas
from tests.launch import run_ranks
from tests.reshard.cuts import hf_model, make_shape, megatron_shard, vllm_shard

SHAPE = make_shape("qwen3", layers=3, vocab=61)
TIED = make_shape("qwen2", layers=3, vocab=61, tied=True)


def write_source(folder: Path, model: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "torch_dtype": "float32", "custom": [1, 2]})
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(b"\x00")
    (folder / "training_args.bin").write_bytes(b"no")
    if model is not None:
        save_file(model, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert not [
        name
        for name in expected
        if got[name].dtype != expected[name].dtype or not torch.equal(got[name], expected[name])
    ]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """(what each of the three ranks returned, folder of the exports)."""
    folder = tmp_path_factory.mktemp("transfer")
    write_source(folder / "source")
    script = Path(__file__).with_name("run_transfer.py")
    run_ranks(3, lambda rank: [script, folder, rank], timeout=60)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(3)], folder


def padded_to_seven(got: dict[str, torch.Tensor], vocab: int) -> dict[str, torch.Tensor]:
    """Padding rows keep what was there: the plan does not write them. They are set to 0 here, to compare the
    rest."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in got and vocab < len(got[name]):
            assert (got[name][vocab:] == 7).all()
            got[name] = torch.cat([got[name][:vocab], torch.zeros_like(got[name][vocab:])])
    return got


@pytest.mark.parametrize("in_rounds", [False, True], ids=["one round", "many rounds"])
@pytest.mark.parametrize("version, seed", [("first", 1), ("second", 2)])
@pytest.mark.parametrize("rank", [0, 2])
def test_tensor_parallel_to_bf16_engines(ranks, rank, version, seed, in_rounds):
    results = ranks[0][rank]
    result = (results["in_many_rounds"] if in_rounds else results)["tensor_parallel_to_bf16_engines"]
    expected = {name: t.bfloat16() for name, t in vllm_shard(SHAPE, hf_model(SHAPE, seed), 1, 0).items()}
    assert_same(padded_to_seven(result[version], SHAPE.vocab_size), expected)
    assert result["bytes"] == 2 * sum(t.numel() for t in hf_model(SHAPE, seed).values())


@pytest.mark.parametrize("in_rounds", [False, True], ids=["one round", "many rounds"])
@pytest.mark.parametrize("rank", [1, 2])
def test_pipeline_to_tensor_parallel(ranks, rank, in_rounds):
    results = ranks[0][rank]
    got = (results["in_many_rounds"] if in_rounds else results)["pipeline_to_tensor_parallel"]["got"]
    assert_same(padded_to_seven(got, 61 - 32 * (rank - 1)), vllm_shard(TIED, hf_model(TIED, 3), 2, rank - 1))


def test_ranks_outside_of_the_plan_take_no_part(ranks):
    assert_same(
        padded_to_seven(ranks[0][2]["only_two_ranks"]["got"], 61), vllm_shard(SHAPE, hf_model(SHAPE, 4), 1, 0)
    )


def test_export_from_pipeline_stages(ranks):
    folder = ranks[1] / "fp32"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert (
        len(files) > 2 and max((folder / file).stat().st_size for file in files) < 20_000 + 4096
    )  # data and header
    merged = {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
    assert_same(merged, hf_model(TIED, 5))
    assert {p.name for p in folder.iterdir()} == files | {
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "model.safetensors.index.json",
    }
    back = {name: torch.full((p.rows, p.cols), 9.0) for name, p in megatron_atlas(TIED, 2, 1, 3, 2).items()}
    load_hf(folder, megatron_atlas(TIED, 2, 1, 3, 2), back, TIED)
    assert_same(back, megatron_shard(TIED, hf_model(TIED, 5), 2, 1, 3, 2))
    assert not [p for p in ranks[1].iterdir() if p.name.startswith(".")]  # nothing temporary is left


def test_export_in_another_dtype_from_tensor_parallel_ranks(ranks):
    folder = ranks[1] / "bf16_tp2"
    assert_same(
        load_file(folder / "model.safetensors"), {name: t.bfloat16() for name, t in hf_model(TIED, 6).items()}
    )
    assert json.loads((folder / "config.json").read_text()) == {
        "model_type": "qwen2",
        "torch_dtype": "bfloat16",
        "custom": [1, 2],
    }


# ------------------------------------------------------------------ one process


@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (4, 3)])
def test_load_reads_each_shard(tmp_path, shape, tp, pp):
    model = hf_model(shape, seed=7)
    source = write_source(tmp_path / "source", model)
    for r in range(tp):
        for stage in range(pp):
            atlas = megatron_atlas(shape, tp, r, pp, stage)
            tensors = {
                name: torch.full((p.rows, p.cols), 9.0, dtype=torch.bfloat16) for name, p in atlas.items()
            }
            load_hf(source, atlas, tensors, shape)
            assert_same(
                tensors,
                {name: t.bfloat16() for name, t in megatron_shard(shape, model, tp, r, pp, stage).items()},
            )


def test_both_ends_cut_messages_alike_and_stage_only_what_they_must():
    """Rows of a matrix at one end, columns at the other; vectors; a conversion. At most 1,000 bytes at a
    time."""
    wire = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    shapes = [(64, 40), (7, 1), (3, 40), (30, 40)]
    rows = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, wire, strict=True)]
    columns = [torch.zeros(shape[0], 90)[:, 3 : 3 + shape[1]] for shape in shapes]
    here, there = _chunks(columns, wire, 1000), _chunks(rows, wire, 1000)
    assert [[view.shape for view in chunk.views] for chunk in here] == [
        [view.shape for view in chunk.views] for chunk in there
    ]
    assert [chunk.starts for chunk in here] == [chunk.starts for chunk in there]
    assert max(chunk.starts[-1] for chunk in here) <= 1000
    assert all(chunk.in_place() is None for chunk in here)
    # 64 rows of 80 bytes: 5 x 12 and the 4 left (320 bytes); 30 of 160: 5 x 6. The vector and the 3 rows (480
    # bytes) are one chunk each: the second is large enough to be alone.
    in_place = [chunk.in_place() for chunk in there]
    assert [None if message is None else message.numel() for message in in_place] == [960] * 5 + [
        320,
        None,
        480,
    ] + [960] * 5
    assert in_place[0].data_ptr() == rows[0].data_ptr()
    rounds = _rounds({}, {1: here, 2: here})
    staging = {
        message.untyped_storage().data_ptr(): message.untyped_storage().nbytes()
        for r in rounds
        for message in r.receives.values()
    }
    assert len(staging) == 2 and sum(staging.values()) <= 2 * 2 * 1000


def test_load_then_save_is_bit_equal(tmp_path):
    source = write_source(tmp_path / "source", hf_model(SHAPE, seed=8))
    atlas = megatron_atlas(SHAPE, 1, 0)
    tensors = {name: torch.empty(p.rows, p.cols) for name, p in atlas.items()}
    load_hf(source, atlas, tensors)
    for _ in range(2):  # the second export replaces the first
        save_hf(tmp_path / "out", source, SHAPE, {0: atlas}, tensors)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_fp16_engines_and_exports(tmp_path):
    """A dtype that neither side of the reshard has."""
    source, atlas = write_source(tmp_path / "source"), megatron_atlas(SHAPE, 1, 0)
    shard = megatron_shard(SHAPE, hf_model(SHAPE, seed=11), 1, 0)
    save_hf(tmp_path / "out", source, SHAPE, {0: atlas}, shard, dtype=torch.float16)
    assert_same(
        load_file(tmp_path / "out" / "model.safetensors"),
        {name: t.half() for name, t in hf_model(SHAPE, 11).items()},
    )


def test_save_does_not_replace_what_is_not_an_export(tmp_path):
    source = write_source(tmp_path / "source")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("precious")
    with pytest.raises(FileExistsError, match="home exists and is not an exported model"):
        save_hf(
            tmp_path / "home",
            source,
            SHAPE,
            {0: megatron_atlas(SHAPE, 1, 0)},
            megatron_shard(SHAPE, hf_model(SHAPE, 0), 1, 0),
        )
    assert (tmp_path / "home" / "thesis.tex").read_text() == "precious"


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    atlas, model = hf_atlas(SHAPE), hf_model(SHAPE, seed=9)
    tensors = {name: torch.empty(p.rows, p.cols) for name, p in atlas.items()}
    missing = {name: t for name, t in model.items() if name not in ("lm_head.weight", "model.norm.weight")}
    source = write_source(
        tmp_path / "a",
        missing
        | {
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(32),
            "model.rotary_emb.inv_freq": torch.zeros(4),
        },
    )
    with pytest.raises(
        ValueError,
        match=r"/a do not fit its config.json: model.norm.weight is missing; lm_head.weight is missing; "
        r"model.layers.0.self_attn.q_proj.bias is not a tensor of a qwen3 model\.",
    ):
        load_hf(source, atlas, tensors, SHAPE)
    source = write_source(tmp_path / "b", model | {"model.norm.weight": torch.zeros(16)})
    with pytest.raises(
        ValueError,
        match=r"/b do not fit .*: model.norm.weight in model.safetensors is 16x1 there and 32x1 by "
        r"config.json",
    ):
        load_hf(source, atlas, tensors, SHAPE)
    with pytest.raises(
        FileNotFoundError, match=r"no \*.safetensors in .*/c. --random-init starts without weights"
    ):
        load_hf(write_source(tmp_path / "c"), atlas, tensors)


def test_a_tied_checkpoint_may_repeat_its_embedding(tmp_path):
    model = hf_model(TIED, seed=10)
    source = write_source(
        tmp_path / "source", model | {"lm_head.weight": model["model.embed_tokens.weight"].clone()}
    )
    tensors = {name: torch.empty(p.rows, p.cols) for name, p in megatron_atlas(TIED, 1, 0).items()}
    load_hf(source, megatron_atlas(TIED, 1, 0), tensors, TIED)
    assert_same(tensors, megatron_shard(TIED, model, 1, 0))


def test_a_value_head_starts_at_zero_and_makes_the_export_a_classifier(tmp_path):
    """From a causal language model with tied embeddings, of which no copy is left in the export."""
    from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForCausalLM

    sizes = dict(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    causal = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True, num_labels=3))
    causal.save_pretrained(tmp_path / "source")
    shape = ModelShape.load(tmp_path / "source", value_head=True)
    halves = {r: megatron_atlas(shape, 1, 0, 2, r) for r in (0, 1)}
    tensors = {name: torch.full((p.rows, p.cols), 9.0) for name, p in megatron_atlas(shape, 1, 0).items()}
    load_hf(tmp_path / "source", megatron_atlas(shape, 1, 0), tensors, shape)
    assert (
        "output_layer.weight" not in halves[1].keys() | tensors.keys()
        and not tensors["value_head.weight"].any()
    )

    tensors["value_head.weight"].copy_(torch.arange(32.0)[None])
    save_hf(tmp_path / "out", tmp_path / "source", shape, {0: megatron_atlas(shape, 1, 0)}, tensors)
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(model).__name__ == "Qwen3ForSequenceClassification" and model.config.num_labels == 1
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(model.score.weight, torch.arange(32.0)[None])
    assert_same(model.model.state_dict(), causal.model.state_dict())
    assert (
        ModelShape.load(tmp_path / "out", value_head=True) == shape
    )  # and what was exported is read again, head included
    load_hf(
        tmp_path / "out",
        halves[1],
        again := {name: torch.zeros(p.rows, p.cols) for name, p in halves[1].items()},
        shape,
    )
    assert torch.equal(again["value_head.weight"], torch.arange(32.0)[None])


def test_classifiers_without_one_label_or_without_a_head_are_refused(tmp_path):
    shape = replace(SHAPE, value_head=True)
    model = {name: t for name, t in hf_model(SHAPE, seed=9).items() if name != "lm_head.weight"}
    tensors = {name: torch.empty(p.rows, p.cols) for name, p in hf_atlas(shape).items()}
    config = {"architectures": ["Qwen3ForSequenceClassification"]}
    for name, head in (("a", {}), ("b", {"score.weight": torch.zeros(2, 32)})):
        (write_source(tmp_path / name, model | head) / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"/a do not fit its config.json: score.weight is missing\."):
        load_hf(tmp_path / "a", hf_atlas(shape), tensors, shape)
    with pytest.raises(
        ValueError,
        match=r"/b do not fit .*: score.weight in model.safetensors has shape \[2, 32\]: num_labels "
        r"\(2\) must be 1",
    ):
        load_hf(tmp_path / "b", hf_atlas(shape), tensors, shape)


def test_tensors_that_do_not_fit_the_plan_are_refused():
    plan = make_plan({0: megatron_atlas(SHAPE, 1, 0)}, {0: vllm_atlas(SHAPE, 1, 0)})
    source = megatron_shard(SHAPE, hf_model(SHAPE, 0), 1, 0)
    good = {name: torch.empty(p.rows, p.cols) for name, p in vllm_atlas(SHAPE, 1, 0).items()}
    with pytest.raises(
        ValueError, match="source tensor decoder.final_layernorm.weight is in the plan but not among"
    ):
        Transfer(
            plan, 0, {n: t for n, t in source.items() if n != "decoder.final_layernorm.weight"}, good, {}
        )
    with pytest.raises(
        ValueError,
        match=r"destination tensor model.norm.weight has shape \[31, 1\]; the plan uses \[0:32, 0:1\]",
    ):
        Transfer(plan, 0, source, good | {"model.norm.weight": torch.empty(31, 1)}, {})


def export(folder: Path, text: str) -> None:
    with new_folder(folder, "config.json", "an exported model") as partial:
        (partial / "config.json").write_text(text)


@pytest.mark.parametrize("has_same_pid", [True, False])  # as the next process of a container often has
def test_an_export_removes_what_a_killed_one_left(tmp_path, has_same_pid):
    partial = tmp_path / f".h*f.partial-{os.getpid() if has_same_pid else 1}"
    partial.mkdir()
    (partial / "half a file").touch()
    export(tmp_path / "h*f", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["h*f"]
    assert [path.name for path in (tmp_path / "h*f").iterdir()] == ["config.json"]


def test_an_export_that_fails_puts_back_what_a_killed_one_had_moved_away(tmp_path):
    export(tmp_path / "hf", "old")
    (tmp_path / "hf").rename(tmp_path / ".hf.old-1")
    with pytest.raises(RuntimeError), new_folder(tmp_path / "hf", "config.json", "an exported model"):
        raise RuntimeError("no weights")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (tmp_path / "hf" / "config.json").read_text() == "old"


def test_an_export_that_cannot_take_its_place_leaves_the_old_one(tmp_path, monkeypatch):
    export(tmp_path / "hf", "old")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(WriteError, match="hf cannot be written: Input/output error"):
        export(tmp_path / "hf", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert (tmp_path / "hf" / "config.json").read_text() == "old"
