"""Check the record of the user's files: what is stored with a checkpoint and what is told at a resume."""

import hashlib
from pathlib import Path

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.config.user_files import changed_files, user_files

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
NEEDED = "--model m --train-data d.jsonl --save s --train-iters 1 --algorithm grpo".split()


def test_each_file_is_stored_with_its_digest_and_named_once_it_has_changed(tmp_path):
    loss, reward = tmp_path / "loss.py", tmp_path / "reward.py"
    loss.write_text("def f(tokens, flags):\n    return -tokens.advantages * tokens.ratio, None\n")
    reward.write_text("def f(**_):\n    return 0.0\n")
    config = load_config(
        [*NEEDED, "--policy-loss", f"{loss}:f", "--reward-function", f"{reward}:f"], REGISTRY
    )
    saved = user_files(config)
    assert saved == {
        "policy-loss": {"path": str(loss), "sha256": hashlib.sha256(loss.read_bytes()).hexdigest()},
        "reward-function": {"path": str(reward), "sha256": hashlib.sha256(reward.read_bytes()).hexdigest()},
    }
    assert changed_files(config, saved) == [] == changed_files(config, {})
    loss.write_text(loss.read_text() + "# another byte\n")
    (note,) = changed_files(config, saved)
    assert note.startswith(f"--policy-loss ({loss}): the file has changed since the checkpoint was made")


def test_names_of_the_registry_are_no_files():
    assert user_files(load_config([*NEEDED, "--policy-loss", "gspo"], REGISTRY)) == {}


def test_the_page_on_security_names_every_flag_whose_file_a_job_runs(tmp_path):
    """The flags are those that the code records, and --agent-command, whose command is no file."""
    (file := tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\n"
        "from megarl.algorithms import GRPO\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Own(GRPO):\n    pass\n"
        "def f(*_, **__):\n    return 0.0, None\n"
        "def advantage(rewards, group_ids, lengths):\n    return rewards\n"
    )
    given = {
        "algorithm": f"{file}:Own",
        "advantage": f"{file}:advantage",
        "policy-loss": f"{file}:f",
        "reward-function": f"{file}:f",
        "env": f"{file}:Own",
    }
    words = [word for flag, value in given.items() for word in (f"--{flag}", value)]
    found = user_files(load_config([*NEEDED[:-2], *words], REGISTRY))
    assert found.keys() == given.keys()
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `--")]
    for flag in (*found, "agent-command"):
        assert any(f"`--{flag} " in row.split("|")[1] for row in rows), (
            f"--{flag} is in no row of {PAGE.name}"
        )
