"""The command line of `megarl eval`: what it needs, what has a default, and its errors."""

from __future__ import annotations

import json
import shutil
import sys
import types

import pytest

from megarl import cli
from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.config.rules_training import NO_EVAL_DATA
from megarl.evaluation.arguments import with_settings_of_run
from tests.config.conftest import QWEN3


@pytest.fixture
def started(monkeypatch):
    """Evaluations that reach their start: (configuration, configuration that the ranks read)."""
    calls = []

    def launch(config, argv, job, module, new_run, say):
        assert module == "megarl.evaluate" and not new_run
        calls.append((config, load_config(argv, REGISTRY)))
        return 3

    monkeypatch.setitem(sys.modules, "megarl.trainer.launch", types.SimpleNamespace(launch=launch))
    return calls


@pytest.fixture
def model(write_model, tmp_path):
    """A model's folder, beside rows to answer."""
    row = {
        "data_source": "megarl/sums",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2"},
        "response": "2",
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return write_model(QWEN3)


def evaluate(*argv: object) -> int:
    return cli.main(["eval", *map(str, argv)])


def errors(capsys, *argv: object) -> list[str]:
    assert evaluate(*argv) == 2
    lines = capsys.readouterr().err.splitlines()
    lines = [line for line in lines if not line.startswith("More is checked when ")]
    return [line.removeprefix("  - ") for line in lines if not line.endswith("configuration errors:")]


def test_a_model_and_data_are_enough(model, tmp_path, started):
    """Lengths are what the model can read; a run folder means its export."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "hf").symlink_to(model)
    for name in (model, run):
        assert evaluate("--model", name, "--eval-data", tmp_path / "rows.jsonl") == 3
        config, on_ranks = started.pop()
        assert config == on_ranks and config.model.model in (str(model), str(run / "hf"))
        sampling = config.sampling
        assert (sampling.max_prompt_length, sampling.max_response_length) == (256, 256)
        assert config.data.train_data == () and config.run.eval_num_samples == 1
        assert (sampling.temperature, config.batch.seed, config.placement.nproc_per_node) == (1.0, 0, 1)


@pytest.mark.parametrize(
    ("flags", "lengths"),
    [
        ("--max-prompt-length 100", (100, 412)),
        ("--max-response-length 500", (12, 500)),
        ("--max-prompt-length 10 --max-response-length 20", (10, 20)),
    ],
)
def test_lengths_that_are_given_hold(model, tmp_path, started, flags, lengths):
    assert evaluate("--model", model, "--eval-data", tmp_path / "rows.jsonl", *flags.split()) == 3
    sampling = started[0][0].sampling
    assert (sampling.max_prompt_length, sampling.max_response_length) == lengths


def test_a_job_s_args_file_gives_its_sampling_and_its_training_flags_do_nothing(model, tmp_path, started):
    """Also flags that would be errors of a training job here: sizes, data that is gone, another --load."""
    job = tmp_path / "job.args"
    job.write_text(
        f"--algorithm ppo --model {model} --eval-data {tmp_path}/rows.jsonl --save {tmp_path} "
        "--train-data gone.jsonl --train-iters 30 --global-batch-size 7 --num-prompts 5 "
        "--temperature 0.7 --max-response-length 48 "
        "--lr 1e-6 --min-lr 1e-3 --eval-interval 5 --load gone --best-metric eval/accuracy --random-init "
        "--log-with wandb mlflow --lora-rank 8 --nproc-per-node 2"
    )
    (tmp_path / "resolved.args").touch()
    assert evaluate(f"@{job}", "--top-p", "0.9", "--seed", "3") == 3
    config = started[0][0]
    assert (config.sampling.temperature, config.sampling.max_response_length) == (0.7, 48)
    assert (config.sampling.top_p, config.batch.seed, config.lora.lora_rank) == (0.9, 3, 0)
    assert not config.model.random_init and config.checkpoint.load is None


def test_a_run_alone_gives_its_settings_and_flags_override_them(model, tmp_path, started, capsys):
    """Also its hf/ and its checkpoints. With data, or with a job's args file, the run gives the model only."""
    run, data = tmp_path / "a run", tmp_path / "rows.jsonl"
    checkpoint = run / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    (run / "hf").symlink_to(model)
    settings = "--nproc-per-node 2 --temperature 0.7 --max-response-length 48 --max-prompt-length 32"
    base = f"--model {model} --train-data gone.jsonl --train-iters 3 --save '{run}' {settings}"
    (run / "resolved.args").write_text(
        f"--algorithm ppo\n{base}\n--eval-data {data}\n".replace(" --", "\n--")
    )
    for name in (run, run / "hf"):
        assert evaluate("--model", name, "--eval-num-samples", 4, "--temperature", 0.5) == 3
        config, on_ranks = started.pop()
        assert config == on_ranks and config.model.model == str(run / "hf")
        assert (config.sampling.temperature, config.run.eval_num_samples) == (0.5, 4)
        assert (config.sampling.max_prompt_length, config.sampling.max_response_length) == (32, 48)
        assert config.placement.nproc_per_node == 2 and config.data.eval_data == (str(data),)
    expanded = with_settings_of_run(["--model", str(checkpoint)])
    assert expanded == [f"@{run / 'resolved.args'}", "--model", str(checkpoint)]
    assert evaluate("--model", run, "--eval-data", data) == 3
    assert started.pop()[0].sampling.max_response_length == 256
    (run / "resolved.args").write_text(f"--algorithm sft\n--eval-data {data}\n")
    (error,) = errors(capsys, "--model", run)
    assert error.startswith(NO_EVAL_DATA) and f"megarl eval @job.args --model {run}." in error


def test_errors_come_together_and_say_what_works(model, tmp_path, started, capsys):
    data = tmp_path / "rows.jsonl"
    assert [line.partition(":")[0] for line in errors(capsys)] == ["--model is required", "--eval-data"]
    found = errors(capsys, "--model", tmp_path / "modl", "--eval-num-samples", 4, "--temperature", 0)
    assert len(found) == 3 and found[1].startswith("--eval-data: an evaluation needs held-out rows.")
    assert f"Try {model}." in found[0] and "Try --eval-num-samples 1, or --temperature 1.0." in found[2]
    assert errors(capsys, "--model", model, "--eval-data", data, "--load", "x", "--random-init") == [
        "--load (x): an evaluation takes it as --model. Try --model x.",
        "--random-init: an evaluation is of the weights in --model. Leave it out.",
    ]
    assert errors(capsys, "--model", model, "--eval-data", data, "--algorithm", "sft") == [
        "--algorithm (sft): an evaluation samples answers and scores them. Try --algorithm grpo."
    ]
    (tmp_path / "bare.jsonl").write_text('{"data_source": "megarl/sums", "prompt": "1+1?"}\n')
    (without,) = errors(capsys, "--model", model, "--eval-data", tmp_path / "bare.jsonl")[:1]
    assert "--eval-data: 1 of 1 row cannot be used" in without
    for out, advice in (
        ("x.txt", "Try x.jsonl."),
        ("no/x.jsonl", "there is no folder no. Try --out x-samples"),
    ):
        (line,) = errors(capsys, "--model", model, "--eval-data", data, "--out", out)
        assert line.startswith(f"--out ({out}):") and advice in line
    assert started == []


def test_help_has_the_flags_of_an_evaluation_and_no_others(capsys):
    with pytest.raises(SystemExit) as exited:
        evaluate("--help")
    text = capsys.readouterr().out
    assert exited.value.code == 0 and text.startswith("usage: megarl eval --model RUN ")
    assert all(
        f"  --{flag} " in text for flag in ("out", "eval-num-samples", "temperature", "reward-function")
    )
    assert "--lr " not in text and "--train-data" not in text and "--save" not in text


def test_torchrun_s_ranks_refuse_a_checkpoint_without_an_export(tmp_path, model):
    from megarl.config.errors import ConfigError
    from megarl.evaluation.arguments import load_evaluation_on_rank

    part = tmp_path / "run" / "checkpoints" / "step_000002" / "actor"
    part.mkdir(parents=True)
    (part / "checkpoint.json").write_text("{}")
    data = ["--eval-data", str(tmp_path / "rows.jsonl")]
    with pytest.raises(ConfigError, match="Export it: megarl convert"):
        load_evaluation_on_rank(["--model", str(part), *data])
    config = load_evaluation_on_rank(["--model", str(model), *data, "--json"])
    assert config.sampling.max_response_length == 256


# ------------------------------------------------------------------ several actors


@pytest.fixture
def pair(model, tmp_path):
    """A run in which two actors have played in the same episodes, with the exports of both."""
    run = tmp_path / "pair"
    run.mkdir()
    for name in ("hf", "hf_2"):
        shutil.copytree(model, run / name)
    (tmp_path / "env.py").write_text("class Env:\n    def reset(self, row):\n        return row['prompt']\n")
    flags = (
        f"--algorithm ppo --model {model} --train-data gone.jsonl --train-iters 3 --save {run} --num-actors 2 "
        f"--share-episodes --env {tmp_path}/env.py:Env --eval-data {tmp_path}/rows.jsonl --max-prompt-length 32 "
        "--max-response-length 48 --actor-2-temperature 0.7"
    )
    (run / "resolved.args").write_text(flags.replace(" --", "\n--") + "\n")
    return run


def test_a_run_of_two_actors_is_evaluated_with_the_weights_of_each(pair, started):
    """The run may be named by its folder hf, too, and the second actor may get other weights; each actor keeps its settings."""
    other = pair.parent / "other"
    shutil.copytree(pair / "hf", other)
    for given, second in (
        ((pair,), pair / "hf_2"),
        ((pair / "hf",), pair / "hf_2"),
        ((pair, "--actor-2-model", other), other),
    ):
        assert evaluate("--model", *given, "--top-p", 0.5) == 3
        config, on_ranks = started.pop()
        assert config == on_ranks and config.episodes.share_episodes
        (of_second,) = config.others
        assert (config.model.model, of_second.model.model) == (str(pair / "hf"), str(second))
        assert (config.sampling.temperature, of_second.sampling.temperature) == (1.0, 0.7)
        assert config.sampling.top_p == of_second.sampling.top_p == 0.5
        assert of_second.data.train_data == () and of_second.sampling.max_response_length == 48


def test_other_data_and_a_run_s_models(pair, tmp_path, started):
    """With --env all policies of the run play; without, and for another number, the user says how many."""
    data = ("--eval-data", tmp_path / "rows.jsonl")
    env = ("--env", f"{tmp_path}/env.py:Env")
    assert evaluate("--model", pair, *data, *env) == 3
    config = started.pop()[0]
    assert config.episodes.share_episodes and [one.model.model for one in config.others] == [
        str(pair / "hf_2")
    ]
    assert config.others[0].sampling.temperature == 1.0
    assert evaluate("--model", pair, *data, "--max-response-length", 7, "--num-actors", 2) == 3
    config = started.pop()[0]
    assert not config.episodes.share_episodes and config.others[0].model.model == str(pair / "hf_2")
    assert config.others[0].sampling.max_response_length == 7
    assert evaluate("--model", pair / "hf_2", *data) == 3
    config = started.pop()[0]
    assert config.model.model == str(pair / "hf_2") and config.others == ()
    flags = (
        "--num-actors",
        2,
        "--share-episodes",
        "--actor-2-model",
        pair / "hf_2",
        "--actor-2-max-response-length",
        9,
    )
    assert evaluate("--model", pair / "hf", *data, *env, *flags) == 3
    config = started.pop()[0]
    assert (config.sampling.max_response_length, config.others[0].sampling.max_response_length) == (256, 9)


def test_models_that_do_not_fit_the_number_of_actors_are_refused_by_name(pair, tmp_path, started, capsys):
    data = ("--eval-data", tmp_path / "rows.jsonl")
    assert errors(capsys, "--model", pair, *data, "--num-actors", 3) == [
        f"--num-actors (3): --model ({pair}) is of a run with 2 actors. Try 2, or name a model of the others: "
        "--actor-3-model M."
    ]
    assert errors(capsys, "--model", pair / "hf_2") == [
        f"--model ({pair}/hf_2): is the model of one actor of a run with 2. Give the run, --model {pair}, or "
        "evaluate this one alone, on --eval-data."
    ]
    assert errors(capsys, "--model", pair / "hf", "--actor-2-model", pair) == [
        f"--actor-2-model ({pair}): has the models of 2 actors. Name one of them, e.g. {pair}/hf_2."
    ]
    (error,) = errors(capsys, "--model", pair, *data, "--actor-2-model", pair / "hf_2")
    assert error.startswith("--actor-2-model") and "Try --num-actors 2." in error
    shutil.rmtree(pair / "hf_2")
    (error,) = errors(capsys, "--model", pair)
    assert error.startswith(f"--actor-2-model ({pair}/hf_2): there is no such folder.")
    (tmp_path / "env.py").write_text("class Env: pass\n")
    assert started == []
