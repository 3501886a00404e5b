"""`megarl new` writes a task that runs as it is: its rows, reward, args files and README fit together.

pytest tests/new                 # the files, and a few steps of both jobs
pytest tests/new -m nightly      # the task as its README runs it, for two seeds: the model learns it"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import cli
from megarl.new.command import FILES, write_task
from megarl.rewards.custom import load_custom_reward
from tests.launch import succeed

SEEDS = (0, 1)


def make_task(folder: Path) -> Path:
    """Lay out a task and make its data and model, as its README says."""
    write_task(folder)
    subprocess.run([sys.executable, "make_data.py"], cwd=folder, check=True, capture_output=True)
    assert cli.main(["tiny-model", "--out", str(folder / "model")]) == 0
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return make_task(tmp_path_factory.mktemp("tasks") / "reverse")


def rows_of(task: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (task / "data" / f"{name}.jsonl").read_text().splitlines()]


def metrics_of(run_folder: Path) -> list[dict]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def test_layout_and_what_to_do_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "tasks/reverse"]) == 0
    assert sorted(path.name for path in (tmp_path / "tasks" / "reverse").iterdir()) == sorted(FILES)
    assert (tmp_path / "tasks" / "reverse" / "README.md").read_text().startswith("# reverse\n")
    out = capsys.readouterr().out
    assert "    cd tasks/reverse\n    python make_data.py " in out
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert cli.main(["new", "."]) == 0  # an empty folder will do
    assert Path("README.md").read_text().startswith("# here\n") and "cd " not in capsys.readouterr().out


@pytest.mark.parametrize("before", [{"notes.txt": "mine"}, {"README.md": "mine"}])
def test_a_folder_with_files_is_left_alone(before, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine-2").mkdir()
    for name, text in before.items():
        Path("mine", name).write_text(text)
    assert cli.main(["new", "mine"]) == 2
    assert capsys.readouterr().err == (
        "NAME (mine): exists and is not empty; nothing in it was changed. Try mine-3.\n"
    )
    assert {path.name: path.read_text() for path in Path("mine").iterdir()} == before


def test_other_refusals(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    for arguments, message in {
        ("file",): f"NAME (file): cannot be written: {tmp_path / 'file'} is a file. Name another folder.",
        ("a", "--modle", "x"): "--modle: no such flag of megarl new.",
        (): "the following arguments are required: NAME",
        ("file/a",): f"NAME (file/a): cannot be written: {tmp_path / 'file'} is a file.",
    }.items():
        capsys.readouterr()
        assert cli.main(["new", *arguments]) == 2, arguments
        assert capsys.readouterr().err.startswith(message), arguments


def test_rows(task):
    rows = {name: rows_of(task, name) for name in ("sft", "train", "test")}
    prompts = {name: [row["prompt"][0]["content"] for row in found] for name, found in rows.items()}
    for name, found in rows.items():
        for row, prompt in zip(found, prompts[name], strict=True):
            word = prompt.removeprefix("Reverse ")
            assert 3 <= len(word) <= 5 and row["reward_model"] == {"ground_truth": word[::-1]}
            assert row["response"] in (word, word[::-1]) if name == "sft" else "response" not in row
    right = [row["response"] == row["reward_model"]["ground_truth"] for row in rows["sft"]]
    assert 0.64 < sum(right) / len(right) < 0.71
    every = [prompt for found in prompts.values() for prompt in found]
    assert len(set(every)) == len(every)  # no row of one file in another


def test_reward(task):
    reward = load_custom_reward(f"{task / 'reward.py'}:reward")

    def score(answer: str) -> float:
        return reward(data_source="", solution_str=answer, ground_truth="tac", extra_info={})

    assert score("tac") == 1.0 and score("") == score("cxt") == 0.0
    assert 0 < score("tax") < 0.5 and score("tac" * 9) < score("taca") < score("tac")
    tried = subprocess.run([sys.executable, task / "reward.py"], capture_output=True, text=True, check=True)
    assert tried.stdout == "3 of 3 examples are right\n"


def test_a_wrong_example_fails_the_reward_s_own_test(tmp_path):
    write_task(tmp_path / "task")
    file = tmp_path / "task" / "reward.py"
    file.write_text(file.read_text().replace("return 1.0", "return 2.0"))
    tried = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
    assert tried.returncode == 1 and "2 of 3 examples are right" in tried.stdout


def test_its_jobs_pass_the_check(task, monkeypatch, capsys):
    monkeypatch.chdir(task)
    assert cli.main(["check", "@sft.args"]) == 0, capsys.readouterr()
    assert cli.main(["check", "@grpo.args", "--model", "model"]) == 0, capsys.readouterr()
    assert cli.main(["data", "data/train.jsonl", "data/test.jsonl", "--model", "model"]) == 0
    for args_file in ("sft.args", "grpo.args"):  # no row is longer than the jobs allow
        words = shlex.split(Path(args_file).read_text(), comments=True)
        limit = {flag: int(words[words.index(flag) + 1]) for flag in words if flag.endswith("-length")}
        assert limit == {"--max-prompt-length": 32, "--max-response-length": 8}


def test_commands_of_its_readme_are_ours(task):
    readme = (task / "README.md").read_text()
    for name in FILES[1:]:
        assert f"`{name}`" in readme
    commands = re.findall(r"^(?:echo .* \| )?megarl (\S+)", readme, re.MULTILINE)
    assert len(commands) >= 8 and set(commands) <= set(cli.COMMANDS)


def test_a_few_steps_of_both_jobs(tmp_path):
    """The args files as they are, but for their length. GRPO starts from the model that SFT leaves."""
    task = make_task(tmp_path / "reverse")
    sft_rows = task / "data" / "sft.jsonl"
    sft_rows.write_text("".join(sft_rows.read_text().splitlines(keepends=True)[:256]))  # encoded in no time
    common = ("-m", "megarl.cli", "train")
    few = ("--nproc-per-node", 1, "--train-iters", 2)
    options = dict(timeout=240, preloaded=True, folder=task)
    succeed(*common, "@sft.args", *few, "--lr-warmup-iters", 0, **options)
    grpo = (*few, "--lr-warmup-iters", 0, "--num-prompts", 4, "--num-samples-per-prompt", 4)
    grpo += ("--global-batch-size", 16, "--eval-interval", 2, "--eval-num-prompts", 4)
    succeed(*common, "@grpo.args", *grpo, **options)
    first, second = (row for row in metrics_of(task / "runs" / "sft") if "policy/loss" in row)
    assert second["policy/loss"] < first["policy/loss"]
    steps = [row for row in metrics_of(task / "runs" / "grpo") if "reward/mean" in row]
    assert len(steps) == 2 and all(0 <= row["reward/mean"] < 1 for row in steps)
    assert (task / "runs" / "grpo" / "hf" / "model.safetensors").exists()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_task_is_learnt(seed, tmp_path):
    """SFT leaves room, and GRPO clearly raises the reward of rows that no job trained on."""
    task = make_task(tmp_path / "reverse")
    for args_file in ("sft.args", "grpo.args"):
        succeed("-m", "megarl.cli", "train", f"@{args_file}", "--seed", seed, timeout=500, folder=task)
    sampled = [
        value
        for row in metrics_of(task / "runs" / "grpo")
        for name, value in row.items()
        if name.startswith("eval/") and not name.endswith("greedy")
    ]
    assert len(sampled) == 7  # before the first step, and after every tenth
    assert 0.2 < sampled[0] < 0.8 and sampled[-1] > sampled[0] + 0.2
