"""`megarl chat` with the quickstart's model: its answers equal those of transformers on the same ids."""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.config.errors import ConfigError
from megarl.data.tokenizer import load_tokenizer
from megarl.inspect import chat as chat_command
from megarl.inspect.episode_chat import row_of
from megarl.inspect.terminal import visible
from tests.launch import preloaded_python

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(sums_paths) -> str:
    return sums_paths["model"]


@pytest.fixture
def chat(megarl, monkeypatch):
    """chat("line\\nline", "--model", folder) -> exit code, answers, stderr; greedy, 12 tokens."""

    def talk(text: str, *flags: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        given = ("--temperature", 0) if "--temperature" not in flags else ()
        return megarl("chat", "--max-response-length", NUM_TOKENS, *given, *flags)

    return talk


def greedy(model: str, *messages: str, count: int = NUM_TOKENS) -> str:
    """The next answer to user and assistant's turns, by an argmax over plain transformers' logits."""
    roles = [("user", "assistant")[turn % 2] for turn in range(len(messages))]
    conversation = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=True)]
    tokenizer = load_tokenizer(model)
    return tokenizer.decode(greedy_ids(model, tokenizer.encode_prompt(conversation), count))


def greedy_ids(model: str, prompt: list[int], count: int = NUM_TOKENS) -> list[int]:
    ids, end = prompt, load_tokenizer(model).eos_token_id
    plain = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    while len(ids) < len(prompt) + count and ids[-1:] != [end] or ids is prompt:
        with torch.no_grad():
            ids = [*ids, plain(torch.tensor([ids])).logits[0, -1].argmax().item()]
    return ids[len(prompt) :]


def test_answers_follow_the_conversation_until_it_begins_anew(model, chat):
    first, other = greedy(model, "1+1 ?"), greedy(model, "7-3 ?")
    second = greedy(model, "1+1 ?", first, "7-3 ?")
    assert second != other, "this model does not look at the conversation"
    code, out, _ = chat("1+1 ?\n\n7-3 ?\n/new\n7-3 ?\n", "--model", model)
    assert (code, out) == (0, "".join(f"{visible(text)}\n" for text in (first, second, other)))


def test_single_turn_makes_every_line_a_conversation(model, chat):
    expected = "".join(f"{visible(greedy(model, line))}\n" for line in ("1+1 ?", "7-3 ?"))
    code, out, err = chat("1+1 ?\n7-3 ?\n", "--model", model, "--single-turn")
    assert (code, out) == (0, expected) and "/new" not in err and "conversation" not in err


@pytest.mark.parametrize("flags", [(), ("--single-turn",)])
def test_a_terminal_is_told_what_a_line_means(flags, model, megarl, monkeypatch):
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"\x04")  # Ctrl-D
    with open(terminal, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        code, _, err = megarl("chat", "--model", model, *flags)
    os.close(keyboard)
    assert code == 0 and err.count("\n") == 2 and "Ctrl-D ends the chat]" in err
    assert err.startswith(f"[loading {model} with transformers]\n")
    assert ("/new begins another" in err) == (flags == ()) and ("every line is a" in err) == (flags != ())


def test_a_run_answers_by_its_export_or_else_its_newest_checkpoint(model, chat, open_run, megarl, tmp_path):
    run = tmp_path / "run"
    with open_run(run, f"--model {model}") as record:
        record.begin_step()
        record.record_step(1, {}, num_tokens=1)
    assert "has no export and no checkpoint yet" in chat("x", "--model", run)[2]
    for step in (1, 2):
        checkpoint = run / "checkpoints" / f"step_{step:06d}" / "actor"
        checkpoint.parent.mkdir(parents=True)
        assert megarl("convert", "--model", model, "--save", checkpoint, "--to", "checkpoint")[0] == 0
    expected = f"{visible(greedy(model, '1+1 ?'))}\n"
    for path in (run, checkpoint.parent, checkpoint):
        code, out, err = chat("1+1 ?", "--model", path)
        assert (code, out) == (0, expected) and f"exporting {checkpoint}" in err
    (run / "hf").symlink_to(model)
    code, out, err = chat("1+1 ?", "--model", run)
    assert (code, out) == (0, expected) and "exporting" not in err


@pytest.mark.parametrize("algorithm, expected", [("grpo", 3), ("sft", 256)])
def test_a_run_answers_as_long_as_it_was_sampled(
    algorithm, expected, model, open_run, megarl, monkeypatch, tmp_path
):
    run = tmp_path / "run"
    with open_run(run, f"--algorithm {algorithm}\n--max-response-length 3") as record:
        record.begin_step()
        record.record_step(1, {}, num_tokens=1)
    (run / "hf").symlink_to(model)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    given: list[int] = []
    monkeypatch.setattr(
        chat_command, "_talk", lambda _, __, m: given.append(m.generation_config.max_new_tokens)
    )
    for path in (run, run / "hf"):
        assert megarl("chat", "--model", path)[0] == 0
    assert megarl("chat", "--model", run, "--max-response-length", 5)[0] == 0
    assert given == [expected, expected, 5]


def test_the_seed_draws_the_same_answers_again(model, chat):
    def draw(seed: int) -> str:
        return chat("1+1 ?", "--model", model, "--temperature", "1.5", "--seed", seed)[1]

    assert draw(1) == draw(1) != draw(2)


def test_a_conversation_that_grows_too_long_begins_anew(model, chat):
    line = "1" * 220  # two of them do not fit into the 512 positions
    code, out, err = chat(f"{line}\n{line}1\n", "--model", model)
    assert code == 0 and "[a new conversation: this one does not fit into 512 tokens any more]" not in err
    code, out, err = chat(f"{line}\n{line}\n{line}\n", "--model", model)
    assert code == 0 and err.count("[a new conversation: this one does not fit into 512 tokens") == 1
    assert out.split("\n")[0] == out.split("\n")[2] != ""
    code, _, err = chat(f"{line}{line}{line}\n", "--model", model)
    assert code == 2 and f"--max-response-length ({NUM_TOKENS}): with the" in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "nowhere"], "--model (nowhere): there is no such folder."),
        (
            ["--model", ".", "--temperature", "-1"],
            "--temperature (-1): must be a number of at least 0. Try 1.",
        ),
        (["--model", "empty"], "--model (empty): is no Hugging Face folder, run or checkpoint."),
        (["--model", "no_template"], "--model (no_template): its tokenizer has no chat template."),
        (["--model", "no_weights"], "--model (no_weights): transformers cannot load it"),
    ],
)
def test_errors_name_flag_value_rule_and_advice(arguments, words, model, chat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    shutil.copytree(model, tmp_path / "no_template")
    config = tmp_path / "no_template" / "tokenizer_config.json"
    config.write_text(
        json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "chat_template"})
    )
    shutil.copytree(model, tmp_path / "no_weights", ignore=shutil.ignore_patterns("*.safetensors"))
    code, out, err = chat("x", *arguments)
    assert (code, out) == (2, "") and words in err, err


