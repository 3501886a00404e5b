"""Print newer releases of what pyproject.toml pins, and where the newest Megatron-Core has the lines that megarl
replaces.

    .venv/bin/python tools/upstream.py [PACKAGE ...]

Without packages all are looked up. pip asks the index that it is configured for."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.megatron.fixes import Fix

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="pinned packages to look up")
    arguments = parser.parse_args()
    pinned = pins((ROOT / "pyproject.toml").read_text())
    if unknown := set(arguments.packages) - pinned.keys():
        parser.error(f"{', '.join(sorted(unknown))}: is not pinned in pyproject.toml")
    for name in arguments.packages or sorted(pinned):
        newest = newest_release(name)
        if newest == pinned[name]:
            continue
        print(f"{name}: {pinned[name]} is pinned, the newest is {newest or 'not found'}", flush=True)
        if name == "megatron-core" and newest:
            from megarl.megatron.fixes import FIXES

            with tempfile.TemporaryDirectory() as folder:
                print(
                    "\n".join(where_lines_are(FIXES, download(name, newest, Path(folder)) / "megatron/core"))
                )


def pins(pyproject: str) -> dict[str, str]:
    """Return package -> pinned version of all dependencies, extras and build requirements."""
    table = tomllib.loads(pyproject)
    project = table["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    found = (
        re.match(r"([\w.-]+)(?:\[.*\])?==([\w.]+)", line)
        for group in [*groups, table["build-system"]["requires"]]
        for line in group
    )
    return {match[1]: match[2] for match in found if match}


def newest_release(name: str) -> str | None:
    """Return the newest release that pip finds, also if its metadata ask for another Python; None without
    one."""
    told = pip("index", "versions", "--ignore-requires-python", name, check=False)
    match = re.search(rf"^{re.escape(name)} \((\S+)\)", told, re.MULTILINE | re.IGNORECASE)
    return match[1] if match else None


def download(name: str, version: str, folder: Path) -> Path:
    """Return the folder into which the release's wheel is unpacked."""
    options = ("--quiet", "--no-deps", "--ignore-requires-python", "--only-binary", ":all:")
    pip("download", *options, "--dest", str(folder), f"{name}=={version}")
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder)
    return folder


def where_lines_are(fixes: Iterable[Fix], core: Path) -> Iterator[str]:
    """Yield a line per fix: whether `core` has the line that it corrects, and where."""
    for fix in fixes:
        path = core / fix.file
        lines = path.read_text().splitlines() if path.exists() else []
        numbers = [number for number, line in enumerate(lines, 1) if fix.says in line]
        if fix.line in numbers:
            verdict = "stands"
        elif numbers:
            verdict = f"moved to line {', '.join(map(str, numbers))}"
        else:
            verdict = "is gone" if lines else "is gone, with the file"
        yield f"  {fix.name}: {fix.file}:{fix.line} {verdict}"


def pip(*arguments: str, check: bool = True) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check).stdout


if __name__ == "__main__":
    main()
