"""What tools/quickstart.py removes before it starts. `pytest tests/tools/test_quickstart.py`"""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "quickstart.py"


@pytest.fixture
def start_over(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parents[1] / "examples")
    spec = importlib.util.spec_from_file_location("quickstart_tool", SCRIPT)
    monkeypatch.setitem(sys.modules, spec.name, tool := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(tool)
    return tool.start_over


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_what_a_quickstart_makes_is_removed(start_over, tmp_path):
    """The recipes of PPO, DPO and reward models save beside its runs."""
    write(tmp_path, "data/model/config.json", "data/train.jsonl", "curves.png")
    write(tmp_path, "sft/metrics.jsonl", "sft_mixed/hf/config.json", "grpo/checkpoints/step_000010/job.json")
    others = {"ppo/metrics.jsonl", "dpo/hf/config.json", "reward_model/resolved.args", "notes.txt"}
    write(tmp_path, *others)
    start_over(tmp_path)
    assert files(tmp_path) == others
    assert {path.name for path in tmp_path.iterdir()} == {"ppo", "dpo", "reward_model", "notes.txt"}


def test_a_half_made_quickstart_is_removed(start_over, tmp_path):
    write(tmp_path, "data/model/config.json", "sft/resolved.args")
    start_over(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_stays(start_over, tmp_path):
    start_over(tmp_path / "new")
    start_over(tmp_path)
    write(tmp_path, "grpo/metrics.jsonl")
    with pytest.raises(SystemExit, match="exists and is not an earlier quickstart: name another folder"):
        start_over(tmp_path)
    assert files(tmp_path) == {"grpo/metrics.jsonl"}