def test_a_pipe_gets_the_answers_alone(model):
    command = [preloaded_python(), "-m", "megarl.cli", "chat", "--model", model, "--temperature", "0"]
    done = subprocess.run(
        [*command, "--max-response-length", str(NUM_TOKENS)],
        input=b"1+1 ?\n\xff\n",
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().split("\n")
    assert lines[0] == visible(greedy(model, "1+1 ?")).split("\n")[0] and len(lines) >= 3


# ------------------------------------------------------------------ with an environment


@pytest.fixture
def env(tmp_path) -> str:
    """An environment that gives 0.5 for the second answer and ends the episode there."""
    (tmp_path / "env.py").write_text(
        "class Env:\n"
        "    def reset(self, row):\n"
        "        self.num = 0\n"
        "        if row['index'] == 2:\n"
        "            raise RuntimeError('planted')\n"
        "        return row['prompt']\n"
        "    def step(self, text):\n"
        "        self.num += 1\n"
        "        return [{'role': 'user', 'content': '7-3 ?'}], [None, 0.5][self.num - 1], self.num == 2\n"
    )
    return f"{tmp_path / 'env.py'}:Env"


@pytest.fixture
def rows(tmp_path) -> str:
    texts = ("9+9 ?", "1+1 ?", "2+2 ?")
    lines = [json.dumps({"prompt": [{"role": "user", "content": text}]}) for text in texts]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "rows.jsonl")


def test_an_environment_talks_to_the_model_about_one_row(model, chat, env, rows):
    first = greedy(model, "1+1 ?")
    flags = ("--model", model, "--env", env, "--data", rows)
    code, out, err = chat("", *flags, "--row", 1)
    lines = out.splitlines()
    assert code == 0, err
    assert lines.pop(0) == f"row        1 of {rows}"
    assert lines[:2] == ["user       1+1 ?", f"assistant  {visible(first)}"]
    assert lines[2] == "user       7-3 ?" and lines[3].startswith("assistant  ")
    assert lines[4:] == ["reward     0.5", "done       stop, reward 0.5, 2 answers"]
    code, out, err = chat("", *flags, "--row", 1, "--max-turns", 1)
    assert out.splitlines()[1:] == [*lines[:2], "done       turns, reward 0, 1 answer"]
    code, out, err = chat("", *flags, "--row", 2)
    assert (code, out) == (
        1,
        f"row        2 of {rows}\n",
    ) and "failed (raised): reset raised RuntimeError: planted" in err


