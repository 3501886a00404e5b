"""Which settings a replay and its run must share. `pytest tests/rollout/test_replay_settings.py`"""

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.rollout.replay_settings import replay_settings

FILES = ("train", "eval", "sft", "train_2", "eval_2", "sft_2")


@pytest.mark.parametrize("changed", FILES)
def test_a_data_file_that_has_grown_is_another_setting(tmp_path, monkeypatch, changed):
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    flags = "--algorithm grpo --model m --save s --train-iters 3 --num-actors 2"
    flags += " --train-data train.jsonl --eval-data eval.jsonl --sft-data sft.jsonl"
    flags += " --actor-2-train-data train_2.jsonl --actor-2-eval-data eval_2.jsonl"
    flags += " --actor-2-sft-data sft_2.jsonl"
    config = load_config(flags.split(), REGISTRY)
    before = replay_settings(config, 2)
    with open(f"{changed}.jsonl", "a") as file:
        file.write("{}\n")
    after = replay_settings(config, 2)
    assert dict(after.items() - before.items()) == {f"bytes of {changed}.jsonl": "6"}
