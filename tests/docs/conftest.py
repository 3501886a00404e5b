from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

SMALL = f"""--train-iters 2 --num-prompts 4 --num-samples-per-prompt 4 --global-batch-size 8
--max-response-length 16 --lr-warmup-iters 0 --eval-interval 2 --eval-num-prompts 8
--reward-function "{ROOT / "tests" / "e2e" / "reward.py"}:lower_case"
"""
"""Flags with which a job of the recipes takes seconds. An untrained model earns some of this reward."""
LEARNING_RATES = {"quickstart_grpo": "--lr 1e-2", "quickstart_ppo": "--actor-lr 1e-2 --critic-lr 1e-2"}
SHORT = {
    "relay_sft": "--train-iters 3",
    "relay_ippo": "--train-iters 2 --eval-interval 2 --lr-warmup-iters 1",
}
"""Recipe -> flags with which its own task takes seconds."""
QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
"""Where the config.json of Qwen2.5-7B differs from that of Qwen2.5-0.5B."""


@pytest.fixture(scope="session")
def quickstart_files(tmp_path_factory) -> Path:
    """The quickstart's data, and its untrained model where the recipes look for the trained one."""
    from sums.files import make_sums

    folder = tmp_path_factory.mktemp("quickstart")
    make_sums(folder / "data", seed=0)
    (folder / "sft_mixed").mkdir()
    (folder / "sft_mixed" / "hf").symlink_to(folder / "data" / "model")
    return folder


@pytest.fixture
def checkout(quickstart_files, tmp_path, monkeypatch) -> Path:
    """The working directory of a page's reader: a checkout after `make quickstart`, with quick recipes.

    It has what pages call the reader's own files, too: job.args and path/to/hf-model."""
    folder = tmp_path / "checkout"
    (folder / "configs" / "real").mkdir(parents=True)
    for name in ("examples", "megarl", "tools", "triton_kernels"):
        (folder / name).symlink_to(ROOT / name)
    for recipe in (ROOT / "configs").glob("*.args"):
        (folder / "configs" / "real" / recipe.name).write_text(recipe.read_text())
        more = f"{SMALL}{LEARNING_RATES[recipe.stem]}\n" if recipe.stem in LEARNING_RATES else ""
        more += f"{SHORT[recipe.stem]}\n" if recipe.stem in SHORT else ""
        (folder / "configs" / recipe.name).write_text(f"@real/{recipe.name}\n{more}")
    (folder / "runs" / "quickstart").mkdir(parents=True)
    for name in ("data", "sft_mixed"):
        (folder / "runs" / "quickstart" / name).symlink_to(quickstart_files / name)
    (folder / "job.args").write_text("@configs/quickstart_grpo.args\n")
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "hf-model").symlink_to(quickstart_files / "data" / "model")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def qwen_7b(tmp_path_factory) -> Path:
    """config.json and tokenizer of a model of Qwen2.5-7B's shape, without weights."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import make_random_model
    finally:
        sys.path.remove(str(ROOT / "tools"))
    folder = tmp_path_factory.mktemp("models") / "Qwen2.5-7B"
    assert make_random_model.main(["--out", str(folder)]) == 0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | QWEN_7B))
    return folder
