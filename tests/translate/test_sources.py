"""How commands and YAML files of other frameworks are read, and which files are refused."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from megarl import cli
from megarl.config.args_file import Reader
from megarl.translate import sources
from tests.translate.conftest import of_file

SCRIPT = r"""
set -x
# a comment with key=value: data.seed=1
export LENGTH=$((512 * 2))
home=${DATA_HOME:-"$HOME/verl"}
files="['$home/a.parquet', '$home/b.parquet']"
if [ "$MODE" = "x" ]; then
    n=3
fi
SAMPLING=(
    actor_rollout_ref.rollout.n=4
    "actor_rollout_ref.rollout.temperature=0.7"  # warm
)
SAMPLING+=(actor_rollout_ref.rollout.top_p=1.0)
python3 -m verl.trainer.main_ppo --config-path=config \
    algorithm.adv_estimator=grpo data.train_files="$files" data.max_response_length=$(((LENGTH + 24) / 2)) \
    data.max_prompt_length=${LENGTH} trainer.experiment_name='a b' trainer.nnodes=$NODES \
    "${SAMPLING[@]}" trainer.project_name=p-${LENGTH}-q $@ 2>&1 | tee log.txt
"""


PAGES = Path(__file__).parents[2] / "docs"
TO_A_FILE = re.compile(r"`((\w+)\(\) \{ printf .*?); bash run\w*\.sh`")
TRACED = "python3() { :; }; export -f python3; bash -x run.sh 2>&1 | grep -e '-m verl'"


def to_a_file(name):
    """Return what a page says of how to get the command of a script without starting anything."""
    command, program = TO_A_FILE.search((PAGES / f"from_{name}.md").read_text()).groups()
    command = re.sub(r"/tmp/\w+\.txt", "a.txt", command)
    return f"{command}; bash run.sh > log.txt; cat a.txt", program


@pytest.mark.parametrize(
    "command, program",
    [(TRACED, "python3"), *map(to_a_file, ("verl", "slime", "trl"))],
    ids=["trace", "verl", "slime", "trl"],
)
def test_a_script_is_translated_by_the_command_that_bash_prints(translate, tmp_path, command, program):
    (tmp_path / "run.sh").write_text(SCRIPT.replace("python3", program))
    environment = {"PATH": os.environ["PATH"], "HOME": "/h", "NODES": "2"}
    run = subprocess.run(
        ["bash", "-c", command], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    printed = run.stdout.splitlines()[-1]
    flags, _ = of_file(translate, tmp_path, "command.txt", printed)
    assert flags["--train-data"] == ["/h/verl/a.parquet", "/h/verl/b.parquet"]
    assert flags["--max-response-length"] == ["524"]
    assert flags["--max-prompt-length"] == ["1024"]
    assert flags["--num-samples-per-prompt"] == ["4"]
    assert flags["--temperature"] == ["0.7"]
    assert flags["--log-name"] == ["a b"]
    assert flags["--log-project"] == ["p-1024-q"]
    assert flags["--nnodes"] == ["2"]
    assert "--seed" not in flags


SHOW = r"""show() { printf '%s\0' "$@"; }
"""


@pytest.mark.parametrize(
    "text",
    [
        "show a '' b",
        'show a="" b',
        "show a='x y'z\"v w\"",
        r'show a "b\"c" d\ e',
        "show a # 'b",
        "show a=b#c d '#e' \"f #g\"",
        "# don't \\\nshow a",
        "show a \\\n  b \\\n c",
        "show ab\\\ncd",
        "show \"a\\\nb\" 'c\nd'",
        r"""show '$X' "a$" \$X""",
        "show ';' 'a|b' \"<|end|>\" \"it's (\" \\& '`'",
        "show {a b } [1,2]",
    ],
)
def test_words_are_those_of_bash(text, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "read_words", lambda words, place: words)
    (tmp_path / "a.sh").write_text(text)
    run = subprocess.run(["bash", "-c", SHOW + text], capture_output=True, text=True, check=True)
    assert sources.read_file(str(tmp_path / "a.sh"))[1:] == run.stdout.split("\0")[:-1] != []


GRPO_FLAGS = "--num_generations 8 --per_device_train_batch_size 4 --gradient_accumulation_steps 2"


@pytest.mark.parametrize(
    "command, expected",
    [
        (f"accelerate launch --num_processes 8 train_grpo.py {GRPO_FLAGS}", "64"),
        (f"accelerate launch --num_processes 8 -m mine.grpo {GRPO_FLAGS}", "64"),
        (f"torchrun --nnodes 2 --nproc_per_node 4 train.py {GRPO_FLAGS} --reward_file r.py --beta 0", "64"),
        (f"python -m torch.distributed.run --nproc-per-node=2 train.py {GRPO_FLAGS}", "16"),
        (f"trl grpo --num_processes 4 {GRPO_FLAGS}", "32"),
    ],
)
def test_the_launcher_says_the_number_of_processes(translate, tmp_path, command, expected):
    flags, _ = of_file(translate, tmp_path, "run.sh", command)
    assert flags["--global-batch-size"] == [expected]
    assert flags["--num-samples-per-prompt"] == ["8"]


VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.nnodes=1"


@pytest.mark.parametrize(
    "words, expected",
    [
        ("rewards.path=r.py", "not known here"),
        ("rollout.nnodes=2", "--actor-ranks and --rollout-ranks"),
        ("hydra.run.dir=/d", "not known here"),
    ],
)
def test_settings_of_unknown_sections_are_named(translate, tmp_path, words, expected):
    _, comments = of_file(translate, tmp_path, "run.sh", f"{VERL} {words}")
    assert words in comments and expected in comments


@pytest.mark.parametrize(
    "more, syntax",
    [
        ("custom_reward_function.path=$FILE", "$FILE"),
        ("trainer.project_name=p-${LENGTH}-q", "${LENGTH}"),
        ('data.train_files="$files"', "$files"),
        ("data.train_files=\"['$home/a']\"", "$home"),
        ('"${SAMPLING[@]}"', "${SAMPLING[@]}"),
        ("$@", "$@"),
        ("data.max_response_length=$((4 * 4))", "$(("),
        ("data.seed=$(date +%s)", "$("),
        ("data.seed=`date`", "`"),
        ("2>&1", ">&"),
        ("< answers", "<"),
        ("| tee log", "|"),
        ("&& echo done", "&&"),
        ("data.seed=1;", ";"),
        ("data.prompt_key=$'a'", "$'"),
        ("\nrun() { true\n}", "()"),
        ("\nSAMPLING=(a b)", "("),
    ],
)
@pytest.mark.parametrize("head", [VERL, f"trl grpo {GRPO_FLAGS}", "train.py --hf-checkpoint /m"])
def test_what_a_shell_would_expand_is_refused_by_name(tmp_path, capsys, head, more, syntax):
    (tmp_path / "run.sh").write_text(f"# don't look here: $NAME; (\n{head} {more}\n")
    assert cli.main(["translate", str(tmp_path / "run.sh")]) == 2
    error = capsys.readouterr().err
    assert f"FILE ({tmp_path / 'run.sh'}): has {syntax}, which a shell expands" in error
    assert "`bash -x`" in error and "`echo`" in error and "quote it" in error


@pytest.mark.parametrize("text", ["config = GRPOConfig(num_generations=8)", "def f(:", "print(3)", ""])
def test_python_is_refused(tmp_path, capsys, text):
    (tmp_path / "train.py").write_text(text)
    assert cli.main(["translate", str(tmp_path / "train.py")]) == 2
    error = capsys.readouterr().err
    assert f"FILE ({tmp_path / 'train.py'}): is Python" in error
    assert "as YAML" in error and "`trl grpo --config grpo.yaml`" in error


def test_a_switch_with_an_unknown_value_is_a_comment(translate, tmp_path):
    flags, comments = of_file(translate, tmp_path, "run.sh", f"{VERL} data.shuffle=0")
    assert "--no-shuffle" in flags
    flags, comments = of_file(translate, tmp_path, "run.sh", f"{VERL} data.shuffle=maybe")
    assert "--no-shuffle" not in flags and "not one of true, false:\ndata.shuffle=maybe" in comments


def test_the_newer_name_of_verls_reward_function(translate, tmp_path):
    words = "reward.custom_reward_function.path=my.py reward.custom_reward_function.name=score"
    flags, _ = of_file(translate, tmp_path, "run.sh", f"{VERL} {words}")
    assert flags["--reward-function"] == ["my.py:score"]


@pytest.mark.parametrize(
    "options",
    [
        "--num-generations 8 --max-steps 100",
        "--num_generations 8 --max-steps 100",
        "--num-generations=8 --max_steps=100",
    ],
)
def test_trls_options_may_have_dashes(translate, tmp_path, options):
    flags, comments = of_file(translate, tmp_path, "run.sh", f"trl grpo --num-processes 2 {options}")
    assert flags["--num-samples-per-prompt"] == ["8"] and flags["--train-iters"] == ["100"]
    assert flags["--nproc-per-node"] == ["2"] and "not known here" not in comments


@pytest.mark.parametrize(
    "text",
    [
        f"{VERL} data.seed=1\n# again\n{VERL} data.seed=2 \\\n    trainer.save_freq=5\n",
        f"python a.py {GRPO_FLAGS} --seed 1\nHF_HOME=/h accelerate launch b.py {GRPO_FLAGS} --seed 2\n",
        "python3 train.py --hf-checkpoint /m\n\n+ ray job submit -- python3 train.py --hf-checkpoint /m\n",
    ],
    ids=["verl", "trl", "slime"],
)
def test_several_commands_are_refused(tmp_path, capsys, text):
    """The words of one would be taken for the other's."""
    (tmp_path / "run.sh").write_text(text)
    assert cli.main(["translate", str(tmp_path / "run.sh")]) == 2
    assert "has several commands. Keep the one" in capsys.readouterr().err


