"""What `megarl check` says of a model that may be another task's. `pytest tests/checks/test_model_notes.py`"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from megarl.algorithms import REGISTRY
from megarl.checks.job import examine
from megarl.checks.machine import Machine
from megarl.checks.model_notes import lost_characters, model_notes
from megarl.config.loader import load_config
from megarl.data.quick_tokenizer import load_quickly
from tests.config.conftest import ROW, job, write_model  # noqa: F401


def notes(model: Path, *flags: str) -> list[str]:
    words = f"--algorithm grpo --train-data d.jsonl --train-iters 9 --save run --model {model}".split()
    return list(model_notes(load_config([*words, *flags], REGISTRY)))


def export(run: Path, data: str, time: int, name: str = "hf") -> Path:
    (run / name).mkdir(parents=True)
    (run / "resolved.args").write_text(f"--algorithm sft\n--train-data {data}\n")
    (run / name / "config.json").write_text("{}")
    os.utime(run / name / "config.json", (time, time))
    return run / name


def test_an_export_says_its_run_and_a_newer_one_of_the_same_task(tmp_path):
    first = export(tmp_path / "first", "a.jsonl b.jsonl", 100)
    said = f"--model ({first}): the model that the run {first.parent} has trained with --algorithm sft on "
    export(tmp_path / "older", "a.jsonl b.jsonl", 50)
    export(tmp_path / "other", "c.jsonl", 300)
    assert notes(first) == [f"{said}a.jsonl b.jsonl"]
    second = export(tmp_path / "second", "a.jsonl b.jsonl", 200)
    newer = f"--model ({first}): {second} is a newer model, of a run with the same algorithm and data"
    assert notes(first) == [f"{said}a.jsonl b.jsonl", newer]
    assert len(notes(second)) == 1
    assert notes(first, "--load", "elsewhere") == []  # the weights are the checkpoint's


def test_other_folders_say_nothing(tmp_path):
    alone = export(tmp_path / "run", "a.jsonl", 100)
    (tmp_path / "run" / "resolved.args").unlink()
    assert notes(alone) == []
    (tmp_path / "resolved.args").write_text("--train-data x\n")
    assert notes(tmp_path / "model") == [] and notes(tmp_path) == []


@pytest.fixture
def letters(tmp_path):
    """A tokenizer of lower-case letters without accents, in front of which texts are made such."""
    vocabulary = {"<unk>": 0, "</s>": 1, **{chr(97 + index): index + 2 for index in range(26)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    folder = tmp_path / "letters"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))
    return folder


def test_characters_without_tokens_are_found_and_normalised_ones_are_not(letters):
    tokenizer = load_quickly(letters)
    assert lost_characters(tokenizer, ["Caf\u00e9 \ufb01n", "abc"]) == []
    assert lost_characters(tokenizer, ["a+b", "1+2"]) == ["+", "1", "2"]


def test_check_notes_them(job, tmp_path):  # noqa: F811
    """The job's tokenizer has digits and signs."""

    def noted() -> list[str]:
        lines = examine(load_config([job], REGISTRY), 2, machine=Machine(10**11)).lines
        return [line for line in lines if "no tokens for" in line]

    assert noted() == []
    prompt = [{"role": "user", "content": "sum 1+1?"}]
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW | {"prompt": prompt}) + "\n")
    (note,) = noted()
    assert note == (
        f"note: --model ({tmp_path / 'model'}): its tokenizer has no tokens for 's', 'u', 'm' in the first "
        "rows of --train-data, so the model reads these texts without them. It may be the model of another task"
    )


def test_check_says_what_neither_it_nor_the_job_does(job, tmp_path, monkeypatch):  # noqa: F811
    """An environment is not played by the check, and held-out rows need an interval."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(
        "class Env:\n    def reset(self, row): ...\n    def step(self, text): ...\n"
    )
    data = str(tmp_path / "train.jsonl")

    def said(*flags: str) -> list[str]:
        lines = examine(load_config([job, *flags], REGISTRY), 2, machine=Machine(10**11)).lines
        return [line for line in lines if "--env (" in line or "evaluates nothing" in line]

    assert said() == []
    assert said("--eval-data", data, "--eval-interval", "5") == []
    (held_out,) = said("--eval-data", data)
    assert held_out.startswith("note: --eval-data is given and --eval-interval is 0")
    (played,) = said("--env", "env.py:Env", "--max-turns", "2", "--max-context-length", "200")
    assert "megarl chat --model " in played and f"--env env.py:Env --data {data} plays" in played