def test_a_run_knows_the_rows_and_the_limits_of_its_environment(model, chat, env, rows, open_run, tmp_path):
    run = tmp_path / "run"
    with open_run(run, f"--train-data {rows}\n--max-turns 1\n--max-response-length 3") as record:
        record.begin_step()
        record.record_step(1, {}, num_tokens=1)
    (run / "hf").symlink_to(model)
    code, out, err = chat("", "--model", run / "hf", "--env", env)
    assert (
        code == 0
        and out.startswith(f"row        0 of {rows}\nuser       9+9 ?\n")
        and out.endswith("reward 0, 1 answer\n")
    ), err


def test_the_rows_are_those_of_the_run_s_own_flags(env, rows, open_run, tmp_path):
    """As a job writes them: --eval-data has no words if there are no held-out rows, and may have several."""
    more, named = tmp_path / "more.jsonl", tmp_path / "named.jsonl"
    more.write_text(json.dumps({"prompt": [{"role": "user", "content": "3+3 ?"}]}) + "\n")
    named.write_text(json.dumps({"question": [{"role": "user", "content": "4+4 ?"}]}) + "\n")

    def row(arguments: str, number: int = 0, **flags: str) -> tuple[str, str]:
        """Number and files of a row, and its prompt."""
        folder = tmp_path / f"run {len(list(tmp_path.iterdir()))}"
        with open_run(folder, arguments):
            pass
        given = {"data": None, "prompt_key": None, "row": number, "env": [env], "env_python": None, **flags}
        where, found = row_of(argparse.Namespace(model=str(folder), **given))
        return where, found.messages[-1]["content"]

    assert row(f"--train-data {rows}\n--eval-data") == (f"0 of {rows}", "9+9 ?")
    several = f"--train-data {named}\n--eval-data {rows} {more}"
    assert row(several, 2) == (f"2 of {rows} {more}", "2+2 ?")
    assert row(several, 3) == (f"3 of {rows} {more}", "3+3 ?")
    with pytest.raises(ConfigError, match=r"--row \(4\): .*more.jsonl have 4 rows, .* Try 3\."):
        row(several, 4)
    asks, prompts = f"--train-data {named}\n--eval-data\n--prompt-key question", f"--train-data {rows}"
    assert row(asks) == (f"0 of {named}", "4+4 ?")
    assert row(asks, data=str(named)) == (f"0 of {named}", "4+4 ?")
    assert row(asks, data=str(more), prompt_key="prompt") == (f"0 of {more}", "3+3 ?")
    assert row(prompts, data=str(named), prompt_key="question") == (f"0 of {named}", "4+4 ?")
    with pytest.raises(ConfigError, match=r"(?s)--data: .*no column 'question' \(there: prompt"):
        row(asks, data=str(more))
    with pytest.raises(ConfigError, match="is of no run with data files, so name a file"):
        row("--train-data\n--eval-data")


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--row", 1), "--row: has no effect without --env"),
        (("--env", "ENV", "--single-turn"), "--single-turn: the environment leads the conversation"),
        (("--env", "ENV"), "is of no run with data files, so name a file, e.g. --data"),
        (("--env", "ENV", "--data", "ROWS", "--row", 3), "--row (3): .* has 3 rows, .* Try 2"),
        (("--env", "nothing.py:Env", "--data", "ROWS"), "there is no file nothing.py"),
        (("--prompt-key", "question"), "--prompt-key: has no effect without --env"),
    ],
)
def test_flags_of_an_environment_that_cannot_be(flags, says, model, chat, env, rows):
    given = [{"ENV": env, "ROWS": rows}.get(flag, flag) for flag in flags]
    code, _, err = chat("", "--model", model, *given)
    assert code == 2 and re.search(re.escape(says).replace(r"\.\*", ".*"), err), err


# ------------------------------------------------------------------ several policies in one episode


