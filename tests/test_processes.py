"""What `make test-stress` runs is every test that could depend on time. `pytest tests/test_processes.py`"""

import re

import pytest

from tests.processes import TESTS, kind_of

NO_PROCESSES = ("test_processes.py", "test_no_pickle.py")
"""Files whose text has the words but that start nothing."""
DIRECT = re.compile(
    r"\b(subprocess\.|multiprocessing\.|Popen\(|os\.kill|os\.fork|signal\.SIG|threading\.|RewardPool\()"
)


@pytest.mark.parametrize(
    "test, kind",
    [
        ("runtime/test_shutdown.py::test_what_the_signal_ends_first_is_no_failure", "signals"),
        (
            "runtime/test_local_ranks.py::test_no_rank_outlives_a_loop_that_is_killed",
            "signals",
        ),  # by a fixture of conftest.py
        ("runtime/test_abort.py::test_all_ranks_abort_before_the_same_step", "deadlines"),
        (
            "e2e/test_grpo_job.py::test_three_steps_run_and_record_everything",
            "children",
        ),  # by a fixture of conftest.py that calls another file
        ("rewards/test_pool.py::test_a_reward_that_fails_costs_one_reward", "children"),
        ("kernels/test_gae.py::test_against_the_loop", None),
        (
            "trainer/test_restarts.py::test_it_goes_on_in_its_own_folder",
            None,
        ),  # has its own `job`, unlike conftest.py's
    ],
)
def test_the_kind_of_a_test(test, kind):
    file, name = test.split("::")
    assert f"def {name}(" in (TESTS / file).read_text(), "renamed: name another test here"
    assert kind_of(TESTS / file, name) == kind


def test_no_file_that_starts_processes_or_sends_signals_is_missed():
    """An independent and coarser look, by the text alone."""
    files = {path: path.read_text() for path in TESTS.rglob("test_*.py") if path.name not in NO_PROCESSES}
    suspicious = {path for path, text in files.items() if DIRECT.search(text)}
    marked = {
        path
        for path, text in files.items()
        if any(kind_of(path, name) for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    }
    assert len(suspicious) > 30 and not suspicious - marked, sorted(map(str, suspicious - marked))
