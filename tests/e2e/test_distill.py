"""Whole jobs that learn from a teacher of another size: its log-probs are those of transformers, in every layout.

pytest tests/e2e/test_distill.py                  one layout
pytest tests/e2e/test_distill.py -m nightly       others, KL to a foreign reference, what is learnt"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.e2e.jobs import train
from tests.launch import succeed

ROOT = Path(__file__).parents[2]
TEMPERATURE = 0.9  # of the jobs
LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "reference_on_rank_1": ("--reference-ranks", "1"),
    "engine": ("--old-log-probs", "engine"),
    "adapters": ("--lora-rank", "4"),
}


@pytest.fixture(scope="module")
def teacher(sums_data, tmp_path_factory):
    """A larger model, whose vocabulary is padded further, with the actor's tokenizer."""
    folder = tmp_path_factory.mktemp("teacher") / "larger"
    config = AutoConfig.from_pretrained(
        sums_data / "model",
        num_hidden_layers=4,
        hidden_size=192,
        intermediate_size=512,
        layer_types=["full_attention"] * 4,
    )
    config.vocab_size += 64
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(sums_data / "model").save_pretrained(folder)
    return folder


def distill(sums_data, folder, teacher, *flags):
    job = train(
        sums_data,
        folder,
        *("--algorithm", "distill", "--reference-model", str(teacher), "--num-rollouts-to-log", "-1"),
        *("--global-batch-size", "16", *flags),
    )
    assert job.returncode == 0, job.output
    return job


def mean_gap(job, teacher, step=1):
    """Mean of log engine - log teacher over the sampled tokens of a step, by transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    total = count = 0
    for line in (job.folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt, response = row["prompt_ids"], row["response_ids"]
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        of_tokens = logits.log_softmax(-1)[torch.arange(len(response)), response]
        total += row["rollout_log_prob"] - of_tokens.sum().item()
        count += len(response)
    return total / count


@pytest.mark.nightly
def test_two_teachers_of_the_same_rows_teach_by_their_weights(sums_data, tmp_path, teacher):
    """The KL is linear in log teacher, so it is the mean of the KLs to each with the same weights."""
    flags = ("--teachers", f"megarl/sums={teacher}", f"megarl/sums={sums_data / 'model'}")
    job = distill(sums_data, tmp_path / "run", teacher, *flags, "--teacher-weights", "0.7", "0.3")
    for row in job.steps:  # fp32 against float64
        gaps = [mean_gap(job, folder, row["step"]) for folder in (teacher, sums_data / "model")]
        assert abs(gaps[0] - gaps[1]) > 0.01
        assert row["distill/kl"] == pytest.approx(0.7 * gaps[0] + 0.3 * gaps[1], rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def dp2(sums_data, teacher, tmp_path_factory):
    return distill(sums_data, tmp_path_factory.mktemp("dp2") / "run", teacher)


def test_the_kl_is_that_to_the_teacher_of_transformers(dp2, teacher):
    for row in dp2.steps:  # fp32 against float64
        assert row["distill/kl"] == pytest.approx(mean_gap(dp2, teacher, row["step"]), rel=1e-4, abs=1e-5)
        assert row["policy/loss"] == pytest.approx(
            row["distill/kl"], rel=1e-4, abs=1e-5
        )  # -A, the ratio is 1
    assert dp2.steps[0]["distill/kl"] > 0.01  # else the teacher would be the policy


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts(sums_data, tmp_path, teacher, dp2, layout):
    job = distill(sums_data, tmp_path / "run", teacher, *LAYOUTS[layout])
    same = 1 if layout == "adapters" else 3  # which then train other weights
    for ours, other in zip(job.steps[:same], dp2.steps[:same]):
        for name in ("distill/kl", "policy/loss", "reward/mean"):
            assert ours[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@pytest.mark.nightly
def test_a_kl_to_a_foreign_reference(sums_data, tmp_path, teacher):
    flags = (
        "--kl-mode",
        "loss",
        "--kl-coef",
        "0.1",
        "--kl-estimator",
        "k1",
        "--reference-model",
        str(teacher),
    )
    job = train(
        sums_data, tmp_path / "run", *flags, "--num-rollouts-to-log", "-1", "--global-batch-size", "16"
    )
    assert job.returncode == 0, job.output
    assert job.steps[0]["policy/ref_kl"] == pytest.approx(mean_gap(job, teacher), rel=1e-4, abs=1e-5)


def check_that_it_learns(tmp_path, flags):
    """From the quickstart's warm-up: at least 0.9 of the accuracy of the model that GRPO has made of it, and
    0.2 more than before."""
    succeed(ROOT / "tools" / "quickstart.py", "--out", tmp_path / "quickstart", timeout=900)
    quickstart = tmp_path / "quickstart"
    words = (
        f"-m megarl.cli train @{ROOT}/configs/quickstart_grpo.args {flags} "
        f"--model {quickstart}/sft_mixed/hf --reference-model {quickstart}/grpo/hf "
        f"--train-data {quickstart}/data/train.jsonl --eval-data {quickstart}/data/test.jsonl --save {tmp_path}/run"
    )
    succeed(*words.split(), timeout=400, preloaded=True)

    def accuracies(run):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [row["eval/reward_greedy"] for row in rows if "eval/reward_greedy" in row]

    before, *_, after = accuracies(tmp_path / "run")
    assert after >= 0.9 * accuracies(quickstart / "grpo")[-1] and after >= before + 0.2


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_student_comes_near_a_teacher_that_was_trained(tmp_path):
    check_that_it_learns(tmp_path, "--algorithm distill")


def test_what_cannot_teach_is_refused(sums_data, tmp_path, teacher):
    def refused(*flags):
        job = train(sums_data, tmp_path / "run", *flags)
        assert job.returncode == 2 and not (tmp_path / "run").exists()
        return job.output

    assert "--reference-model (none): is the teacher" in refused("--algorithm", "distill")
    unread = refused("--reference-model", str(teacher))
    assert "so there is no reference role. Leave it out" in unread
    missing = refused("--algorithm", "distill", "--reference-model", "/nowhere")
    assert "--reference-model (/nowhere)" in missing or "--reference-model /nowhere" in missing
    other = tmp_path / "other"
    other.mkdir()
    for file in teacher.iterdir():
        (other / file.name).symlink_to(file)
    (other / "tokenizer.json").unlink()
    content = json.loads((teacher / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][-1] | {"content": "<|new|>", "id": 9999})
    (other / "tokenizer.json").write_text(json.dumps(content))
    text = refused("--algorithm", "distill", "--reference-model", str(other))
    assert "has another tokenizer than --model: token 9999 is '<|new|>' in one of them only" in text
