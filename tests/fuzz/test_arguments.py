"""Whatever stands in args files and on the command line: a configuration, or a ConfigError that says where.
And what was read is written so that it reads the same.

pytest tests/fuzz/test_arguments.py"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import strategies as st

from megarl.algorithms import REGISTRY
from megarl.config.args_file import Reader
from megarl.config.check import check_job
from megarl.config.errors import ConfigError
from megarl.config.flags import Flag, build_flags
from megarl.config.loader import load_config
from megarl.config.mesh import MeshSpec, role_meshes
from megarl.config.other_flags import passthrough_names
from megarl.config.render import write_args
from megarl.config.roles import parse_pools, parse_ranks
from megarl.config.schema import TrainConfig
from tests.config.conftest import QWEN3
from tests.fuzz.cases import fuzz, may_refuse

FLAGS = {name: build_flags(cls) for name, cls in REGISTRY.items()}
NAMES = sorted({name for flags in FLAGS.values() for name in flags} | {"algorithm"} | {*passthrough_names()})
GIVEN = {"algorithm", "model", "train-data", "save", "train-iters"}

numbers = st.one_of(
    st.integers(-3, 70).map(str),
    st.integers().map(str),
    st.floats().map(repr),
    st.integers(15, 5000).map("9".__mul__),
    st.sampled_from(
        ["1e400", "-1e-400", "0x10", "1_0", "٣", "1.", ".5", "+1", "-0", "nan", "-inf", "1e5", "true", "none"]
    ),
)
words = st.one_of(
    numbers,
    st.text(max_size=12),
    st.sampled_from(
        [
            "",
            "-",
            "--",
            "@",
            "#",
            "'",
            '"',
            "\\",
            "0-3",
            "0,2",
            "a=0-1",
            "{}",
            '{"a": [1]}',
            "model",
            "auto",
            "\ud800",
            "\x00",
            "x" * 5000,
            "../..",
            "/dev/null",
            "[" * 3000,
            '{"a":' * 3000,
        ]
    ),
)
names = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(NAMES).map("no-".__add__),
    st.text(max_size=20),
    st.builds(
        "{}-{}-{}".format,
        st.sampled_from(["actor", "critic", "rollout", "reward", "no-actor"]),
        numbers,
        st.sampled_from(NAMES),
    ),
)
flags = st.builds("--{}{}{}".format, names, st.sampled_from([" ", "=", "\n", " '", ""]), words)
pieces = st.one_of(
    flags,
    words,
    st.sampled_from(
        [
            "@a",
            "@b.args",
            "@sub/../b.args",
            "@.",
            "@missing",
            "@loop",
            "@\x00",
            "@" + "x" * 300,
            "@/dev/null",
            "-x",
        ]
    ),
    st.sampled_from(
        [" ", "\n", "\t", "\r\n", "\\\n", " # ", "'", '"', "\\", "\x00", "\x1c", "\u2028", "\ufeff"]
    ),
)
texts = st.one_of(
    st.lists(pieces, max_size=12).map(" ".join).map(lambda text: text.encode(errors="surrogatepass")),
    st.binary(max_size=200),
)


@fuzz(st.lists(pieces, max_size=8), texts, texts, quick=25)
def test_anything_as_flags_and_files(folder: Path, argv: list[str], a: bytes, b: bytes) -> None:
    (folder / "a").write_bytes(a)
    (folder / "b.args").write_bytes(b)
    if not (folder / "loop").is_symlink():
        (folder / "loop").symlink_to("loop")
    argv = [f"@{folder}/{word[1:]}" if word.startswith("@") else word for word in argv]
    with may_refuse(ConfigError):
        if {"--help", "-h"}.isdisjoint(argv):
            load_config([f"@{folder / 'a'}", *argv], REGISTRY)


plain = st.text(st.sampled_from("ab1-=.,:/ü\u2028 \t\n\r'\"\\#\\\n  "), max_size=30)


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@fuzz(st.lists(plain, min_size=50, max_size=50), quick=5, full=200)
def test_words_are_those_of_bash(folder: Path, texts: list[str]) -> None:
    """50 texts at once, as starting bash takes longest. A text that one of them refuses, both must. Bash ends
    words at spaces, tabs and line ends; carriage returns are our own addition, for files from other
    systems."""
    texts = [text.replace("\r", "") + "\n" for text in texts]
    tell = "do printf '%s\\0' \"$word\"; done; printf '\\1\\0'; } || printf '\\2\\0'"
    script = "\n".join(
        f"eval {shell_quoted(f'words=({chr(10)}{text}{chr(10)})')} 2>/dev/null && {{ for word in "
        f'"${{words[@]}}"; {tell}'
        for text in texts
    )
    found = (
        subprocess.run(["bash", "-c", script], capture_output=True, check=True, timeout=60)
        .stdout.decode()
        .split("\0")[:-1]
    )
    for text in texts:
        expected: list[str] | None = []
        while (word := found.pop(0)) not in ("\1", "\2"):
            expected.append(word)
        reader = Reader()
        got = [word.text for word, _ in reader._split(text, "a")]
        assert (None if reader.errors else got) == (None if word == "\2" else expected), text


def shell_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"


def values(flag: Flag) -> st.SearchStrategy[list[str]]:
    """Words of the flag's type, good ones mostly; anything else."""
    kind = flag.kind
    if kind.is_bool:
        return st.just([])
    if kind.choices:
        one = st.sampled_from([str(choice) for choice in kind.choices])
    else:
        of = {
            "int": st.integers(0, 9).map(str),
            "low-high": st.sampled_from(["1-2", "1-8", "2-1", "0-3", "3-"]),
            "float": st.one_of(st.floats(0, 2), st.floats()).map(repr),
            "str": st.text(max_size=8),
            "json": st.dictionaries(st.text(max_size=3), st.floats() | st.text(max_size=3)).map(json.dumps),
            "bool": st.sampled_from(["true", "false"]),
        }
        one = st.one_of(*(of[base] for base in kind.bases))
    good = st.lists(one, max_size=3) if kind.many else one.map(lambda word: [word])
    return st.one_of(good, good, good, words.map(lambda word: [word]))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[str, list[str]]:
    """An algorithm and flags that it has, each once."""
    algorithm = draw(st.sampled_from(sorted(REGISTRY)))
    of = FLAGS[algorithm]
    chosen = draw(st.lists(st.sampled_from(sorted(of.keys() - GIVEN)), unique=True, max_size=6))
    argv = []
    for name in chosen:
        given = draw(values(of[name]))
        negate = of[name].kind.is_bool and draw(st.booleans())
        argv += (
            [f"--no-{name}" if negate else f"--{name}", *given]
            if len(given) != 1
            else [f"--{name}={given[0]}"]
        )
    return algorithm, argv


