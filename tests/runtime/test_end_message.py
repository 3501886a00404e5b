"""The driver's last message about failures that explain themselves, and about others.
`pytest tests/runtime/test_end_message.py`"""

import re
from pathlib import Path

import pytest

from megarl.failures import ExplainedError
from megarl.runtime.end_message import EndNotes, driver_error_text, failure_text
from megarl.runtime.executor import RemoteError
from megarl.runtime.inline_executor import InlineExecutor
from megarl.runtime.messages import Failure, Reply, read_report, signed_report


class TooManySpoons(ExplainedError, ValueError):
    read_on = "docs/spoons.md"


@pytest.fixture
def executor():
    executor = InlineExecutor({})
    executor.label = "step 3"
    return executor


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def of_rank(error: Exception) -> RemoteError:
    """Return what the driver raises for an error of rank 1, which crosses the store as a message."""
    failure = Failure.of(raised(error), "actor", "update", "step 3")
    return RemoteError(1, read_report(signed_report(Reply(0, 1, failure=failure))).failure)


def test_an_explained_error_says_where_to_read_on_and_keeps_its_traceback_in_a_file(executor, tmp_path):
    log = tmp_path / "run" / "failure.log"
    text = failure_text(of_rank(TooManySpoons("9 spoons")), executor, EndNotes(log))
    head = "[actor rank 1] update failed at step 3: TooManySpoons: 9 spoons"
    assert text == f"{head}\nRead on in docs/spoons.md. megarl's own traceback is in {log}."
    first = log.read_text()
    assert first.splitlines()[0].endswith(head) and "Traceback (most recent call last):" in first
    text = driver_error_text(raised(TooManySpoons("8 spoons")), executor, EndNotes(log))
    assert text.startswith("[driver] failed at step 3: TooManySpoons: 8 spoons\nRead on in ")
    assert log.read_text().startswith(first) and "8 spoons" in log.read_text()  # a restart's comes behind it


@pytest.mark.parametrize("error", [TooManySpoons("9"), KeyError("loss")])
def test_every_failure_ends_with_the_command_that_shows_its_samples(executor, tmp_path, error):
    log, there = tmp_path / "failure.log", EndNotes(how_to_see_samples=lambda: "megarl show 'a b' --failed")
    wanted = "\nTo see what the model said in this step: megarl show 'a b' --failed"
    nothing = EndNotes(log, how_to_see_samples=lambda: None)
    for read, failure in (
        (failure_text, of_rank(error)),
        (failure_text, RuntimeError("a rank died")),
        (driver_error_text, raised(error)),
    ):
        assert read(failure, executor, there).endswith(wanted)
        assert "what the model said" not in read(failure, executor, nothing)


@pytest.mark.parametrize("read", [failure_text, driver_error_text])
def test_the_environment_shows_all_tracebacks(executor, tmp_path, monkeypatch, read):
    monkeypatch.setenv("MEGARL_TRACEBACK", "1")
    error = of_rank(TooManySpoons("9")) if read is failure_text else raised(TooManySpoons("9"))
    text = read(error, executor, EndNotes(tmp_path / "failure.log"))
    assert "Traceback (most recent call last):" in text and text.endswith("\nRead on in docs/spoons.md.")
    assert not any(tmp_path.iterdir())


def test_without_a_step_or_a_writable_file_the_environment_variable_is_named(executor, tmp_path):
    hint = "MEGARL_TRACEBACK=1 in the environment shows megarl's own traceback."
    error = raised(TooManySpoons("9"))
    (tmp_path / "file").touch()
    for log in (None, tmp_path / "file" / "failure.log"):
        assert driver_error_text(error, executor, EndNotes(log)).endswith(hint)
    executor.label = None
    assert driver_error_text(error, executor, EndNotes(tmp_path / "new" / "failure.log")).endswith(hint)
    assert driver_error_text(error, None, EndNotes(tmp_path / "new" / "failure.log")).endswith(hint)
    assert not (tmp_path / "new").exists()


def test_an_unexpected_error_keeps_its_traceback(executor, tmp_path):
    notes = EndNotes(tmp_path / "failure.log")
    for text in (
        failure_text(of_rank(KeyError("loss")), executor, notes),
        driver_error_text(raised(KeyError("loss")), executor, notes),
    ):
        assert " failed at step 3: KeyError: 'loss'\nTraceback (most recent call last):" in text
    assert not any(tmp_path.iterdir())


def test_advice_that_cannot_be_worded_does_not_hide_the_message(executor):
    def broken(has_begun: bool) -> str:
        raise OSError("the disk is gone")

    assert EndNotes(how_to_resume=broken).after_signal(executor) == ""
    assert EndNotes(how_to_resume=str).after_signal(executor) == "\nTrue"
    assert EndNotes(how_to_resume=str).after_signal(None) == "\nFalse"


def test_every_error_names_a_section_that_exists():
    root = Path(__file__).parents[2]
    sources = [path.read_text() for path in (root / "megarl").rglob("*.py")]
    named = {name for source in sources for name in re.findall(r'read_on(?:: .*)? = "(.+)"', source)}
    assert len(named) > 5
    for page, _, section in (name.partition(", section ") for name in named):
        assert re.search(rf"^## {section}$" if section else "^# ", (root / page).read_text(), re.M), page
