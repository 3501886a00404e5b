"""Configurations of public repositories translate, and `megarl check` accepts the result.

configs/ has their settings; the first line of each file names the repository and the script. Model, data,
reward and run folder are replaced by small local ones (conftest.py), as theirs are not here. Everything else,
layout, batch, lengths and losses among it, is checked as it was translated."""

from pathlib import Path

import pytest

from megarl import cli

CONFIGS = sorted((Path(__file__).parent / "configs").iterdir())
ROWS = "17917"
RANKS = {"trl_code": "7", "trl_demo": "8"}
"""Configuration of TRL -> the processes that its batch is made for; 8 for others."""


def translate(path, capsys):
    if path.suffix == ".txt":
        words = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        argv = ["translate", "--rows", ROWS, "--", *words]
    else:
        argv = ["translate", "--rows", ROWS, "--ranks", RANKS.get(path.stem, "8"), str(path)]
    assert cli.main(argv) == 0
    return capsys.readouterr().out


@pytest.mark.nightly_but_one_in(2)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_translation_passes_check(path, capsys, local, tmp_path):
    text = translate(path, capsys)
    (tmp_path / "translated.args").write_text(text)
    code = cli.main(["check", "--gpu-memory", "80", f"@{tmp_path / 'translated.args'}", *local(text)])
    result = capsys.readouterr()
    assert code == 0, f"{result.err}\n{text}"


def test_there_are_ten_of_verl_and_five_of_trl():
    names = [path.name for path in CONFIGS]
    assert sum(name.startswith("verl_") for name in names) >= 10
    assert sum(name.startswith("trl_") for name in names) >= 5
    assert all(
        path.read_text().startswith("# ") and "@" in path.read_text().splitlines()[0] for path in CONFIGS
    )
