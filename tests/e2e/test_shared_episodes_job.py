"""Whole jobs in which two actors play in the same episodes, each with engine, critic and update of its own.

The update of each is recomputed from what the job logged, in float64 and without megarl's code: rewards by the
environment's rule, GAE by its definition with the critic's first values, which are 0, whitening, the gradient by
transformers, as in test_independent_recomputation.py.

pytest tests/e2e/test_shared_episodes_job.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.data.quick_tokenizer import load_quickly
from tests.e2e.jobs import Job, train
from tests.e2e.test_resume import exported, halves, rows
from tests.launch import succeed

ROOT = Path(__file__).resolve().parents[2]
ENV = f"{Path(__file__).with_name('envs.py')}:Pair"
TEMPERATURE, LAMBDA = {"actor": 0.9, "actor_2": 0.8}, {"actor": 0.95, "actor_2": 0.5}
FLAGS = (
    *("--algorithm", "ppo", "--num-actors", "2", "--env", ENV, "--share-episodes"),
    *("--actor-2-temperature", "0.8", "--actor-2-max-response-length", "6"),
    *("--max-turns", "4", "--max-context-length", "72", "--max-response-length", "8"),
    *("--num-rollouts-to-log", "-1", "--global-batch-size", "16"),
)
DECAY = ("--actor-2-gae-lambda", "0.5")  # of PPO only
ONE_RANK = ("--nproc-per-node", "1", "--train-iters", "1")


def job_of(data: Path, save: Path, *flags: str, decay: tuple[str, ...] = DECAY) -> Job:
    done = train(data, save, *FLAGS, *decay, *flags)
    assert done.returncode == 0, done.output
    return done


def logged(job: Job, step: int = 1) -> dict[str, dict[int, dict]]:
    """Actor -> episode -> its record."""
    lines = (job.folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    found: dict[str, dict[int, dict]] = {"actor": {}, "actor_2": {}}
    for row in map(json.loads, lines):
        found[row.get("actor", "actor")][row["sample_id"]] = row
    return found


def answers_of(row: dict) -> list[str]:
    return [one["content"] for one in row["turns"] if one["role"] == "assistant"]


def trained_at(row: dict) -> list[int]:
    """Places in response_ids of the sampled tokens."""
    holes = {at for start, end in row["holes"] for at in range(start, end)}
    return [at for at in range(len(row["response_ids"])) if at not in holes]


def share(text: str) -> float:
    return sum(c.islower() for c in text) / 20


def check_episodes(found: dict[str, dict[int, dict]], data: Path) -> int:
    """Rewards, observations and tokens of every episode. Returns the number of episodes without actor_2."""
    tokenizer, num_silent = load_quickly(data / "model"), 0
    assert found["actor"].keys() == found["actor_2"].keys() and len(found["actor"]) == 16
    for first, second in zip(found["actor"].values(), found["actor_2"].values(), strict=True):
        mine = answers_of(first)
        if second["turns"] == []:
            num_silent += 1
            assert len(mine) == 1 and len(mine[0]) % 4 == 0 and first["reward"] == share(mine[0])
            assert second["reward"] is None and second["response_length"] == 1
            assert second["failure"] == "the episode has ended without an answer of actor_2"
            continue
        other = answers_of(second)
        assert (len(mine), len(other)) == (2, 2)
        assert first["reward"] == pytest.approx(share(mine[0]) + share(mine[1]) + share(other[1]))
        assert second["reward"] == pytest.approx(share(other[0]) + share(other[1]))
        seen = [one["content"] for one in first["turns"] if one["role"] == "user"]
        assert seen == [f"2 {len(other[0])} é"]
        seen = [one["content"] for one in (*second["prompt"], *second["turns"]) if one["role"] == "user"]
        assert seen == [f"1 {len(mine[0])} é", f"3 {len(mine[1])} é"]
    for row in (row for of_actor in found.values() for row in of_actor.values()):
        assert row["prompt_ids"] == tokenizer.encode_prompt(row["prompt"])
        runs, end = [], 0
        for hole in [*row["holes"], [len(row["response_ids"])] * 2]:
            runs.append(tokenizer.decode(row["response_ids"][end : hole[0]]))
            end = hole[1]
        assert runs == answers_of(row) or not row["turns"]
    return num_silent


def advantages_by_hand(found: dict[int, dict], decay: float) -> tuple[dict[int, list[float]], list[float]]:
    """Episode -> whitened advantage of each sampled token, and all returns: delta is 0 but at the last token."""
    of = {}
    for episode, row in found.items():
        num = len(trained_at(row))
        if row["reward"] is not None:
            of[episode] = [row["reward"] * decay ** (num - 1 - at) for at in range(num)]
    flat = torch.tensor([one for own in of.values() for one in own], dtype=torch.float64)
    mean, std = float(flat.mean()), float(flat.std())
    return {episode: [(one - mean) / std for one in own] for episode, own in of.items()}, flat.tolist()


def check_update(actor: str, step: dict, found: dict[int, dict], start: Path) -> None:
    """Metrics of the step's only update of an actor and of its critic."""
    suffix = actor.removeprefix("actor")
    advantages, returns = advantages_by_hand(found, LAMBDA[actor])
    metric = {
        name: step[name.replace("/", f"{suffix}/")] for name in ("advantage/max_abs", "policy/grad_norm")
    }
    largest = max(abs(one) for own in advantages.values() for one in own)
    assert largest == pytest.approx(metric["advantage/max_abs"], rel=1e-5)  # fp32 over 200 tokens
    mean_return = sum(returns) / len(returns)
    assert mean_return == pytest.approx(step[f"critic{suffix}/return_mean"], rel=1e-5)
    assert step[f"critic{suffix}/value_mean"] == 0
    model = AutoModelForCausalLM.from_pretrained(
        start, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    model.get_input_embeddings().padding_idx = None
    loss = 0.0
    for episode, row in found.items():
        ids, num_prompt = torch.tensor([row["prompt_ids"] + row["response_ids"]]), len(row["prompt_ids"])
        logits = model(ids).logits[0, num_prompt - 1 : -1] / TEMPERATURE[actor]
        every = logits.log_softmax(-1)[torch.arange(len(logits)), ids[0, num_prompt:]]
        log_probs = every[trained_at(row)]
        assert log_probs.sum().item() == pytest.approx(
            row["rollout_log_prob"], abs=2e-4
        )  # fp32 in the engine
        if episode in advantages:
            own = torch.tensor(advantages[episode], dtype=torch.float64)
            loss = loss - (own * (log_probs - log_probs.detach()).exp()).sum() / len(returns)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(metric["policy/grad_norm"], rel=2e-5)


def check_rollout_time(step: dict) -> None:
    """The time in which the episodes are played counts once: the call of the other actor takes what was played."""
    first, second = step["time/rollout_s"], step["time_2/rollout_s"]
    assert 0 <= second < 0.1 * first < 0.1 * step["time/step_s"]


@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=pytest.mark.nightly)])
def test_two_policies_play_in_the_same_episodes_and_each_learns_from_its_own(sums_data, tmp_path, backend):
    """The suite runs the engines that start faster."""
    job = job_of(sums_data, tmp_path / "run", *ONE_RANK, "--rollout-backend", backend)
    (step,), found = job.steps, logged(job)
    num_silent = check_episodes(found, sums_data)
    assert 0 < num_silent < 16
    assert (step["reward/failed"], step["reward_2/failed"], step["reward_2/failed_silent"]) == (
        *(0, num_silent, num_silent),
    )
    for actor, suffix in (("actor", ""), ("actor_2", "_2")):
        assert step[f"mismatch{suffix}/max_abs"] < 5e-5
        num = sum(len(trained_at(row)) for row in found[actor].values())
        assert step[f"mismatch{suffix}/tokens"] == num
        scored = [row["reward"] for row in found[actor].values() if row["reward"] is not None]
        assert step[f"reward{suffix}/mean"] == pytest.approx(sum(scored) / len(scored))
        check_update(actor, step, found[actor], sums_data / "model")
    check_rollout_time(step)
    silent = [episode for episode, row in found["actor_2"].items() if not row["turns"]]
    drawn = [[found[actor][episode]["response_ids"][0] for episode in silent] for actor in found]
    same = sum(one == other for one, other in zip(*drawn, strict=True))
    assert same <= len(silent) / 2  # after the same prompt by the same weights, but each by draws of its own


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [
        ("--nproc-per-node", "2"),
        ("--nproc-per-node", "2", "--actor-ranks", "0", "--actor-2-ranks", "1", "--critic-ranks", "1"),
        ("--nproc-per-node", "2", "--rollout-tensor-parallel-size", "2"),
        ("--rollout-backend", "transformers"),
        ("--env-episodes-per-process", "1"),
        ("--executor", "inline"),
    ],
    ids=["two ranks", "apart", "tp2", "transformers", "process each", "inline"],
)
def test_other_layouts_play_the_same_episodes(flags, sums_data, tmp_path):
    one = job_of(sums_data, tmp_path / "one", *ONE_RANK)
    other = job_of(
        sums_data,
        tmp_path / "other",
        "--train-iters",
        "1",
        *ONE_RANK[:2] * ("--nproc-per-node" not in flags),
        *flags,
    )
    check_episodes(logged(other), sums_data)
    check_rollout_time(other.steps[0])
    for actor in ("actor", "actor_2"):
        mine, theirs = logged(one)[actor], logged(other)[actor]
        assert {key: row["response_ids"] for key, row in mine.items()} == {
            key: row["response_ids"] for key, row in theirs.items()
        }
    names = ("policy/grad_norm", "policy_2/grad_norm", "critic/loss", "critic_2/loss")
    ours = {name: one.steps[0][name] for name in names}
    assert ours == pytest.approx({name: other.steps[0][name] for name in names}, rel=1e-4)