def test_a_word_that_is_no_setting_of_verl_is_refused(tmp_path, capsys):
    """It would be lost; `echo` prints a value with blanks without its quotes."""
    (tmp_path / "run.sh").write_text(f"{VERL} trainer.experiment_name=a b")
    assert cli.main(["translate", str(tmp_path / "run.sh")]) == 2
    assert "has b among verl's settings" in capsys.readouterr().err


def test_one_of_several_configurations_of_a_yaml_file_is_translated_and_named(translate, tmp_path):
    text = "one: {num_generations: 4, seed: 3}\ntwo: {num_generations: 8, beta: 0.1}"
    flags, comments = of_file(translate, tmp_path, "a.yaml", text)
    assert flags["--seed"] == ["3"] and flags["--num-samples-per-prompt"] == ["4"]
    assert "one, two are configurations each: one is translated" in comments
    flags, comments = of_file(translate, tmp_path, "a.yaml", "num_generations: 8\nseed: 3")
    assert flags["--seed"] == ["3"] and "configurations each" not in comments


@pytest.mark.parametrize(
    "command",
    [
        f"{VERL} data.seed=3",
        f"accelerate launch --num_processes 2 train.py {GRPO_FLAGS} --seed 3",
        f"trl grpo {GRPO_FLAGS} --seed=3",
        f"{GRPO_FLAGS} --seed 3",
        "ray job submit --address http://h:1 -- python3 train.py --hf-checkpoint /m --rollout-seed 3",
        "--rollout-batch-size 8 --rollout-seed 3",
        "trainer.nnodes=1 data.seed=3",
    ],
)
def test_words_are_read_as_in_a_file(translate, tmp_path, command):
    of_words = translate("--", *command.split())
    assert of_words[0]["--seed"] == ["3"]
    assert of_words == of_file(translate, tmp_path, "command.txt", command)
    assert of_words == of_file(translate, tmp_path, "lines", command.replace(" ", " \\\n  "))


