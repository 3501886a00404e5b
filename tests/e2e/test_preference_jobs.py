"""Whole jobs that learn from pairs: the same steps in every layout and packing, and log-probs of the model
that transformers runs.

    pytest tests/e2e/test_preference_jobs.py                  one layout
    pytest tests/e2e/test_preference_jobs.py -m nightly       all layouts and algorithms, and what is learnt"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megarl.trainer.stored_reference import OtherReference, _check_index
from sums.files import make_sums, write_labelled
from tests.launch import run, succeed

ROOT = Path(__file__).parents[2]

PAIRS = {
    "dpo": "--label-smoothing 0.1 --nll-coef 0.1",
    "ipo": "",
    "simpo": "",
    "orpo": "",
    "rpo": "",
    "kto": "",
}
LAYOUTS = {
    "dp2": "--nproc-per-node 2 --max-tokens-per-micro-batch 32",
    "tp2": "--nproc-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "cp2": "--nproc-per-node 2 --context-parallel-size 2 --max-tokens-per-micro-batch 64",
    "pp2": "--nproc-per-node 2 --pipeline-model-parallel-size 2",
    "dp2_cp2": "--nproc-per-node 4 --context-parallel-size 2 --max-tokens-per-micro-batch 48",
    "sharded": "--nproc-per-node 2 --use-megatron-fsdp",
}
EXACT = ("logps/chosen", "logps/rejected", "rewards/margins", "rewards/accuracies", "policy/loss")


def arguments(sums_data, folder, algorithm, flags):
    data = sums_data / "pairs.jsonl"
    if algorithm == "kto":
        data = write_labelled(data, folder.with_suffix(".jsonl"))
    common = (
        f"-m megarl.cli train --algorithm {algorithm} --model {sums_data}/model "
        f"--train-data {data} --save {folder} --train-iters 3 --global-batch-size 8 --lr 1e-3 "
        f"--max-prompt-length 32 --max-response-length 48 --no-shuffle {flags}"
    )
    return common.split()


def steps(sums_data, folder, algorithm="dpo", flags="--nproc-per-node 1"):
    succeed(*arguments(sums_data, folder, algorithm, flags), timeout=240, preloaded=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_same(rows, others):
    assert len(rows) == len(others) == 3
    for row, other in zip(rows, others):
        for name in (*EXACT, "policy/grad_norm"):
            if name in row or name in other:  # kto ranks no pairs
                assert row[name] == pytest.approx(other[name], rel=2e-4, abs=2e-5), (row["step"], name)


@pytest.fixture(scope="module")
def one_rank(sums_data, tmp_path_factory):
    return steps(
        sums_data, tmp_path_factory.mktemp("one") / "run", flags=f"--nproc-per-node 1 {PAIRS['dpo']}"
    )


def test_the_first_step_is_that_of_transformers(sums_data, one_rank):
    """Sums of log-probs, loss and gradient norm of the first pairs, by transformers and autograd in
    float64."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sums_data / "model")
    model = AutoModelForCausalLM.from_pretrained(sums_data / "model", dtype=torch.float64)
    losses, sums = [], {"chosen": 0.0, "rejected": 0.0}
    for line in (sums_data / "pairs.jsonl").read_text().splitlines()[:8]:
        row, of_pair = json.loads(line), {}
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        for side in sums:
            answer = [*tokenizer.encode(row[side], add_special_tokens=False), tokenizer.eos_token_id]
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            of_pair[side] = logits.log_softmax(-1)[torch.arange(len(answer)), answer]
            sums[side] += float(of_pair[side].sum().detach()) / 8
        now = {side: log_probs.sum() for side, log_probs in of_pair.items()}
        margin = 0.1 * sum(
            sign * (now[side] - now[side].detach()) for side, sign in (("chosen", 1), ("rejected", -1))
        )
        smoothed = -0.9 * margin.sigmoid().log() - 0.1 * (-margin).sigmoid().log()
        losses.append(smoothed - 0.1 * of_pair["chosen"].mean())
    loss = sum(losses) / 8
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    first = one_rank[0]
    assert first["logps/chosen"] == pytest.approx(sums["chosen"], rel=1e-5)
    assert first["logps/rejected"] == pytest.approx(sums["rejected"], rel=1e-5)
    assert first["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert first["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert one_rank[2]["rewards/accuracies"] > 0.5 and one_rank[2]["policy/loss"] < first["policy/loss"]


def test_stored_log_probs_of_the_reference_make_the_same_steps(sums_data, tmp_path, one_rank):
    """The reference scores the rows once, in other micro-batches than a live one would, so results agree to
    the rounding of fp32. A job that finds log-probs of other values refuses them."""
    folder, flags = tmp_path / "run", f"--nproc-per-node 1 {PAIRS['dpo']} --precompute-ref-log-probs"
    rows = steps(sums_data, folder, flags=flags)
    check_same(rows, one_rank)
    index = json.loads((folder / "ref_log_probs" / "index.json").read_text())
    num_rows = sum(1 for _ in (sums_data / "pairs.jsonl").open())
    files = [*(folder / "ref_log_probs").glob("*.safetensors")]
    assert index["complete"] and len(files) == math.ceil(num_rows / 1024)

    _check_index(folder / "ref_log_probs", index)  # a job with the same values goes on
    for name in index.keys() - {"complete"}:
        with pytest.raises(OtherReference, match=f"are of other values than this job's: {name}. Remove"):
            _check_index(folder / "ref_log_probs", index | {name: "other"})


def test_rows_that_are_no_pairs_are_named_by_check(sums_data, tmp_path):
    words = arguments(sums_data, tmp_path / "run", "dpo", "--nproc-per-node 1")
    words[2] = "check"
    words[words.index("--train-data") + 1] = str(sums_data / "train.jsonl")
    done = run(*words, timeout=120, preloaded=True)
    assert done.returncode == 2 and "train.jsonl:1: no column 'chosen'" in done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_makes_the_same_steps(sums_data, tmp_path, one_rank, layout):
    check_same(steps(sums_data, tmp_path / "run", flags=f"{LAYOUTS[layout]} {PAIRS['dpo']}"), one_rank)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("algorithm", [name for name in PAIRS if name != "dpo"])
def test_every_algorithm_makes_the_same_steps_on_two_ranks(sums_data, tmp_path, algorithm):
    flags = PAIRS[algorithm]
    one = steps(sums_data, tmp_path / "one", algorithm, f"--nproc-per-node 1 {flags}")
    check_same(steps(sums_data, tmp_path / "two", algorithm, f"{LAYOUTS['dp2']} {flags}"), one)
    assert one[2]["rewards/margins"] > one[0]["rewards/margins"]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_adapters_and_a_resumed_run(sums_data, tmp_path):
    """With adapters the reference is the actor without them; a run that stops goes on as if it had not."""
    flags = "--nproc-per-node 1 --lora-rank 4 --save-interval 2"
    whole = steps(sums_data, tmp_path / "whole", flags=flags)
    assert whole[0]["rewards/margins"] == pytest.approx(0, abs=1e-5) and whole[2]["rewards/margins"] > 0.01
    load = f"--load {tmp_path}/whole/checkpoints/step_000002"
    resumed = steps(sums_data, tmp_path / "resumed", flags=f"{flags} {load}")
    assert [row["step"] for row in resumed] == [3]
    assert {name: resumed[0][name] for name in EXACT} == {name: whole[2][name] for name in EXACT}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["dpo", "ipo", "rpo", "kto"])