@pytest.mark.nightly
def test_a_resumed_job_does_what_the_whole_one_does(sums_data, tmp_path):
    """Metrics and weights to the last bit, but what the engines' log-probs enter: engines in processes of their own
    batch turns as their environments reply."""
    whole, half = halves(sums_data, tmp_path, *FLAGS, *DECAY, *ONE_RANK[:2], steps=2)
    varying = ("mismatch/", "mismatch_2/")
    kept = [
        [{name: value for name, value in row.items() if not name.startswith(varying)} for row in rows(job, 1)]
        for job in (whole, half)
    ]
    assert kept[0] == kept[1] and len(kept[0]) == 1
    assert exported(whole) == exported(half) and len(exported(whole)) == 4


@pytest.mark.nightly
def test_the_relay_example_passes_hints_on(tmp_path):
    """The jobs of configs/relay_*.args, but short."""
    data, common = tmp_path / "data", ("-m", "megarl.cli", "train")
    succeed(ROOT / "examples" / "relay_env.py", data, timeout=60, folder=ROOT)
    sft = ("--model", data / "model", "--train-data", data / "sft.jsonl", "--save", tmp_path / "sft")
    short = ("--train-iters", "100", "--lr-decay-iters", "100")
    succeed(*common, "@configs/relay_sft.args", *sft, *short, timeout=300, preloaded=True, folder=ROOT)
    save = ("--model", tmp_path / "sft" / "hf", "--save", tmp_path / "ippo", "--train-iters", "2")
    rows = (
        *("--train-data", data / "numbers.jsonl", "--eval-data", data / "numbers.jsonl"),
        *("--eval-interval", "2", "--eval-num-prompts", "8"),
    )
    flags = (*save, *rows, "--num-rollouts-to-log", "-1")
    succeed(*common, "@configs/relay_ippo.args", *flags, timeout=300, preloaded=True, folder=ROOT)
    job = Job(0, "", tmp_path / "ippo")
    for row, second in zip(*(of_actor.values() for of_actor in logged(job, 2).values()), strict=True):
        assert second["prompt"] == [{"role": "user", "content": f"{row['response'].strip()[:2]} ?"}]
        assert row["reward"] == second["reward"] == float(second["response"].strip() == row["ground_truth"])
    assert all(row["mismatch_2/max_abs"] < 5e-5 and row["reward/failed"] == 0 for row in job.steps)


