"""The command line of `megarl eval`: what it needs, what has a default, and its errors."""

from __future__ import annotations

import json
import re
import shutil
import sys
import types
from pathlib import Path

import pytest

from megarl import cli
from megarl.algorithms import REGISTRY
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.rules_training import NO_EVAL_DATA
from megarl.evaluation.arguments import load_evaluation_on_rank, with_settings_of_run
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
        "--log-with wandb mlflow --lora-rank 8 --nproc-per-node 2 --exit-loss 0.5 --best-metric-mode min "
        "--profile-step-start 3 --kl-target 3 --overlong-penalty 2"
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


@pytest.fixture
def write_run(model, tmp_path):
    """write_run("--lr 1") -> a run of one actor on two ranks that was trained with these flags."""

    def write(flags: str):
        run = tmp_path / "trained"
        run.mkdir(exist_ok=True)
        if not (run / "hf").exists():
            (run / "hf").symlink_to(model)
        base = (
            f"--model {model} --train-data gone.jsonl --train-iters 30 --save {run} --max-prompt-length 32 "
            f"--eval-data {tmp_path}/rows.jsonl --nproc-per-node 2 --actor-ranks 0 --rollout-ranks 0 {flags}"
        )
        (run / "resolved.args").write_text(base.replace(" --", "\n--") + "\n")
        return run

    return write


@pytest.mark.parametrize(
    "flags",
    [
        "--algorithm grpo --profile torch",
        "--algorithm grpo --sft-data gone.jsonl --sft-batch-size 4",
        "--algorithm ppo --critic-model gone --critic-ranks 1",
        "--algorithm ppo --critic-offload parameters --offload-ahead-bytes 9",
        "--algorithm ppo --critic-tensor-model-parallel-size 8 --critic-lora-rank 2 --critic-lr 1",
        "--algorithm grpo --kl-mode loss --kl-coef 0.1 --reference-model gone --reference-ranks 1",
        "--algorithm grpo --kl-mode loss --kl-coef 0.1 --reference-update-interval 2",
        "--algorithm grpo --reward auto --reward-model gone gone --reward-ranks 1 --reward-model-weights 1 2",
        "--algorithm grpo --reward auto --reward-model gone --judge-template gone.txt --judge-max-tokens 7",
        "--algorithm distill --reference-model gone --teachers math=gone",
        "--algorithm gkd --reference-model gone --teacher-top-k 8",
        "--algorithm ppo-lagrangian --cost-score cost --cost-limit 1",
        "--algorithm grpo --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1",
    ],
)
def test_what_only_training_needs_may_be_gone(write_run, started, flags):
    """Models, data and layouts of roles that an evaluation has not: it is that of a run without them."""
    rule = "--reward auto" if "--reward auto" in flags else ""
    assert evaluate("--model", write_run(f"--algorithm grpo {rule}".strip())) == 3
    assert evaluate("--model", write_run(flags)) == 3
    (expected, _), (config, on_ranks) = started
    assert config == on_ranks == expected and config.placement.world_size == 2


def test_engines_are_as_large_as_those_of_a_run_with_greedy_answers(write_run, started):
    """The number of sequences at once decides how sums round."""
    assert evaluate("--model", write_run("--algorithm remax --num-samples-per-prompt 4")) == 3
    assert started.pop()[0].batch.num_samples_per_prompt == 5


def test_what_an_evaluation_needs_is_still_asked_for(write_run, started, capsys):
    assert errors(capsys, "--model", write_run("--algorithm grpo"), "--profile", "torch") == [
        "--profile (torch): profiles steps of training. Leave it out."
    ]
    found = errors(capsys, "--model", write_run("--algorithm grpo --reward-model gone"))
    assert found[0].startswith(
        "--reward-model: held-out answers are scored by a rule, and with it there is none."
    )
    assert errors(capsys, "--model", write_run("--algorithm grpo"), "--rollout-ranks", 7)[0].startswith(
        "--rollout-ranks (7): must be below the number of ranks (2)."
    )
    assert started == []


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
    assert errors(capsys, "--model", model, "--eval-data", data, "--out", data) == [
        f"--out ({data}): is a file of --eval-data. Try --out {Path(data).with_stem('rows-samples')}."
    ]
    assert started == []