@pytest.fixture(scope="module")
def other(model, tmp_path_factory) -> str:
    """A model with other weights, whose chat template puts an `x` before each user's message."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    changed = {name: one + 0.1 * torch.randn(one.shape, generator=generator) for name, one in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings["chat_template"] = settings["chat_template"].replace(
        "message['content']", "'x' + message['content']"
    )
    config.write_text(json.dumps(settings))
    assert greedy(str(folder), "1+1 ?") not in (greedy(model, "1+1 ?"), greedy(model, "x1+1 ?"))
    return str(folder)


@pytest.fixture
def two(tmp_path) -> str:
    """An environment that asks actor_2 first, then actor twice. In row 2 it then names a third."""
    (tmp_path / "two.py").write_text(
        "class Two:\n"
        "    def reset(self, row):\n"
        "        self.num, self.third, self.next_actor = 0, row['index'] == 2, 'actor_2'\n"
        "        return row['prompt']\n"
        "    def step(self, text):\n"
        "        self.num += 1\n"
        "        self.next_actor = 'actor_3' if self.third else 'actor'\n"
        "        rewards = [{'actor_2': 0.25}, None, {'actor': 1.0, 'actor_2': 0.5}][self.num - 1]\n"
        "        return [{'role': 'user', 'content': f'{self.num}+1 ?'}], rewards, self.num == 3\n"
    )
    return f"{tmp_path / 'two.py'}:Two"


def lines_of_two(model: str, other: str, rows: str) -> list[str]:
    """What the episode on row 1 shows, from plain transformers' logits of each model on the ids that it has sampled."""
    tokenizer = load_tokenizer(model)
    prompt = tokenizer.encode_prompt([{"role": "user", "content": "1+1 ?"}])
    first = greedy_ids(model, prompt)
    assert len(first) == NUM_TOKENS and tokenizer.eos_token_id not in first  # cut
    between = tokenizer.encode_response("<|end|><|user|>2+1 ?<|end|><|assistant|>")
    second = greedy_ids(model, [*prompt, *first, *between])
    lines = [
        f"row            1 of {rows}",
        "user > actor_2 1+1 ?",
        f"actor_2        {visible(greedy(other, '1+1 ?'))}",
        "reward         actor_2: 0.25",
        "user > actor   1+1 ?",
        f"actor          {visible(tokenizer.decode(first))}",
        "user > actor   2+1 ?",
        f"actor          {visible(tokenizer.decode(second))}",
        "reward         actor: 1; actor_2: 0.5",
        "done           stop, actor: reward 1, 2 answers; actor_2: reward 0.75, 1 answer",
    ]
    return "\n".join(lines).split("\n")


def test_two_models_answer_where_the_environment_names_them(model, other, chat, two, rows):
    flags = ("--env", two, "--data", rows)
    code, out, err = chat("", "--model", model, "--actor-2-model", other, *flags, "--row", 1)
    assert (code, out.split("\n")[:-1]) == (0, lines_of_two(model, other, rows)), err
    code, out, err = chat("", "--model", model, "--actor-2-model", other, *flags, "--row", 2)
    assert code == 2 and "the environment names 'actor_3'" in err and "--actor-3-model M" in err


@pytest.mark.nightly
def test_a_run_of_several_actors_brings_the_models_of_all(
    model, other, chat, two, rows, open_run, megarl, tmp_path
):
    """By its exports, else by the actors of its newest checkpoint; with the limits of each actor."""
    run, limits = tmp_path / "run", "--max-response-length 12\n--actor-2-max-response-length 5"
    models = f"--model {model}\n--actor-2-model {other}"
    with open_run(run, f"--num-actors 2\n--share-episodes\n--eval-data {rows}\n{models}\n{limits}") as record:
        record.begin_step()
        record.record_step(1, {}, num_tokens=1)
    expected = lines_of_two(model, other, rows)
    short = visible(greedy(other, "1+1 ?", count=5))
    checkpoint = run / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    for name, folder in (("actor", model), ("actor_2", other)):
        assert megarl("convert", "--model", folder, "--save", checkpoint / name, "--to", "checkpoint")[0] == 0
    given = ("--env", two, "--row", 1, "--temperature", 0)
    for path in (run, checkpoint):
        code, out, err = megarl("chat", "--model", path, *given, "--max-response-length", NUM_TOKENS)
        assert (code, out.split("\n")[:-1]) == (
            0,
            expected,
        ) and f"exporting {checkpoint / 'actor_2'}" in err, err
    for name, folder in (("hf", model), ("hf_2", other)):
        (run / name).symlink_to(folder)
    for path in (run, run / "hf"):
        code, out, err = megarl("chat", "--model", path, *given)
        assert code == 0 and f"actor_2        {short}\n" in out and "exporting" not in err, err
    code, _, err = chat("", "--model", model, "--actor-2-model", run, "--env", two, "--data", rows)
    assert code == 2 and f"--actor-2-model ({run}): has the models of 2 actors. Name one" in err


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--actor-2-model", "MODEL"), "--actor-2-model: has no effect without --env"),
        (
            ("--actor-3-model", "MODEL", "--env", "TWO", "--data", "ROWS"),
            "there is no actor 2. Give --actor-2-model too",
        ),
        (
            ("--actor-2-model", "nowhere", "--env", "TWO", "--data", "ROWS"),
            "--actor-2-model (nowhere): there is no such folder",
        ),
        (("--env", "TWO", "--data", "ROWS"), "the environment names 'actor_2'"),
    ],
)
def test_a_wrong_number_of_models_is_refused_by_name(flags, says, model, chat, two, rows):
    given = [{"TWO": two, "ROWS": rows, "MODEL": model}.get(flag, flag) for flag in flags]
    code, _, err = chat("", "--model", model, *given)
    assert code == 2 and says in err, err
