"""A sample whose reward failed is as if it had never been sampled: losses, metrics and gradients of a step
against float64.

    pytest tests/workers/test_failed_rewards.py

The reference is transformers in float64, one sample at a time, and loops that have never heard of the failed
samples. The step is fp32: sums of some thousand numbers, so 1e-5 relative, and 1e-4 of a gradient norm."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.algorithms import PPO
from tests.workers.role_steps import run_on_ranks

spec = importlib.util.spec_from_file_location(
    "naive_ppo", Path(__file__).parents[1] / "algorithms/naive_ppo.py"
)
naive = importlib.util.module_from_spec(spec)
spec.loader.exec_module(naive)

ALGORITHMS = {
    "sequences": PPO(
        loss_aggregation="seq-mean-token-mean",
        entropy_coef=0.02,
        kl_mode="loss",
        kl_coef=0.3,
        kl_estimator="k2",
        tis_clip=1.5,
    ),
    "tokens": PPO(loss_aggregation="token-mean", kl_mode="reward", kl_coef=0.1, value_clip_eps=None),
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory, sums_data) -> Path:
    folder = tmp_path_factory.mktemp("failed")
    run_on_ranks(Path(__file__).with_name("run_failed_rewards.py"), folder, sums_data)
    (folder / "reference").symlink_to(sums_data / "model")
    return folder


def response_logits(model, row) -> torch.Tensor:
    """[n, V or 1] at the positions that predict the response."""
    ids = torch.tensor([row["prompt"] + row["response"]])
    hidden = model.base_model(ids).last_hidden_state[0]
    head = model.score if hasattr(model, "score") else model.lm_head
    return head(hidden)[len(row["prompt"]) - 1 : -1]


def load(kind, folder: Path):
    extra = {} if kind is AutoModelForCausalLM else {"num_labels": 1}
    return kind.from_pretrained(folder, dtype=torch.float64, **extra).train()  # no dropout in these models


def token_log_probs(logits, row) -> torch.Tensor:
    return torch.log_softmax(logits, -1)[torch.arange(len(row["response"])), torch.tensor(row["response"])]


def grad_norm(model, loss) -> float:
    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    return math.sqrt(sum(g.square().sum().item() for g in grads if g is not None))


@pytest.mark.parametrize("case", ALGORITHMS)
def test_a_step_with_failed_rewards_is_that_without_their_samples(steps, case):
    found, algorithm = json.loads((steps / case / "step.json").read_text()), ALGORITHMS[case]
    metrics = found["metrics"]
    scored = [row for row in found["rows"] if row["reward"] is not None]
    assert len(scored) == 5 and {row["mini_batch"] for row in scored} == {0}
    actor, reference = (load(AutoModelForCausalLM, steps / f) for f in (f"{case}/actor", "reference"))
    critic = load(AutoModelForSequenceClassification, steps / case / "critic")

    samples, of_policy, of_values = [], [], []
    for row in scored:
        logits = response_logits(actor, row)
        log_probs, values = token_log_probs(logits, row), response_logits(critic, row)[:, 0]
        with torch.no_grad():
            ref = token_log_probs(response_logits(reference, row), row)
        q = torch.log_softmax(logits, -1)
        of_policy.append(
            (log_probs, ref, -(q.exp() * q).sum(-1), torch.tensor(row["rollout"], dtype=torch.float64))
        )
        of_values.append(values)
        samples.append(
            dict(reward=row["reward"], old=log_probs.tolist(), ref=ref.tolist(), old_values=values.tolist())
        )
    advantages, returns, wanted = naive.naive_advantages(samples, algorithm, algorithm.kl_coef)

    n = sum(map(len, advantages))
    loss = value_loss = 0.0
    sums = dict.fromkeys(("policy/entropy", "policy/ref_kl", "policy/tis_weight"), 0.0)
    for (log_probs, ref, entropy, rollout), values, of_sample, targets in zip(
        of_policy, of_values, advantages, returns
    ):
        weight = 1 / n if algorithm.loss_aggregation == "token-mean" else 1 / len(scored) / len(targets)
        ratio = (log_probs - log_probs.detach()).exp()
        tis = (
            (log_probs.detach() - rollout).exp().clamp(max=algorithm.tis_clip) if algorithm.tis_clip else 1.0
        )
        kl = (log_probs - ref).square() / 2
        each = -tis * ratio * torch.tensor(of_sample, dtype=torch.float64)
        each = (
            each
            + (algorithm.kl_coef * kl if algorithm.kl_mode == "loss" else 0)
            - algorithm.entropy_coef * entropy
        )
        loss = loss + weight * each.sum()
        value_loss = (
            value_loss + weight * (values - torch.tensor(targets, dtype=torch.float64)).square().sum() / 2
        )
        sums["policy/entropy"] += (entropy.sum() if algorithm.entropy_coef else -rollout.sum()).item() / n
        sums["policy/ref_kl"] += (
            sum(naive.estimate_kl(d, algorithm.kl_estimator) for d in (log_probs - ref).tolist()) / n
        )
        sums["policy/tis_weight"] += tis.sum().item() / n if algorithm.tis_clip else 0.0
    wanted |= {name: value for name, value in sums.items() if value}
    wanted |= {
        "policy/loss": loss.item(),
        "critic/loss": value_loss.item(),
        "reward/failed": 7,
        "policy/updates_unscored": 1,
        "critic/updates_unscored": 1,
        "policy/ratio_deviation_max": 0,
        "policy/clip_fraction": 0,
        "policy/kl": 0,
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert metrics["policy/grad_norm"] == pytest.approx(grad_norm(actor, loss), rel=1e-4)
    assert metrics["critic/grad_norm"] == pytest.approx(grad_norm(critic, value_loss), rel=1e-4)
