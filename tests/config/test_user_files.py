"""Check the record of the user's files: what is stored with a checkpoint and what is told at a resume."""

import hashlib

from megarl.algorithms import REGISTRY
from megarl.config.loader import load_config
from megarl.config.user_files import changed_files, user_files

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