def job(folder: Path, algorithm: str, argv: list[str]) -> TrainConfig:
    model = folder / "model"
    if not model.exists():
        model.mkdir()
        (model / "config.json").write_text(json.dumps(QWEN3))
        (model / "model.safetensors").touch()
        (folder / "train.jsonl").write_text("{}\n")
    given = [
        "--algorithm",
        algorithm,
        "--model",
        str(model),
        "--train-data",
        str(folder / "train.jsonl"),
        "--save",
        str(folder / "run"),
    ]
    return load_config([*given, "--train-iters", "1", *argv], REGISTRY)


@fuzz(jobs(), quick=25)
def test_what_is_written_reads_the_same(folder: Path, drawn: tuple[str, list[str]]) -> None:
    """By the text of the tree, in which NaN equals NaN."""
    with may_refuse(ConfigError):
        config = job(folder, *drawn)
        text = write_args(config)
        (folder / "resolved.args").write_text(text, encoding="utf-8", newline="")
        again = load_config([f"@{folder / 'resolved.args'}"], REGISTRY)
        assert repr(again) == repr(config)
        assert write_args(again) == text


@fuzz(jobs(), st.integers(1, 8), quick=25)
def test_every_configuration_is_checked(folder: Path, drawn: tuple[str, list[str]], world_size: int) -> None:
    """What passes has a mesh for every role."""
    with may_refuse(ConfigError):
        config = job(folder, *drawn)
        check_job(config, world_size)
        assert role_meshes(config, world_size)


lists_of_ranks = st.one_of(
    st.text(max_size=12),
    st.lists(
        st.one_of(numbers, st.builds("{}-{}".format, numbers, numbers), st.text(max_size=3)), max_size=5
    ).map(",".join),
)


@fuzz(
    lists_of_ranks,
    st.integers(1, 16),
    st.lists(
        st.one_of(
            st.text(max_size=8), st.builds("{}={}".format, st.sampled_from(["a", "b", "ä"]), lists_of_ranks)
        )
    ),
)
def test_ranks_and_pools(folder: Path, text: str, world_size: int, pools: list[str]) -> None:
    with may_refuse(ValueError, naming="must"):
        ranks = parse_ranks(text, world_size)
        assert ranks and list(ranks) == sorted({*ranks}) and {*ranks} <= {*range(world_size)}
        assert parse_ranks(",".join(map(str, ranks)), world_size) == ranks
    with may_refuse(ValueError, naming="must"):
        assert len(parse_pools(tuple(pools))) == len(pools)


sizes = st.integers(-2, 5)


@fuzz(st.integers(0, 24), sizes, sizes, sizes, st.none() | sizes, sizes, sizes)
def test_meshes(
    folder: Path, num_ranks: int, tp: int, pp: int, ep: int, etp: int | None, cp: int, vpp: int
) -> None:
    """Every coordinate there is belongs to one rank, in both grids."""
    with may_refuse(ValueError, naming="parallel_size"):
        mesh = MeshSpec(tuple(range(num_ranks)), tp, pp, ep, etp, cp, vpp)
        for shape in (mesh.shape, mesh.expert_shape):
            found = {tuple(mesh.coordinates(rank)[name] for name in shape) for rank in mesh.ranks}
            assert len(found) == num_ranks and all(
                0 <= at < size for of in found for at, size in zip(of, shape.values(), strict=True)
            )