def test_samples_that_could_not_be_written_are_refused_at_the_start(
    model, tmp_path, started, capsys, monkeypatch
):
    """In /proc nobody can create a file; why, depends on the user."""
    given = ("--model", model, "--eval-data", tmp_path / "rows.jsonl", "--out", "/proc/x.jsonl")
    for folder, advice in (
        (tmp_path, "Try --out x-samples.jsonl."),
        ("/proc", "Name a file in a folder in which this user may write."),
    ):
        monkeypatch.chdir(folder)
        (error,) = errors(capsys, *given)
        assert re.fullmatch(rf"--out \(/proc/x.jsonl\): .*/proc.*\. {re.escape(advice)}", error)
    assert started == []


def test_json_takes_no_value(model, tmp_path, started, capsys):
    given = ("--model", model, "--eval-data", tmp_path / "rows.jsonl", "--json=1")
    assert errors(capsys, *given) == ["--json (1): takes no value. Write --json, or leave it out."]
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
    part = tmp_path / "run" / "checkpoints" / "step_000002" / "actor"
    part.mkdir(parents=True)
    (part / "checkpoint.json").write_text("{}")
    data = ["--eval-data", str(tmp_path / "rows.jsonl")]
    with pytest.raises(ConfigError, match="Export it: megarl convert"):
        load_evaluation_on_rank(["--model", str(part), *data])
    config = load_evaluation_on_rank(["--model", str(model), *data, "--json"])
    assert config.sampling.max_response_length == 256


# ------------------------------------------------------------------ several nodes


@pytest.fixture
def run_on_two_nodes(model, tmp_path):
    """A run that torchrun had started on two nodes of one rank."""
    run = tmp_path / "wide"
    run.mkdir()
    (run / "hf").symlink_to(model)
    flags = (
        f"--algorithm grpo --model {model} --train-data gone.jsonl --train-iters 3 --save {run} --eval-data "
        f"{tmp_path}/rows.jsonl --max-prompt-length 32 --max-response-length 48 --nnodes 2"
    )
    (run / "resolved.args").write_text(flags.replace(" --", "\n--") + "\n")
    return run


def test_torchrun_s_nodes_are_refused_where_eval_starts_the_ranks(run_on_two_nodes, started, capsys):
    run = run_on_two_nodes
    lines = (run / "resolved.args").read_text().splitlines()
    assert errors(capsys, "--model", run) == [
        "--nnodes (2): megarl eval starts ranks on this machine only. Try --nnodes 1, or --executor ray, or on "
        "every node torchrun --nnodes 2 --nproc-per-node 1 ... -m megarl.evaluate with the same arguments. "
        f"[{run}/resolved.args:{lines.index('--nnodes 2') + 1}]"
    ]
    (error,) = errors(capsys, "--model", run, "--nnodes", 3)
    assert error.startswith("--nnodes (3): ") and error.endswith(" [command line]") and started == []
    assert evaluate("--model", run, "--nnodes", 1) == 3
    assert started.pop()[0].placement.world_size == 1
    assert load_evaluation_on_rank(["--model", str(run)]).placement.world_size == 2


@pytest.mark.parametrize("flags", [("--nnodes", 1), ("--nnodes", 2)], ids=["one node", "two nodes"])
def test_ranks_in_a_ray_cluster_read_files_in_the_working_directory(
    run_on_two_nodes, tmp_path, monkeypatch, flags
):
    """Arguments and an exported checkpoint, as other nodes do not see this machine's /tmp. Nothing stays."""
    run, here, paths = run_on_two_nodes, tmp_path / "here", []
    checkpoint = run / "checkpoints" / "step_000001"
    to = ("--save", checkpoint / "actor", "--to", "checkpoint")
    assert cli.main(["convert", "--model", *map(str, (run / "hf", *to))]) == 0
    (run / "hf").unlink()

    def launch(config, argv, job, module, new_run, say):
        (arguments,) = argv
        paths.extend([Path(arguments.removeprefix("@")), Path(config.model.model)])
        assert all(path.exists() for path in paths)
        return 3

    monkeypatch.setitem(sys.modules, "megarl.trainer.launch", types.SimpleNamespace(launch=launch))
    here.mkdir()
    monkeypatch.chdir(here)
    assert evaluate("--model", checkpoint, "--executor", "ray", *flags) == 3
    assert [path.parents[1] for path in paths] == [here, here] and not any(here.iterdir())


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
