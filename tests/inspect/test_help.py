"""Every command that only reads has a help text, and every flag in an example of it is one of its flags."""

from __future__ import annotations

import re

import pytest

from megarl import cli


@pytest.mark.parametrize("command", ["show", "plot", "balance", "data", "chat", "tiny-model"])
def test_help_and_its_examples(command, capsys):
    with pytest.raises(SystemExit) as exited:
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert exited.value.code == 0 and f"usage: megarl {command}" in text
    examples, _, options = text.partition("\noptions:")
    known = set(re.findall(r"^  (?:-h, )?(--[\w-]+)", options, re.MULTILINE))
    commands = [re.split(r" {2,}", line)[0] for line in re.findall(r"(?m)^    (.*megarl .*)", examples)]
    used = re.findall(r"(?<=\s)--[\w-]+", "\n".join(commands))
    assert used and set(used) <= known
    assert f"  {command} " in cli.USAGE