def test_stored_log_probs_are_completed_in_another_layout(sums_data, tmp_path, algorithm):
    """After an interruption two ranks score what is missing; a run that resumes has no reference."""
    folder = tmp_path / "run"
    flags = f"{PAIRS[algorithm]} --precompute-ref-log-probs"
    live = steps(sums_data, tmp_path / "live", algorithm, f"--nproc-per-node 1 {PAIRS[algorithm]}")
    steps(sums_data, folder, algorithm, f"{LAYOUTS['dp2']} {flags}")
    store = folder / "ref_log_probs"
    files = sorted(store.glob("*.safetensors"))
    assert len(files) == 2 * math.ceil(sum(1 for _ in (sums_data / "pairs.jsonl").open()) / 1024)
    files[0].unlink()  # what one rank has scored of the rows of a call
    index = json.loads((store / "index.json").read_text())
    again = tmp_path / "again"
    again.mkdir()
    store.rename(again / "ref_log_probs")
    (again / "ref_log_probs" / "index.json").write_text(json.dumps(index | {"complete": False}))
    check_same(steps(sums_data, again, algorithm, f"{LAYOUTS['pp2']} {flags} --save-interval 2"), live)
    done = run(
        *arguments(sums_data, tmp_path / "resumed", algorithm, f"{LAYOUTS['tp2']} {flags}"),
        *("--load", str(again / "checkpoints" / "step_000002")),
        timeout=240,
        preloaded=True,
    )
    assert done.returncode == 0, done.stderr
    assert "the model of reference is ready" in done.stdout  # another folder: scored anew
    last = [json.loads(line) for line in (tmp_path / "resumed" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in last] == [3]
    for name in EXACT:
        if name in live[2]:
            assert last[0][name] == pytest.approx(live[2][name], rel=2e-4, abs=2e-5), name


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_stored_log_probs_without_adapters(sums_data, tmp_path):
    flags = "--nproc-per-node 1 --lora-rank 4"
    live = steps(sums_data, tmp_path / "live", flags=flags)
    check_same(steps(sums_data, tmp_path / "stored", flags=f"{flags} --precompute-ref-log-probs"), live)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_learning_from_pairs_raises_held_out_accuracy(tmp_path):
    """The quickstart's warm-up, and each algorithm from there: at least 0.2 more of held-out sums are
    right."""
    make_sums(tmp_path / "data", seed=0)
    for stage in ("sft", "sft_mixed"):
        recipe = tmp_path / f"{stage}.args"
        text = (ROOT / "configs" / f"quickstart_{stage}.args").read_text()
        recipe.write_text(text.replace("runs/quickstart", str(tmp_path)).replace("1-2", "1"))
        succeed("-m", "megarl.cli", "train", f"@{recipe}", timeout=600, preloaded=True)
    script = ROOT / "tools" / "benchmarks" / "preference_learning.py"
    done = succeed(script, "--quickstart", tmp_path, "--out", tmp_path / "runs", timeout=1200)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    assert rows[0][0] == "warm-up" and {row[0] for row in rows[1:]} == {"dpo+nll", *PAIRS}
    assert all(float(row[2]) >= 0.2 and float(row[3]) > 0 for row in rows[1:]), done.stdout