@pytest.mark.parametrize(
    "words",
    [
        'data.prompt_key="q\n--seed 3"',
        "data.tokenizer='a\n--seed 3'",
        "foo.x='b\n--seed 3'",
        "actor_rollout_ref.actor.policy_loss.loss_mode='x\n--seed 3'",
    ],
)
def test_a_line_break_in_a_value_makes_no_flags(tmp_path, capsys, words):
    (tmp_path / "run.sh").write_text(f"{VERL} {words}")
    assert cli.main(["translate", str(tmp_path / "run.sh")]) == 0
    (tmp_path / "run.args").write_text(capsys.readouterr().out)
    reader = Reader()
    reader.read([f"@{tmp_path / 'run.args'}"])
    found = {one.name: [word.text for word in one.words] for one in reader.occurrences}
    assert reader.errors == [] and "seed" not in found
    assert found.get("tokenizer-model") == (["a\n--seed 3"] if "tokenizer" in words else None)


@pytest.mark.parametrize("word", ["~data.seed", "~data.seed=7", "~data"])
def test_a_tilde_takes_a_setting_away(translate, tmp_path, word):
    assert "--seed" not in of_file(translate, tmp_path, "run.sh", f"{VERL} data.seed=7 {word}")[0]
    assert "--seed" not in translate("--", "data.seed=7", word)[0]