@pytest.mark.nightly
def test_each_actor_has_a_reward_of_its_own_in_an_evaluation(sums_data, tmp_path):
    flags = (
        "--eval-data",
        str(sums_data / "test.parquet"),
        "--eval-interval",
        "1",
        "--eval-num-prompts",
        "6",
    )
    job = job_of(sums_data, tmp_path / "run", *ONE_RANK, *flags, "--actor-2-algorithm", "grpo", decay=())
    evaluated = [row for row in job.metrics if "eval/reward" in row]
    assert [row["step"] for row in evaluated] == [0, 1]
    lines = [json.loads(one) for one in (job.folder / "rollouts" / "eval.jsonl").read_text().splitlines()]
    assert {one["name"] for one in lines} == {
        *("eval/reward", "eval/reward_greedy", "eval_2/reward", "eval_2/reward_greedy")
    }
    assert all(row["eval/reward"] != row["eval_2/reward"] for row in evaluated)
    assert "critic/loss" in job.steps[0] and "critic_2/loss" not in job.steps[0]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_eval_of_a_run_plays_both_policies_as_its_last_evaluation_did(sums_data, tmp_path, backend):
    """Both means of both actors, bit for bit, from the run alone, by its exports and by its checkpoint; and every
    answer of the first row, which the job has logged."""
    flags = (
        "--eval-data",
        str(sums_data / "test.parquet"),
        "--eval-interval",
        "1",
        "--eval-num-prompts",
        "8",
    )
    flags += ("--save-interval", "1", "--rollout-backend", backend)
    job = job_of(sums_data, tmp_path / "run", *ONE_RANK, *flags)
    last, folder = job.metrics[-1], job.folder / "checkpoints" / "step_000001"
    assert last["eval/reward"] != last["eval_2/reward"]
    for arguments in ((job.folder, "--json"), (folder,)):
        command = ("-m", "megarl.cli", "eval", "--model", *arguments, "--out", "samples.jsonl")
        said = succeed(*command, timeout=400, preloaded=True, folder=tmp_path).stdout
        rows = [json.loads(one) for one in (tmp_path / "samples.jsonl").read_text().splitlines()]
        for name in ("eval/reward", "eval/reward_greedy", "eval_2/reward", "eval_2/reward_greedy"):
            scored = [row["reward"] for row in rows if row["name"] == name and row["reward"] is not None]
            assert sum(scored) / len(scored) == last[name] > 0
        logged_ = (job.folder / "rollouts" / "eval.jsonl").read_text().splitlines()[-4:]
        for row in map(json.loads, logged_):
            (same,) = [one for one in rows if one["name"] == row["name"] and one["sample_id"] == 0]
            assert same["reward"] == row["reward"] and same["num_turns"] == row["num_turns"]
        if "--json" not in arguments:
            assert [line for line in said.splitlines() if line in ("actor", "actor_2")] == [
                "actor",
                "actor_2",
            ]
            continue
        found = json.loads(said)
        for actor, suffix in (("actor", ""), ("actor_2", "_2")):
            assert found[actor]["all"]["reward"]["value"] == last[f"eval{suffix}/reward"]
            assert found[actor]["all"]["reward_greedy"]["value"] == last[f"eval{suffix}/reward_greedy"]
    shown = succeed("-m", "megarl.cli", "show", "samples.jsonl", "--worst", "1", timeout=60, folder=tmp_path)
    assert "eval" in shown.stdout
