"""Whole jobs that learn from a teacher's whole distribution: the divergence is that of transformers in
float64, in every layout, over the whole vocabulary, over its most likely tokens, and with a hint that only
the teacher sees.

pytest tests/e2e/test_gkd.py                  one layout
pytest tests/e2e/test_gkd.py -m nightly       others, hints, what is learnt"""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megarl.kernels.divergence import Divergence, divergence_ref
from tests.e2e.jobs import train
from tests.e2e.test_distill import check_that_it_learns

TEMPERATURE = 0.9  # of the jobs
LAYOUTS = {
    "tp2": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "teacher tp2": ("--reference-tensor-model-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "cp2": ("--context-parallel-size", "2"),
    "reference_on_rank_1": ("--reference-ranks", "1", "--actor-ranks", "0"),
    "packing": ("--max-tokens-per-micro-batch", "96"),
}
KINDS = {
    "forward": (("--divergence", "forward-kl"), Divergence("forward-kl"), None),
    "jsd": (("--divergence", "jsd", "--jsd-beta", "0.3"), Divergence("jsd", 0.3), None),
    "top 4": (("--teacher-top-k", "4"), Divergence(), 4),
}


@pytest.fixture(scope="module")
def teacher(sums_data, tmp_path_factory):
    """A larger model, whose vocabulary is padded further, with the actor's tokenizer."""
    folder = tmp_path_factory.mktemp("teacher") / "larger"
    config = AutoConfig.from_pretrained(
        sums_data / "model",
        num_hidden_layers=2,
        hidden_size=192,
        intermediate_size=256,
        layer_types=["full_attention"] * 2,
        tie_word_embeddings=False,
    )
    config.vocab_size += 64
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(sums_data / "model").save_pretrained(folder)
    return folder


def gkd(sums_data, folder, *flags):
    job = train(
        sums_data,
        folder,
        *("--algorithm", "gkd", "--num-rollouts-to-log", "-1", "--global-batch-size", "16", *flags),
    )
    assert job.returncode == 0, job.output
    return job


def divergence(job, student, teacher, kind=Divergence(), top_k=None, hint=None):
    """Mean over the sampled tokens of the first step's samples with a reward, and the norm of its gradient by
    the student's weights, by transformers in float64."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (student, teacher)]
    vocab_size = models[0].config.vocab_size
    total, count = torch.zeros((), dtype=torch.float64), 0
    for line in (job.folder / "rollouts" / "step_000001.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["reward"] is None:
            continue
        prompt, response = row["prompt_ids"], row["response_ids"]
        prompts = [prompt, prompt if hint is None else hint(row)]
        logits = [
            model(torch.tensor([of_model + response])).logits[0, len(of_model) - 1 : -1]
            for model, of_model in zip(models, prompts)
        ]
        values = divergence_ref(
            *(x[:, :vocab_size] for x in logits),
            vocab_size=vocab_size,
            divergence=kind,
            temperature=TEMPERATURE,
            top_k=top_k,
        )
        total, count = total + values.sum(), count + len(response)
    mean = total / count
    mean.backward()
    grads = [p.grad for p in models[0].parameters() if p.grad is not None]
    return mean.item(), math.sqrt(sum(float(grad.square().sum()) for grad in grads))


def prompt_ids(tokenizer, text):
    said = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(whole, add_special_tokens=False)


@pytest.fixture(scope="module")
def dp2(sums_data, teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dp2") / "run"
    return gkd(sums_data, folder, "--reference-model", str(teacher))


def check_first_step(job, wanted):
    first = job.steps[0]
    mean, norm = wanted
    assert mean > 0.001  # else the teacher would be the policy
    # fp32 against float64
    assert first["distill/divergence"] == pytest.approx(mean, rel=1e-4)
    assert first["policy/loss"] == pytest.approx(mean, rel=1e-4)
    assert first["policy/grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_the_divergence_and_its_gradient_are_those_of_transformers(sums_data, dp2, teacher):
    check_first_step(dp2, divergence(dp2, sums_data / "model", teacher))


def test_a_sample_whose_reward_failed_is_left_out(sums_data, tmp_path, teacher):
    rule = tmp_path / "rule.py"
    rule.write_text(
        "def rule(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert solution_str in ('', ground_truth) or len(solution_str) % 3\n"  # megarl tries these two
        "    return 1.0\n"
    )
    failing = ("--reward-function", f"{rule}:rule", "--reward-max-failed-share", "1")
    job = gkd(sums_data, tmp_path / "run", "--reference-model", str(teacher), *failing, "--train-iters", "1")
    lines = (job.folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    num_failed = sum(json.loads(line)["reward"] is None for line in lines)
    assert 0 < num_failed < len(lines) and job.steps[0]["reward/failed"] == num_failed
    check_first_step(job, divergence(job, sums_data / "model", teacher))


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_other_divergences(sums_data, tmp_path, teacher, kind):
    flags, which, top_k = KINDS[kind]
    job = gkd(sums_data, tmp_path / "run", "--reference-model", str(teacher), *flags)
    check_first_step(job, divergence(job, sums_data / "model", teacher, which, top_k))


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("flags", [(), ("--teacher-top-k", "4")], ids=["vocabulary", "top_k"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts(sums_data, tmp_path, teacher, dp2, layout, flags):
    flags = ("--reference-model", str(teacher), *flags)
    wanted = dp2 if len(flags) == 2 else gkd(sums_data, tmp_path / "wanted", *flags)
    job = gkd(sums_data, tmp_path / "run", *flags, *LAYOUTS[layout])
    for ours, other in zip(job.steps, wanted.steps, strict=True):
        for name in ("distill/divergence", "policy/loss", "policy/grad_norm", "reward/mean"):
            assert ours[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [(), ("--teacher-top-k", "4"), ("--lora-rank", "4")], ids=" ".join)
def test_only_the_teacher_reads_the_hint(sums_data, tmp_path, flags):
    """The divergence is that of the model from itself with the longer prompt, and it falls."""
    tokenizer = AutoTokenizer.from_pretrained(sums_data / "model")
    hinted = {}
    for line in (sums_data / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        question, hint = row["prompt"][0]["content"], row["extra_info"]["answer"]
        longer = prompt_ids(tokenizer, f"{question}\n\n{hint}")
        hinted[tuple(prompt_ids(tokenizer, question))] = longer

    job = gkd(sums_data, tmp_path / "run", "--teacher-hint-key", "answer", *flags)
    top_k = 4 if "--teacher-top-k" in flags else None
    mean, norm = divergence(
        job, *[sums_data / "model"] * 2, top_k=top_k, hint=lambda row: hinted[tuple(row["prompt_ids"])]
    )
    first = job.steps[0]
    assert mean > 1e-4 and first["policy/loss"] == pytest.approx(mean, rel=1e-3)
    if "--lora-rank" not in flags:  # the norm is of other parameters there
        assert first["policy/grad_norm"] == pytest.approx(norm, rel=2e-3)


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", ["dp2", "pp2", "reference_on_rank_1"])
@pytest.mark.parametrize("algorithm", ["distill", "gkd"])
def test_each_source_has_its_teacher(sums_data, tmp_path, teacher, algorithm, layout):
    """Rows of source b are taught by the larger model, others by the model itself, which has nothing to
    teach."""
    lines = (sums_data / "train.jsonl").read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(sums_data / "model")
    data, sources = tmp_path / "two.jsonl", {}
    with data.open("w") as file:
        for at, line in enumerate(lines):
            row = json.loads(line) | {"data_source": "ab"[at % 2]}
            sources[tuple(prompt_ids(tokenizer, row["prompt"][0]["content"]))] = row["data_source"]
            file.write(f"{json.dumps(row)}\n")
    flags = ("--teacher-top-k", "4") if algorithm == "gkd" else ()
    job = train(
        sums_data,
        tmp_path / "run",
        *("--algorithm", algorithm, "--num-rollouts-to-log", "-1", "--global-batch-size", "16"),
        *("--train-data", str(data), "--reference-model", str(sums_data / "model")),
        *("--teachers", f"b={teacher}", *flags, *LAYOUTS.get(layout, ())),
    )
    assert job.returncode == 0, job.output
    path = job.folder / "rollouts" / "step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    taught = [row for row in rows if sources[tuple(row["prompt_ids"])] == "b"]
    assert 0 < len(taught) < len(rows)
    num_tokens = sum(len(row["response_ids"]) for row in rows)
    models = [
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float64) for p in (sums_data / "model", teacher)
    ]
    total = 0.0
    for row in taught:
        prompt, response = row["prompt_ids"], row["response_ids"]
        ids = torch.tensor([prompt + response])
        mine, other = (model(ids).logits[0, len(prompt) - 1 : -1].detach() for model in models)
        if algorithm == "gkd":
            size = models[0].config.vocab_size
            options = dict(vocab_size=size, divergence=Divergence(), temperature=TEMPERATURE, top_k=4)
            total += divergence_ref(mine, other[:, :size], **options).sum().item()
        else:
            at = torch.arange(len(response)), response
            of_teacher = (other / TEMPERATURE).log_softmax(-1)[at]
            total += row["rollout_log_prob"] - of_teacher.sum().item()
    name = "distill/divergence" if algorithm == "gkd" else "distill/kl"
    assert job.steps[0][name] == pytest.approx(total / num_tokens, rel=2e-4, abs=2e-5)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("flags", ["", "--teacher-top-k 8"])
def test_a_student_comes_near_a_teacher_that_was_trained(tmp_path, flags):
    check_that_it_learns(tmp_path, f"--algorithm gkd {flags}")
