"""tools/gpu_session.sh installs the wheels of its machine once, also if the first installation is cut short.
pip is a stand-in.

pytest tests/tools/test_gpu_session.py"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "gpu_session.sh"
PYTHON = f"""#!/usr/bin/env bash
# Stands for pip, which fails while $MACHINE/broken is there, and for the versions. The rest is Python.
case "$*" in
  *"pip install"*)
    while [ "$1" != --target ]; do shift; done
    echo "${{*:3}}" >> "$MACHINE/calls"
    mkdir -p "$2"
    [ ! -e "$MACHINE/broken" ] || {{ touch "$2/half"; exit 1; }}
    touch "$2/whole" ;;
  -) echo '{{}}' ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """A folder with the script, a wheel, and the stand-in."""
    for folder in ("tools", "wheels"):
        (tmp_path / folder).mkdir()
    shutil.copy(SCRIPT, tmp_path / "tools")
    (tmp_path / "wheels" / "a.whl").touch()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def session(machine: Path) -> dict[str, str]:
    """Run a part of the session that needs nothing. Returns part -> its result in summary.json."""
    environment = {
        "PYTHON": str(machine / "python"),
        "MACHINE": str(machine),
        "MEGARL_GPU_REHEARSAL": "cpu",
    }
    shutil.rmtree(machine / "out", ignore_errors=True)
    script, out = machine / "tools" / "gpu_session.sh", machine / "out"
    done = subprocess.run(
        ["bash", str(script), str(out), str(machine / "wheels"), "sanitizer"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    parts = json.loads((out / "summary.json").read_text())["parts"]
    return {name: part["result"] for name, part in parts.items()}


def test_wheels_are_installed_again_after_an_installation_that_failed(machine):
    site = machine / "build" / "gpu_session_site"
    (machine / "broken").touch()
    assert session(machine)["wheels"] == "failed" and not site.exists()
    (machine / "broken").unlink()
    assert session(machine)["wheels"] == "passed"
    assert [path.name for path in site.iterdir()] == ["whole"]
    assert "wheels" not in session(machine)
    assert (machine / "calls").read_text() == f"{machine}/wheels/a.whl\n" * 2
