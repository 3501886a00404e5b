"""A --save that cannot be written is found before a job starts, also by root, for whom permission bits mean
nothing; nothing is created.

pytest tests/checks/test_unusable_folders.py"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megarl.algorithms import REGISTRY
from megarl.checks.disk import save_errors
from megarl.config.loader import load_config
from megarl.files.writing import obstacle
from tests.launch import command_line, succeed
from tests.config.conftest import job, write_model  # noqa: F401

ASK = "import sys\nfrom megarl.files.writing import obstacle\nprint(obstacle(sys.argv[1]))"


def dangling(folder: Path) -> Path:
    (folder / "run").symlink_to(folder / "gone")
    return folder / "run"


def below_a_dangling_link(folder: Path) -> Path:
    return dangling(folder) / "a" / "run"


def below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "a" / "run"


# name -> (makes the path, why it cannot be written)
UNUSABLE = {
    "dangling link": (dangling, r"/run is a link to \S+/gone, which does not exist"),
    "below a dangling link": (below_a_dangling_link, r"/run is a link to \S+/gone, which does not exist"),
    "below a file": (below_a_file, r"/file is a file"),
    "in /proc": (
        lambda folder: Path("/proc/megarl/run"),
        r"/proc is on a file system without room for files|this user may not write in /proc",
    ),
    "in /sys": (
        lambda folder: Path("/sys/megarl/run"),
        r"/sys is on a (file system without room for files|read-only file system)|may not write in /sys",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_written(job, tmp_path, name, monkeypatch):  # noqa: F811
    """The finding proposes a folder that can be."""
    monkeypatch.chdir(tmp_path)
    make, why = UNUSABLE[name]
    path = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    (finding,) = save_errors(load_config([job, "--save", str(path)], REGISTRY))
    told = re.fullmatch(r"--save \((.*)\): cannot be written: (.*)\. Try --save (.*)\.", finding)
    assert told[1] == str(path) and re.search(why, told[2])
    assert list(save_errors(load_config([job, "--save", told[3]], REGISTRY))) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_what_can_be_written(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    before = tmp_path.stat().st_mtime_ns
    for path in (
        tmp_path,
        tmp_path / "new",
        tmp_path / "a" / "b" / "c",
        tmp_path / "link",
        tmp_path / "link" / "new",
        Path("new"),
    ):
        assert obstacle(path) is None
    assert tmp_path.stat().st_mtime_ns == before


def mounted(*mount: str, folder: Path) -> str:
    """What is said of a folder inside a mount namespace of its own; skips where this user may not have
    one."""
    script = (
        f"mount {shlex.join([*mount, str(folder)])} && exec {command_line('-P', '-c', ASK, folder / 'run')}"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        pytest.skip(f"no mount here: {done.stderr.strip()}")
    return done.stdout.strip()


def test_a_read_only_file_system(tmp_path):
    assert (
        mounted("-t", "tmpfs", "-o", "ro", "none", folder=tmp_path)
        == f"{tmp_path} is on a read-only file system"
    )


def test_a_file_system_without_inodes(tmp_path):
    assert (
        mounted("-t", "tmpfs", "-o", "size=1m,nr_inodes=1", "none", folder=tmp_path)
        == f"in {tmp_path} no file can be created: No space left on device"
    )


def test_permissions_of_another_user(tmp_path):
    if os.getuid():
        pytest.skip("needs root to become another user")
    script = "\n".join(
        [
            "import os, sys",
            "from megarl.files.writing import obstacle",
            "os.setgid(65534)",
            "os.setuid(65534)",
            "print(obstacle('/megarl/run'))",
            "print(obstacle(sys.argv[1]))",
        ]
    )
    done = succeed("-P", "-c", script, tmp_path / "run", timeout=60)
    in_root, in_private = done.stdout.splitlines()
    assert in_root == "this user may not write in /" and "ermission denied" in in_private


def test_a_run_that_goes_on_must_be_writable_too(job, tmp_path):  # noqa: F811
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    (finding,) = save_errors(load_config([job, "--load", str(tmp_path / "run")], REGISTRY))
    assert "is a link to" in finding
