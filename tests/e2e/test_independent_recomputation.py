"""A job's first update recomputed from what it logged, with transformers and none of megarl's code: rewards
looked up by sample, group advantages, loss, gradient norm. What a check inside megarl takes for granted, this
does not.

    pytest tests/e2e/test_independent_recomputation.py -m ""

The job makes one update of the whole step, so the order of samples and their split over ranks and
micro-batches do not matter. transformers computes in float64, the job in fp32: 5e-7 of the gradient norm was
seen, the bound is 1e-5. Two samples whose advantages are swapped move it by 1e-2 and more."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.jobs import Job, train
from tests.e2e.reward import lower_case
from tests.rollout.jobs import CONFIGS

TEMPERATURE = 0.9
FLAGS = (
    "--train-iters",
    "1",
    "--global-batch-size",
    "16",
    "--num-rollouts-to-log",
    "-1",
    "--temperature",
    str(TEMPERATURE),
    "--max-tokens-per-micro-batch",
    "120",
)
FAMILIES = ("qwen2", "llama", "llama_biases", "mistral", "gemma3", "qwen3_moe", "mixtral")


def write_model(quickstart: Path, folder: Path, family: str) -> Path:
    """Random weights, far from uniform, with the quickstart's tokenizer."""
    shutil.copytree(quickstart, folder, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    words = json.loads((quickstart / "config.json").read_text())
    config = CONFIGS[family].to_dict() | {key: words[key] for key in ("eos_token_id", "pad_token_id")}
    config["vocab_size"] = words["vocab_size"] + 8  # some families' tokenizers add words
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(type(CONFIGS[family]).from_dict(config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(
                0.3 if family == "gemma3" else 1.0, 0.2
            ) if parameter.dim() == 1 else parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    return folder


def advantages_by_hand(samples: list[dict]) -> dict[int, float]:
    """Sample id -> (reward - mean of its prompt's rewards) / (their standard deviation + 1e-4)."""
    advantages = {}
    for sample in samples:
        group = torch.tensor(
            [other["reward"] for other in samples if other["row"] == sample["row"]], dtype=torch.float64
        )
        assert len(group) == 4
        advantages[sample["sample_id"]] = float((sample["reward"] - group.mean()) / (group.std() + 1e-4))
    return advantages


def check(job: Job, start: Path) -> None:
    assert job.returncode == 0, job.output
    (step,) = job.steps
    samples = [
        json.loads(line) for line in (job.folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert len({sample["sample_id"] for sample in samples}) == 16
    for sample in samples:  # the reward is that of this text, and the text that of these tokens
        assert (
            sample["reward"] == lower_case("", sample["response"], None, {})
            and len(sample["response_ids"]) == sample["response_length"]
        )
    cut = [sample for sample in samples if sample["finish_reason"] == "length"]
    assert {sample["response_length"] for sample in cut} == {16} and len(cut) / 16 == step[
        "response/truncated"
    ]
    assert {sample["finish_reason"] for sample in samples} <= {"length", "stop"}
    advantages = advantages_by_hand(samples)
    num_tokens = sum(sample["response_length"] for sample in samples)
    # eager: torch's grouped product of experts takes no float64
    model = AutoModelForCausalLM.from_pretrained(
        start, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    # transformers gives the padding token's embedding no gradient. An answer may hold that token like any other.
    model.get_input_embeddings().padding_idx = None
    loss = 0.0
    for sample in samples:
        ids, start_at = (
            torch.tensor([sample["prompt_ids"] + sample["response_ids"]]),
            len(sample["prompt_ids"]),
        )
        logits = model(ids).logits[0, start_at - 1 : -1] / TEMPERATURE
        log_probs = logits.log_softmax(-1)[torch.arange(len(logits)), ids[0, start_at:]]
        # fp32 in the engine: up to 1e-5 of a log-prob of 5, summed over 16 tokens
        assert log_probs.sum().item() == pytest.approx(sample["rollout_log_prob"], abs=2e-4)
        # on policy: the ratio is 1 and its gradient is that of the log-prob
        loss = (
            loss - advantages[sample["sample_id"]] * (log_probs - log_probs.detach()).exp().sum() / num_tokens
        )
    loss.backward()
    grad_norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert max(map(abs, advantages.values())) == pytest.approx(step["advantage/max_abs"], rel=1e-6)
    assert loss.item() == pytest.approx(
        step["policy/loss"], abs=1e-6
    )  # a sum of numbers of size 1 over 240 tokens, which nearly cancel
    assert float(grad_norm) == pytest.approx(step["policy/grad_norm"], rel=1e-5)


def test_the_first_update_of_the_quickstart_is_what_transformers_makes_of_its_log(sums_data, tmp_path):
    check(train(sums_data, tmp_path / "run", *FLAGS), sums_data / "model")


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_update_of_every_family(sums_data, tmp_path, family):
    model = write_model(sums_data / "model", tmp_path / "model", family)
    check(train(sums_data, tmp_path / "run", "--model", str(model), *FLAGS), model)
