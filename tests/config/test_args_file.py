"""Args files: words are compared with bash's own reading of the same text.

pytest tests/config/test_args_file.py"""

import shutil
import subprocess

import pytest

from megarl.config.args_file import COMMAND_LINE, Reader
from megarl.config.flags import Kind, format_flag

TEXTS = [
    "--lr 1e-5 # a comment\n--seed 1#2 '#3' \\#4",
    "--stop 'two words' \"it's\" 'it'\"'\"'s' \"a \\\"b\\\" \\\\\"",
    "--stop 'line\nbreak' '' \"\" x''y\n\n\t--bf16\n#end",
    "--a=1 --b='1 2' --c=--d",
    "--a one \\\n  two # three \\\nfour",
    '--json \'{"mode": 3, "x": [1, 2]}\'',
    "--a x\\ y 'b\\n' \"b\\n\" \\\\",
    "# only a comment",
    "--ü 'ü\u2028ü'\r",
    '--a o\\\nne \'o\\\nne\' "o\\\nne" "\\$ \\a"',
    "--save ~/runs/x --a ~ a~b ~nobody/x '~/x' \"~/x\" \\~/x",
    '--save ${HOME}/x --b "$HOME/x y" \'${HOME}\' \\${HOME} "\\${HOME}" x$HOME-y',
    "--pattern (\\d+)$ 5$ 'a$b'".replace("(\\d+)", "d+"),
]


def read(*argv):
    reader = Reader()
    reader.read(argv)
    return reader


def flat(reader):
    """Back to words, in order."""
    words = []
    for occurrence in reader.occurrences:
        words += [f"--{occurrence.name}", *(word.text for word in occurrence.words)]
    return words


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_of_a_shell(text, tmp_path):
    (tmp_path / "x.args").write_bytes(text.encode())
    reader = read(f"@{tmp_path / 'x.args'}")
    script = f"words=(\n{text.rstrip(chr(13))}\n); [ ${{#words[@]}} = 0 ] || printf '%s\\0' \"${{words[@]}}\""
    shell = (
        subprocess.run(["bash", "-c", script], capture_output=True, check=True, timeout=20)
        .stdout.decode()
        .split("\0")[:-1]
    )
    expected = [
        part
        for word in shell
        for part in (word.split("=", 1) if word.startswith("--") and "=" in word else [word])
    ]
    assert reader.errors == [] and flat(reader) == expected