@pytest.mark.parametrize(
    "name, text, expected",
    [
        (None, None, "No such file or directory. Name a YAML or JSON file, or one with a command."),
        ("a.sh", "echo hello\n", "has no settings of verl, TRL or slime"),
        ("a.txt", "", "has no settings of verl, TRL or slime"),
        ("a.txt", "trainer.nnodes=1 data.prompt_key='a", "cannot be parsed: No closing quotation"),
        ("a.yaml", "a: [\n", "cannot be parsed"),
        ("a.yaml", "- 1\n", "has no settings by name"),
        ("a.json", "{", "cannot be parsed"),
        ("a.json", '{"epochs": 3}', "has no settings of verl or TRL"),
    ],
)
def test_a_file_that_cannot_be_translated(tmp_path, capsys, name, text, expected):
    path = tmp_path / (name or "absent.sh")
    if text is not None:
        path.write_text(text)
    assert cli.main(["translate", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"FILE ({path}): " in error and expected in error


def test_a_yaml_file_that_builds_on_verls_ppo_trainer_is_read(translate, tmp_path):
    text = "defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 48}\n"
    assert of_file(translate, tmp_path, "mine.yaml", text)[0]["--num-prompts"] == ["48"]


SFT_YAML = "model_name_or_path: /m\nper_device_train_batch_size: 4\npacking: true\nmax_length: 2048\n"


@pytest.mark.parametrize(
    "name, text, reason",
    [
        (
            "a.sh",
            "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a model.lora_rank=8 trainer.nnodes=1",
            "verl",
        ),
        ("a.yaml", "data: {train_files: a}\ntrainer: {nnodes: 1}\n", "verl"),
        ("a.yaml", SFT_YAML, "num_generations"),
        ("a.sh", "python train_dpo.py --per_device_train_batch_size 4 --beta 0.1", "num_generations"),
        ("a.sh", "python3 train.py --hf-checkpoint /m --loss-type sft_loss --lr 1e-5", "sft_loss"),
    ],
)
def test_sft_and_dpo_are_refused(tmp_path, capsys, name, text, reason):
    (tmp_path / name).write_text(text)
    assert cli.main(["translate", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert "SFT, DPO" in error and "--algorithm sft or --algorithm dpo" in error and reason in error
