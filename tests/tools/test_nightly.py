"""How the nightly tests are cut into parts, and which failures block. `pytest tests/tools/test_nightly.py`"""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "nightly.py"


@pytest.fixture
def nightly():
    spec = importlib.util.spec_from_file_location("nightly", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parts_have_every_test_once_in_order_and_their_length(nightly):
    tests = [f"tests/a.py::test_{i}" for i in range(6)]
    seconds = dict(zip(tests, [50.0, 40.0, 20.0, 300.0, 10.0]))
    parts = nightly.cut(tests, seconds, 100.0)  # the last is not recorded: 60 s
    assert parts == [tests[:2], tests[2:3], tests[3:4], tests[4:]]


@pytest.mark.parametrize("wrong", ["5", "-1", "two", "1.5"])
def test_a_part_that_there_is_not_is_refused(nightly, wrong, monkeypatch):
    monkeypatch.setenv("NIGHTLY_PART", wrong)
    with pytest.raises(SystemExit, match=rf"NIGHTLY_PART \({wrong}\) must be a whole number from 0 to 4"):
        nightly.chosen(5)


def test_a_week_has_every_part(nightly, monkeypatch):
    monkeypatch.setenv("NIGHTLY_PART", "3")
    assert nightly.chosen(5) == 3
    monkeypatch.delenv("NIGHTLY_PART")
    assert 0 <= nightly.chosen(7) < 7


REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_b" name="test_c[x::y]" time="1.5"/>
<testcase classname="tests.a.test_b" name="test_c[z]" time="2"><failure message="m"/></testcase>
<testcase classname="tests.a.test_b" name="test_d" time="3"><error message="m"/></testcase>
</testsuite></testsuites>"""


def test_a_report_gives_lengths_by_function_and_failures_by_case(nightly, tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    assert nightly.read(tmp_path / "report.xml") == (
        {"tests/a/test_b.py::test_c": 3.5, "tests/a/test_b.py::test_d": 3.0},
        ["tests/a/test_b.py::test_c[z]", "tests/a/test_b.py::test_d"],
    )


@pytest.mark.parametrize("before, code", [({"tests/a/test_b.py::test_c[z]"}, 0), (set(), 1)])
def test_only_what_the_parent_commit_passes_blocks(nightly, before, code, monkeypatch, capsys):
    def fails(root, arguments, environment):
        report = next(a.removeprefix("--junitxml=") for a in arguments if a.startswith("--junitxml="))
        Path(report).write_text(REPORT.replace('<error message="m"/>', ""))
        return 1

    monkeypatch.setattr(nightly, "pytest", fails)
    monkeypatch.setattr(nightly, "failures_of_parent", lambda tests, folder, environment: before)
    assert nightly.run(["tests/a/test_b.py::test_c"], None, 60.0) == code
    says = "fails on the parent commit too" if before else "fails since this commit"
    assert f"tests/a/test_b.py::test_c[z]: {says}" in capsys.readouterr().out


def test_no_file_is_begun_when_the_time_is_over(nightly, monkeypatch, capsys):
    monkeypatch.setattr(nightly, "pytest", lambda *_: pytest.fail("it was begun"))
    assert nightly.run(["tests/a/test_b.py::test_c", "tests/a/test_b.py::test_d"], None, -1.0) == 0
    assert (
        "not run, -0 min are over: tests/a/test_b.py::test_c tests/a/test_b.py::test_d"
        in capsys.readouterr().out
    )
