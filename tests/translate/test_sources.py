"""How shell scripts, YAML and Python files of other frameworks are read, and which files are refused."""

import os
import shlex
import subprocess

import pytest

from megarl import cli
from megarl.config.args_file import Reader
from megarl.translate.shell import Script
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


def test_a_shell_script(translate, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    for name in ("DATA_HOME", "NODES", "MODE"):
        monkeypatch.delenv(name, raising=False)
    flags, comments = of_file(translate, tmp_path, "run.sh", SCRIPT)
    assert flags["--train-data"] == ["/h/verl/a.parquet", "/h/verl/b.parquet"]
    assert flags["--max-response-length"] == ["524"]
    assert flags["--max-prompt-length"] == ["1024"]
    assert flags["--num-samples-per-prompt"] == ["4"]
    assert flags["--temperature"] == ["0.7"]
    assert flags["--log-name"] == ["a b"]
    assert flags["--log-project"] == ["p-1024-q"]
    assert "--seed" not in flags
    assert "trainer.nnodes: $NODES is not set in the script" in comments
    assert "conditions or loops" in comments


@pytest.mark.parametrize("line", ["a '' b", 'a="" b', "a='x y'z\"v w\"", r'a "b\"c" d\ e', "a # 'b"])
def test_quoted_words_are_those_of_shlex(line):
    commands = Script(f"x {line}\ny", {}).commands()
    assert commands == [shlex.split(f"x {line}", comments=True), ["y"]]


SHOW = r"""show() { printf '%s\0' "$@" >&3; printf '\n\0' >&3; }
exec 3>&1 >/dev/null
"""


def words_of_bash(text):
    """Return the arguments of each call of `show` in a script that bash runs."""
    environment = {"PATH": os.environ["PATH"]}
    run = subprocess.run(["bash", "-c", SHOW + text], env=environment, capture_output=True, text=True)
    return [call.split("\0")[:-1] for call in run.stdout.split("\n\0")[:-1]]


@pytest.mark.parametrize(
    "text",
    [
        "show a 2>&1 | cat",
        "show a b > log; show c",
        "show a 2> log b",
        "show a>log;show b",
        "show a &>> log b",
        "show 2 >&2; show d 3",
        "show a <<< 'x y' b",
        "show a > >(cat) b",
        'E="a=1 b=2"; show $E "$E" c=$E',
        'E=; show a $E b$E "$E"',
        'A=("a b" c); show ${A[@]} "${A[@]}"',
        "# comment \\\nX=1\nshow $X",
        "show a \\\n  b \\\n c",
        "show ab\\\ncd",
        "show \"a\\\nb\" 'c\\\nd'",
        "run() { show a b; }\nrun",
        "run() {\nshow a b\n}\nrun",
        "( show a; show b )",
        "cat <<EOF\nDon't (\nEOF\nshow a",
        "cat <<-'EOF' > log\n\t don't\n\tEOF\nshow a",
        "X=$(cat <<EOF\ndon't\nEOF\n)\nshow b",
        'declare -a A=(x y); show "${A[@]}"',
        "declare -r -x B=3; show $B",
        '[[ "$D" == 1 ]] && B=8\nB=${B:-64}\nshow $B',
        '[ -z "$N" ] && N=8; show $N',
        'N=4; [ -z "$N" ] && N=8; show $N',
        "N=2; [ $N -eq 2 ] && N=3; show $N",
        "D=x; [ $D != x ] || E=5; show $E",
        '[ "$M" = x ] && { A=1; B=2; }\nA=${A:-3}; B=${B:-4}; show $A $B',
        "[ x = x ] && { A=1; B=2; } || { A=7; B=9; }; show $A $B",
        "[ x = y ] && { A=1; B=2; } || { A=7; B=9; }; show $A $B",
        "show {a b }",
        "cd / && X=3; show $X",
    ],
)
def test_words_are_those_of_bash(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = [words[1:] for words in Script(text, {}).commands() if words[0] == "show"]
    assert commands == words_of_bash(text) != []


@pytest.mark.parametrize(
    "text, expected",
    [
        ("B=64; grep -q x file && B=8", "64"),  # whether grep finds it is not known
        ("grep -q x file && B=8", "8"),
        ("B=64; [ -f x ] && { A=1; B=8; }", "64"),
    ],
)
def test_an_assignment_that_may_not_run_does_not_override(text, expected):
    script = Script(f"{text}\nshow $B", {})
    assert script.commands()[-1] == ["show", expected] and script.has_branches


GRPO_FLAGS = "--num_generations 8 --per_device_train_batch_size 4 --gradient_accumulation_steps 2"


@pytest.mark.parametrize(
    "command, expected",
    [
        (f"accelerate launch --num_processes 8 train_grpo.py {GRPO_FLAGS}", "64"),
        (f"accelerate launch --num_processes 8 -m mine.grpo {GRPO_FLAGS} > log 2>&1", "64"),
        (f"torchrun --nnodes 2 --nproc_per_node 4 train.py {GRPO_FLAGS} --reward_file r.py --beta 0", "64"),
        (f"python -m torch.distributed.run --nproc-per-node=2 train.py {GRPO_FLAGS}", "16"),
        (f"trl grpo --num_processes 4 {GRPO_FLAGS}", "32"),
    ],
)
def test_the_launcher_says_the_number_of_processes(translate, tmp_path, command, expected):
    flags, _ = of_file(translate, tmp_path, "run.sh", command)
    assert flags["--global-batch-size"] == [expected]
    assert flags["--num-samples-per-prompt"] == ["8"]


def test_redirections_are_no_values(translate, tmp_path):
    command = f"python train.py {GRPO_FLAGS} --max_steps 100 > log.txt 2>&1"
    assert of_file(translate, tmp_path, "a.sh", command)[0]["--train-iters"] == ["100"]
    command = "python3 train.py --hf-checkpoint /m --rollout-batch-size 32 --colocate 2>&1 | tee log"
    assert of_file(translate, tmp_path, "b.sh", command)[0]["--nproc-per-node"] == ["8"]


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


def test_a_value_that_is_not_known_names_the_flag_alone(translate, tmp_path):
    command = f"{VERL} custom_reward_function.path=$FILE"
    _, comments = of_file(translate, tmp_path, "run.sh", command)
    assert "$FILE is not set in the script; set --reward-function" in comments
    assert ":compute_score" not in comments


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


PYTHON = """import trl
if debug:
    config = GRPOConfig(max_steps=5, num_iterations=4)
else:
    config = trl.GRPOConfig(
        output_dir="real", max_steps=7, num_generations=4)
"""
TWO_VERL = f"""{VERL} data.seed=1
# again
{VERL} data.seed=2 \\
    trainer.save_freq=5
"""
TWO_TRL = f"""python a.py {GRPO_FLAGS} --seed 1 --max-steps 9
python b.py {GRPO_FLAGS} --seed 2
"""
TWO_SLIME = "python3 train.py --hf-checkpoint /m\npython3 train.py --hf-checkpoint /m --rollout-seed 7\n"


@pytest.mark.parametrize(
    "name, text, expected, remark",
    [
        (
            "a.py",
            PYTHON,
            {"--train-iters": ["7"], "--num-epochs": ["1"], "--save": ["real"]},
            "GRPOConfig(...) is in lines 3 and 5: line 5, which",
        ),
        (
            "a.sh",
            TWO_VERL,
            {"--seed": ["2"], "--save-interval": ["5"]},
            "a command of verl is in lines 1 and 3: line 3, which",
        ),
        (
            "a.sh",
            TWO_TRL,
            {"--seed": ["1"], "--train-iters": ["9"]},
            "of TRL is in lines 1 and 2: line 1, which",
        ),
        ("a.sh", TWO_SLIME, {"--seed": ["7"]}, "of slime is in lines 1 and 2: line 2, which"),
        (
            "a.yaml",
            "one: {num_generations: 4, seed: 3}\ntwo: {num_generations: 8, beta: 0.1}",
            {"--seed": ["3"], "--num-samples-per-prompt": ["4"]},
            "one, two are configurations each: one is translated",
        ),
    ],
    ids=["python", "verl", "trl", "slime", "yaml"],
)
def test_one_of_several_configurations_is_translated_and_named(
    translate, tmp_path, name, text, expected, remark
):
    flags, comments = of_file(translate, tmp_path, name, text)
    assert {flag: flags.get(flag) for flag in expected} == expected
    assert remark in comments


@pytest.mark.parametrize("text", ["seed: 3", "GRPOConfig(seed=3)", f"{VERL} data.seed=3", "echo\n\n"])
def test_one_configuration_has_no_remark(translate, tmp_path, text):
    name = {"seed": "a.yaml", "GRPO": "a.py"}.get(text[:4], "a.sh")
    text = f"num_generations: 8\n{text}" if name == "a.yaml" else text
    text = f"{text}{VERL} data.seed=3" if text.startswith("echo") else text
    flags, comments = of_file(translate, tmp_path, name, text)
    assert (
        flags["--seed"] == ["3"] and "is in lines" not in comments and "configurations each" not in comments
    )


@pytest.mark.parametrize(
    "words",
    [
        'data.prompt_key="q\n--seed 3 $Y"',
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
        (None, None, "No such file or directory. Name a script, a YAML, JSON or Python file."),
        ("a.sh", "echo hello\n", "has no command of verl, TRL or slime"),
        ("a.yaml", "a: [\n", "cannot be parsed"),
        ("a.yaml", "- 1\n", "has no settings by name"),
        ("a.json", "{", "cannot be parsed"),
        ("a.json", '{"epochs": 3}', "has no settings of verl or TRL"),
        ("a.py", "def f(:", "is no Python"),
        ("a.py", "print(3)", "has no GRPOConfig(...)"),
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
        ("a.py", "trl.DPOConfig(beta=0.1)", "DPOConfig"),
        ("a.sh", "python3 train.py --hf-checkpoint /m --loss-type sft_loss --lr 1e-5", "sft_loss"),
    ],
)
def test_sft_and_dpo_are_refused(tmp_path, capsys, name, text, reason):
    (tmp_path / name).write_text(text)
    assert cli.main(["translate", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert "SFT, DPO" in error and "--algorithm sft or --algorithm dpo" in error and reason in error
