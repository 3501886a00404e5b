"""`megarl data` on files of the quickstart's task, with its tokenizer."""

from __future__ import annotations

import json
import re

import pytest
from rich.cells import cell_len

from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.files.checkpoints import MANIFEST
from megarl.inspect import progress


def row(text: object, answer: str = "2", **more: object) -> dict:
    return {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": answer}, **more}


@pytest.fixture
def jsonl(tmp_path):
    """jsonl("a.jsonl", row, row) -> path of the file."""

    def write(name: str, *rows: object) -> str:
        lines = [one if isinstance(one, str) else json.dumps(one) for one in rows]
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        return str(tmp_path / name)

    return write


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(progress, "EVERY_S", 60.0)  # a slow machine must not add lines to stderr


def test_the_ids_are_those_that_training_makes(sums_paths, megarl):
    code, out, err = megarl("data", sums_paths["sft_mixed"], "--model", sums_paths["model"], "--row", 7, 3)
    assert (code, err) == (0, "")
    dataset, tokenizer = (
        PromptDataset.load(sums_paths["sft_mixed"], needs="response"),
        load_tokenizer(sums_paths["model"]),
    )
    encoder = PromptEncoder(tokenizer, dataset)
    expected = []
    for prompt, row in zip(encoder.prompts([7, 3]), (7, 3), strict=True):
        ids = tokenizer.encode_response(dataset[row].response["content"])
        expected += [prompt, [*ids, tokenizer.eos_token_id]]
    shown = re.findall(r"token ids \((\d+)\)\n  ([\d ]+)\n", out)
    assert [[int(i) for i in ids.split()] for _, ids in shown] == expected
    assert [int(count) for count, _ in shown] == [len(ids) for ids in expected]
    text = f"  <|user|>{dataset[7].messages[0]['content']}<|end|><|assistant|>\n"
    assert text in out and dataset[7].response["content"].replace("\n", "\n  ") in out


def test_counts_and_lengths(sums_paths, megarl):
    out = megarl(
        "data", sums_paths["test"], sums_paths["test_parquet"], "--model", sums_paths["model"], "--rows", 0
    )[1]
    assert f"{sums_paths['test']}: 200 rows" in out and "rows: 400 can be used, 0 cannot" in out
    assert "data_source: 400 rows (megarl/sums 400)" in out and "response: 0 rows" in out
    lengths = sorted(
        len(ids)
        for ids in load_tokenizer(sums_paths["model"]).encode_prompts(
            [prompt.messages for prompt in PromptDataset.load(sums_paths["test"])]
        )
    )
    assert f"prompt: shortest {lengths[0]}, " in out and f"longest {lengths[-1]}\n" in out
    assert f"{sums_paths['test_parquet']} row 0 (from 0)" in out, (
        "every row is a duplicate of the other file's"
    )
    assert "-- row" not in out


def test_rows_that_training_refuses_are_listed(sums_paths, jsonl, megarl):
    file = jsonl(
        "a.jsonl", row("1+1 ?"), {"prompt": 3}, '{"prompt', row("1" * 40), row("x") | {"reward_model": "4"}
    )
    code, out, _ = megarl("data", file, "--model", sums_paths["model"], "--max-prompt-length", 30)
    assert code == 2 and "rows: 2 can be used, 3 cannot" in out
    assert f"{file}:2: column 'prompt' is 3 (int)" in out and f"{file}:3: not a line of JSON" in out
    assert f"{file}:5: column 'reward_model' is '4' (str)" in out
    long = re.search(
        r"too long: 1 prompts .*\(30\).* Try --max-prompt-length (\d+)\n  row 1 \(.*:4\): \1 tokens", out
    )
    assert long, out
    with pytest.raises(ValueError, match="3 of 5 rows cannot be used"):
        PromptDataset.load(file)
    good = jsonl("b.jsonl", row("1+1 ?"), row("1" * 40))
    code, out, _ = megarl("data", good, "--model", sums_paths["model"], "--max-prompt-length", long[1])
    assert code == 0 and "too long: 0 prompts" in out


def test_the_rows_that_training_takes_are_written(sums_paths, jsonl, megarl, tmp_path):
    rows = [row("1+1 ?", kept=[1, None, "ü"]), row("1" * 40), row("2+2 ?", "4")]
    file, out = jsonl("a.jsonl", rows[0], {"prompt": 3}, rows[1], rows[2]), tmp_path / "clean.jsonl"
    how = "--model", sums_paths["model"], "--max-prompt-length", 30, "--rows", 0, "--out", out
    code, shown, _ = megarl("data", file, *how)
    assert code == 0 and [json.loads(line) for line in out.read_text().splitlines()] == [rows[0], rows[2]]
    assert f"{out}: 2 rows; left out are 2\n  {file}:2: column 'prompt' is 3 (int)" in shown
    assert f"\n  {file}:3: the prompt has " in shown
    code, _, err = megarl("data", file, *how)
    assert code == 2 and f"--out ({out}): cannot be written: File exists. Name a new *.jsonl file." in err
    code, shown, _ = megarl("data", out, *how[:4])
    assert code == 0 and "rows: 2 can be used, 0 cannot" in shown


def test_duplicates_across_files_and_different_answers(sums_paths, jsonl, megarl):
    first = jsonl("a.jsonl", row("1+1 ?"), row("2+2 ?", "4"), row("3+3 ?", "6"))
    second = jsonl("b.jsonl", row("1+1 ?"), row("3+3 ?", "7"))
    out = megarl("data", first, second, "--model", sums_paths["model"])[1]
    found = out[out.index("duplicates:") :].splitlines()[:3]
    assert found == [
        "duplicates: 2 prompts are in several rows; the answers differ in 1 of them",
        f"  row 2 ({first}:3), row 4 ({second}:2): answers differ",
        f"  row 0 ({first}:1), row 3 ({second}:1)",
    ]


JOB = """
--algorithm grpo --model {model}  # nothing else that a job needs
--train-data a.jsonl --eval-data b.jsonl
--prompt-key question_text
--max-prompt-length 12 --max-response-length 2
"""


@pytest.fixture
def job(sums_paths, jsonl, tmp_path, monkeypatch):
    """A folder with job.args and with the two files that it names."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("a.jsonl", "1+1 ?"), ("b.jsonl", "11+11+11+11 ?")):
        jsonl(name, {**row(None, "2222"), "question_text": [{"role": "user", "content": text}]})
    (tmp_path / "job.args").write_text(JOB.format(model=sums_paths["model"]))
    return tmp_path


def test_a_job_names_files_tokenizer_column_and_lengths(job, sums_paths, jsonl, megarl):
    code, out, err = megarl("data", "@job.args")
    assert (code, err) == (2, "") and "a.jsonl: 1 rows\n  b.jsonl: 1 rows\n" in out
    assert "too long: 1 prompts have more than --max-prompt-length (12)" in out and "row 1 (b.jsonl:1)" in out
    (job / "job.args").write_text("--prompt-key question_text --train-data a.jsonl")
    assert megarl("data", "@job.args", "--model", sums_paths["model"])[0] == 0


def test_flags_and_files_override_those_of_the_job(job, sums_paths, jsonl, megarl):
    jsonl("c.jsonl", row("1+1 ?"))
    flags = "--prompt-key", "prompt", "--max-prompt-length", 20, "--max-response-length", 30, "--rows", 0
    code, out, _ = megarl("data", "@job.args", "c.jsonl", *flags)
    assert code == 0 and "files\n  c.jsonl: 1 rows\nrows" in out and "--max-prompt-length (20)" in out
    assert megarl("data", *flags, "c.jsonl", "@job.args") == megarl("data", "@job.args", "c.jsonl", *flags)
    assert (
        "--model (nowhere): there is no such folder." in megarl("data", "@job.args", "--model", "nowhere")[2]
    )


def test_a_row_without_the_part_that_the_job_needs_is_refused(job, jsonl, megarl):
    jsonl("c.jsonl", {"question_text": "1+1 ?"})
    code, out, _ = megarl("data", "@job.args", "c.jsonl")
    assert code == 2 and "c.jsonl:1: no column 'reward_model.ground_truth'" in out
    arguments = (job / "job.args").read_text()
    (job / "job.args").write_text(arguments.replace("grpo", "sft"))
    assert "c.jsonl:1: no column 'response'" in megarl("data", "@job.args", "c.jsonl")[1]
    (job / "job.args").write_text(f"{arguments} --reward-function reward.py:reward")
    assert megarl("data", "@job.args", "c.jsonl")[0] == 0


def test_responses_beyond_the_limit_are_counted(sums_paths, jsonl, megarl):
    file = jsonl("a.jsonl", row("1+1 ?", response="2"), row("2+2 ?", "4", response="4444"))
    out = megarl("data", file, "--model", sums_paths["model"], "--max-response-length", 4)[1]
    assert re.search(
        r"too long: 1 responses have more than --max-response-length \(4\): .* Try --max-response-length 5\n"
        rf"  row 1 \({re.escape(file)}:2\): 5 tokens\n",
        out,
    ), out
    out = megarl("data", file, "--model", sums_paths["model"], "--max-response-length", 5)[1]
    assert "too long: 0 responses have more than --max-response-length (5)\n" in out


def test_ground_truths_that_no_response_can_repeat_are_counted(sums_paths, jsonl, megarl):
    tests = json.dumps({"inputs": ["3 4\n"], "outputs": ["7\n"]})
    file = jsonl(
        "a.jsonl", row("1+1 ?", "2"), row("5 ?", "12345"), row("program", tests), row("6 ?", "{1,2}")
    )
    out = megarl("data", file, "--model", sums_paths["model"], "--max-response-length", 4)[1]
    longest = len(load_tokenizer(sums_paths["model"]).encode_response("{1,2}"))
    assert (
        longest >= 5
        and f"  ground truth: shortest 1, mean {(6 + longest) / 3:.1f}, longest {longest}\n" in out
    )
    line = (
        "too long: 2 ground truths have more than --max-response-length (4), so no response of these rows can "
        f"repeat the right answer. Try --max-response-length {longest + 1}\n  row 1 ({file}:2): 5 tokens\n"
    )
    assert line in out
    enough = megarl("data", file, "--model", sums_paths["model"], "--max-response-length", longest)[1]
    assert "ground truths have more" not in enough


def test_empty_messages_are_found(sums_paths, jsonl, megarl):
    file = jsonl("a.jsonl", row("1+1 ?"), row(" \n"))
    out = megarl("data", file, "--model", sums_paths["model"])[1]
    assert f"empty: 1 prompts have a message or a text without characters\n  row 1 ({file}:2)\n" in out


def test_the_tokenizer_of_a_run_and_the_width_of_the_terminal(
    sums_paths, jsonl, megarl, tmp_path, monkeypatch
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hf").symlink_to(sums_paths["model"])
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = megarl("data", jsonl("a.jsonl", row("1+1 ?" * 30)), "--model", tmp_path / "run")
    assert code == 0 and "<|user|>1+1 ?" in out and max(map(cell_len, out.split("\n"))) == 40
    # A checkpoint has the tokenizer of the model that its run began with.
    actor = tmp_path / "young" / "checkpoints" / "step_000001" / "actor"
    actor.mkdir(parents=True)
    (actor / MANIFEST).write_text("{}")
    (tmp_path / "young" / "resolved.args").write_text(f"--model {sums_paths['model']}\n")
    code, out, _ = megarl("data", jsonl("b.jsonl", row("1+1 ?")), "--model", actor)
    assert code == 0 and "<|user|>1+1 ?" in out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["no.jsonl", "--model", "M"], "FILE (no.jsonl): no.jsonl does not exist"),
        (["a.jsonl"], "--model: is required"),
        (["--model", "M"], "FILE: is required. Name one or more *.jsonl"),
        (["@job.args"], "--model: is required for its tokenizer."),
        (["@no.args"], "@no.args: cannot read no.args"),
        (["@job.args", "--lr", "1"], "--lr: no such flag of megarl data."),
        (["a.jsonl", "--model", "M", "--max-response-length", "0"], "--max-response-length (0): must be a"),
        (["a.jsonl", "--model", "nowhere"], "--model (nowhere): there is no such folder. Try M."),
        (["a.jsonl", "--tokenizer-model", "a.jsonl"], "--tokenizer-model (a.jsonl) is a file, but not"),
        (["a.jsonl", "--model", "M", "--row", "1"], "--row (1): must be below 1"),
        (["a.jsonl", "--model", "M", "--max-prompt-length", "0"], "--max-prompt-length (0): must be a whole"),
    ],
)
def test_errors_name_flag_value_rule_and_advice(
    arguments, words, sums_paths, jsonl, megarl, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    jsonl("a.jsonl", row("1+1 ?"))
    (tmp_path / "M").symlink_to(sums_paths["model"])
    (tmp_path / "job.args").write_text("--train-data a.jsonl")
    code, out, err = megarl("data", *arguments)
    assert (code, out) == (2, "") and words in err, err


def test_a_long_reading_says_on_stderr_what_it_does(sums_paths, megarl, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    code, out, err = megarl("data", sums_paths["sft_mixed"], "--model", sums_paths["model"])
    assert code == 0 and "so far" not in out
    assert re.search(r"^encoding.* \(\d+ s so far\)$", err, re.MULTILINE), err


def test_a_default_limit_is_called_one(job, jsonl, megarl, sums_paths):
    jsonl("c.jsonl", row("1+1 ?"))
    words = "the default: give the flag, or @job.args of your job"
    out = megarl("data", "c.jsonl", "--model", sums_paths["model"])[1]
    assert f"too long: 0 prompts have more than --max-prompt-length (1024, {words})\n" in out
    out = megarl("data", "c.jsonl", "--model", sums_paths["model"], "--max-prompt-length", 1024)[1]
    assert "have more than --max-prompt-length (1024)\n" in out and words not in out
    assert words not in megarl("data", "@job.args")[1]


def test_a_wrapped_line_is_indented(job, megarl, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = megarl("data", "@job.args")[1].splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("  prompt: shortest"))
    assert lines[at + 1].startswith("    ") and all(cell_len(line) <= 40 for line in lines)
