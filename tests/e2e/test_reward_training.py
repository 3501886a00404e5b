"""Whole jobs that train a reward model: the steps of a plain loop around transformers' model, in every layout, and a
folder that the reward role loads.

    pytest tests/e2e/test_reward_training.py                  one layout
    pytest tests/e2e/test_reward_training.py -m nightly       all layouts, adapters, what is learnt"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megarl.rewards.classifier import Classifier
from tests.launch import succeed

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    "dp2": "--nproc-per-node 2 --max-tokens-per-micro-batch 32",
    "tp2": "--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "cp2": "--nproc-per-node 2 --context-parallel-size 2 --max-tokens-per-micro-batch 64",
    "pp2": "--nproc-per-node 2 --pipeline-model-parallel-size 2",
    "sharded": "--nproc-per-node 2 --use-megatron-fsdp",
}
METRICS = ("policy/loss", "policy/grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins")
FLAGS = "--margin 0.5 --margin-from-scores --center-coef 0.01"
LR, BATCH, STEPS = 1e-3, 8, 3


def train(sums_data, folder, flags, iters=STEPS):
    common = (
        f"-m megarl.cli train --algorithm bradley-terry --model {sums_data}/model "
        f"--train-data {sums_data}/pairs.jsonl --save {folder} --train-iters {iters} --global-batch-size {BATCH} "
        f"--lr {LR} --max-prompt-length 32 --max-response-length 48 --no-shuffle {FLAGS} {flags}"
    )
    done = succeed(*common.split(), timeout=240, preloaded=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], done.stdout


@pytest.fixture(scope="module")
def one_rank(sums_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    rows, told = train(sums_data, folder, "--nproc-per-node 1")
    return folder, rows, told


def sequences(sums_data, first, last):
    """(token ids of the chosen and the rejected answer with their prompt, difference of their scores) of rows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sums_data / "model")
    for line in (sums_data / "pairs.jsonl").read_text().splitlines()[first:last]:
        row = json.loads(line)
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        answers = [tokenizer.encode(row[side], add_special_tokens=False) for side in ("chosen", "rejected")]
        yield (
            [[*prompt, *ids, tokenizer.eos_token_id] for ids in answers],
            row["score_chosen"] - row["score_rejected"],
        )


def test_the_steps_are_those_of_a_plain_loop(sums_data, one_rank):
    """Three steps of AdamW in float64 on transformers' classifier. At the first one all scores are 0 and only the head
    has a gradient; the third one's loss has gone through the whole model twice. The job computes in fp32, and
    Adam's first step of each weight has the sign of its gradient whatever its size: 1e-3 of a loss of 0.6."""
    from transformers import AutoModelForSequenceClassification

    folder, rows, told = one_rank
    model = AutoModelForSequenceClassification.from_pretrained(
        sums_data / "model", num_labels=1, dtype=torch.float64
    )
    torch.nn.init.zeros_(model.score.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)

    def score(ids):
        return model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1])[0]

    for step, row in enumerate(rows):
        losses, margins = [], []
        for (chosen, rejected), difference in sequences(sums_data, step * BATCH, (step + 1) * BATCH):
            w, l = score(chosen), score(rejected)
            losses.append(-torch.sigmoid(w - l - 0.5 * difference).log() + 0.01 * (w + l) ** 2)
            margins.append((w - l).item())
        loss = sum(losses) / BATCH
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert row["policy/loss"] == pytest.approx(loss.item(), rel=1e-3), step
        assert row["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-2), step
        assert row["rewards/margins"] == pytest.approx(sum(margins) / BATCH, rel=1e-2, abs=1e-6), step
    assert rows[2]["policy/loss"] < rows[0]["policy/loss"] - 0.05
    assert f"--reward-model {folder}/hf" in told and "megarl chat" not in told
    exported = Classifier(str(folder / "hf"))
    texts = [ids for pair, _ in sequences(sums_data, 0, 4) for ids in pair]
    with torch.no_grad():
        expected = [float(score(ids)) for ids in texts]
    assert exported.scores(texts, max_tokens=4096) == pytest.approx(expected, rel=2e-2, abs=2e-3)


def check_same(rows, others):
    assert len(rows) == len(others) == STEPS
    for row, other in zip(rows, others):
        for name in METRICS:
            assert row[name] == pytest.approx(other[name], rel=2e-4, abs=2e-5), (row["step"], name)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_makes_the_same_steps(sums_data, tmp_path, one_rank, layout):
    check_same(train(sums_data, tmp_path / "run", LAYOUTS[layout])[0], one_rank[1])


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_resumed_run_with_adapters(sums_data, tmp_path):
    flags = "--nproc-per-node 1 --lora-rank 4 --save-interval 2"
    whole, _ = train(sums_data, tmp_path / "whole", flags)
    load = f"--load {tmp_path}/whole/checkpoints/step_000002"
    resumed, _ = train(sums_data, tmp_path / "resumed", f"{flags} {load}")
    assert [row["step"] for row in resumed] == [3]
    assert {name: resumed[0][name] for name in METRICS} == {name: whole[2][name] for name in METRICS}
    Classifier(str(tmp_path / "whole" / "hf"))


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_it_orders_held_out_pairs_and_serves_as_a_reward(sums_data, tmp_path):
    """At least 0.85 of the held-out pairs are ordered right, and a job of PPO takes the folder as its reward."""
    train(sums_data, tmp_path / "rm", "--nproc-per-node 1", iters=40)
    model, right = Classifier(str(tmp_path / "rm" / "hf")), 0
    held_out = tmp_path / "held_out"
    held_out.mkdir()
    (held_out / "model").symlink_to(sums_data / "model")
    (held_out / "pairs.jsonl").write_text((sums_data / "pairs_test.jsonl").read_text())
    pairs = [pair for pair, _ in sequences(held_out, 0, 200)]
    scores = model.scores([ids for pair in pairs for ids in pair], max_tokens=4096)
    right = sum(chosen > rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True))
    assert right / len(pairs) >= 0.85
    words = (
        f"-m megarl.cli train --algorithm ppo --model {sums_data}/model --critic-model {tmp_path}/rm/hf "
        f"--reward-model {tmp_path}/rm/hf --train-data {sums_data}/train.jsonl --save {tmp_path}/ppo "
        "--train-iters 2 --global-batch-size 8 --num-samples-per-prompt 2 --lr 1e-4 --max-prompt-length 32 "
        "--max-response-length 48 --nproc-per-node 1"
    )
    succeed(*words.split(), timeout=240, preloaded=True)
    rows = [json.loads(line) for line in (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(abs(row["reward/mean"]) > 0 for row in rows)