def test_a_home_behind_an_equals_sign_and_of_an_included_file(tmp_path, monkeypatch):
    """A shell leaves them, and there is nothing else that they can mean."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.args").write_text("@~/y.args --save=~/runs --env data.math=~/env.py:Math")
    (tmp_path / "y.args").write_text("--seed 1")
    reader = read(f"@{tmp_path / 'x.args'}")
    words = ["--seed", "1", "--save", f"{tmp_path}/runs", "--env", f"data.math={tmp_path}/env.py:Math"]
    assert reader.errors == [] and flat(reader) == words


def test_a_variable_that_is_not_set_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    for word in ("${NOWHERE}/x", '"$NOWHERE"', "${NOWHERE:-x}"):
        (tmp_path / "x.args").write_text(f"--seed 1\n--save {word}")
        (error,) = read(f"@{tmp_path / 'x.args'}").errors
        assert "the environment has no variable 'NOWHERE" in error and error.endswith("x.args:2]")


def test_quoted_words_of_a_file_are_values(tmp_path):
    (tmp_path / "x.args").write_text("--stop '--lr' \"@x\" '-1' -1 -1e-3 -inf -")
    reader = read(f"@{tmp_path / 'x.args'}")
    assert reader.errors == [] and flat(reader) == ["--stop", "--lr", "@x", "-1", "-1", "-1e-3", "-inf", "-"]


@pytest.mark.parametrize(
    "value",
    ["~/x", "${HOME}", "$HOME", "data.x=1", "+trainer.y=", "data.math=env.py:Math", "@x", "none", "a b"],
)
def test_a_written_value_is_read_back(value, tmp_path):
    (tmp_path / "x.args").write_text(format_flag("judge-prompt", value))
    reader = read(f"@{tmp_path / 'x.args'}")
    [flag] = reader.occurrences
    assert reader.errors == [] and [word.text for word in flag.words] == [value]
    assert Kind(optional=True).parse(flag.words) == value


def test_words_after_a_flag_of_several_may_look_like_settings_of_verl():
    """--env and --teachers take NAME=VALUE, and the name of a data source may begin like a section of verl."""
    env = ["--env", "data.math=env.py:Math", "trainer.x=env.py:X"]
    teachers = ["--teachers", "data.math=a", "data.code=b"]
    assert read(*env).errors == [] and flat(read(*env)) == env
    assert read(*teachers).errors == [] and flat(read(*teachers)) == teachers
    for one in ("--seed", "--log-with", "--bf16"):
        [error] = read(one, "data.seed=1").errors
        assert error.startswith("data.seed=1: key=value is how verl is set")
    reader = read("--actor-2-stop", "data.x=1", "--seed", "1", "data.seed=1")
    assert len(reader.errors) == 1 and flat(reader) == ["--actor-2-stop", "data.x=1", "--seed", "1"]


def test_places_and_levels(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.args").write_text("--a 1\n@sub/b.args\n--c 3\n")
    (tmp_path / "sub" / "b.args").write_text("# relative to this file\n@c.args --b 'x\ny'\n--d")
    (tmp_path / "sub" / "c.args").write_text("--e 5")
    found = {o.name: (o.place, o.level) for o in read("--z", "1", f"@{tmp_path}/a.args", "--y").occurrences}
    levels = {name: level for name, (_, level) in found.items()}
    assert levels["e"] < levels["b"] == levels["d"] < levels["a"] == levels["c"] < levels["z"] == levels["y"]
    assert {name: place for name, (place, _) in found.items()} == {
        "e": f"{tmp_path}/sub/c.args:1",
        "b": f"{tmp_path}/sub/b.args:2",
        "d": f"{tmp_path}/sub/b.args:4",
        "a": f"{tmp_path}/a.args:1",
        "c": f"{tmp_path}/a.args:3",
        "z": COMMAND_LINE,
        "y": COMMAND_LINE,
    }


def test_cycles_and_files_that_cannot_be_read(tmp_path):
    (tmp_path / "a.args").write_text("--a 1\n@b.args\n")
    (tmp_path / "b.args").write_text("@./a.args\n@none.args\n@folder.args\n@latin.args")
    (tmp_path / "folder.args").mkdir()
    (tmp_path / "latin.args").write_bytes("--a ü".encode("latin-1"))
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "paths.args").write_text("@round")
    assert (
        read(f"@{tmp_path}/paths.args").errors[0]
        == f"@'round': is not the path of a file [{tmp_path}/paths.args:1]"
    )
    cycle, missing, folder, latin = read(f"@{tmp_path}/a.args").errors
    assert cycle == f"@./a.args: the file includes itself: a.args -> b.args -> a.args [{tmp_path}/b.args:1]"
    assert (
        missing == f"@none.args: cannot read {tmp_path}/none.args: No such file or directory. "
        f"Try {tmp_path}/a.args. [{tmp_path}/b.args:2]"
    )
    assert "Is a directory" in folder and "not a UTF-8 text file" in latin


@pytest.mark.parametrize(
    "text, error",
    [
        ("--a\n--b 'x", "'x\": a quote that is opened here is never closed [{}:2]"),
        ('--a x"y\n', "is never closed [{}:1]"),
        ("--a \\", "'\\\\': a backslash with nothing after it [{}:1]"),
        ("--a x\0y", "'x\\x00y': has a zero byte, or is not UTF-8 [{}:1]"),
        ("x --a", "'x' follows no flag. Flags start with --, args files with @ [{}:1]"),
    ],
)
def test_malformed_files(text, error, tmp_path):
    path = tmp_path / "x.args"
    path.write_text(text)
    [found] = read(f"@{path}").errors
    assert found.endswith(error.format(path))


def test_a_value_after_an_include_belongs_to_no_flag(tmp_path):
    (tmp_path / "x.args").write_text("--a 1")
    assert read("--b", f"@{tmp_path}/x.args", "2").errors == [
        "'2' follows no flag. Flags start with --, args files with @ [command line]"
    ]


def test_what_is_not_utf8_on_the_command_line_is_an_error():
    assert read("--save", "run\udcff").errors == [
        "'run\\udcff': has a zero byte, or is not UTF-8 [command line]"
    ]
