"""An exception that vLLM logs in another process arrives at the rank with its traceback, and is not printed
beside it."""

from __future__ import annotations

import traceback

import pytest

from megarl.rollout.engine_errors import ERRORS, EngineErrors, EngineFailed
from tests.launch import run

ENGINE = """
import logging, sys
from megarl.rollout.engine_errors import tell_owner
logger = logging.getLogger("vllm")
logger.addHandler(logging.StreamHandler(sys.stdout))
tell_owner(), tell_owner()
try:
    [][3]
except IndexError:
    logging.getLogger("vllm.v1.engine.core").exception("a fatal error")
logger.error("told as before")
"""


def test_what_an_engine_logs_of_an_exception_is_what_its_rank_raises():
    errors, own = EngineErrors(), ConnectionError("vLLM's own word")
    assert errors.explained(own, 1) is own
    done = run("-c", ENGINE, environment={ERRORS: errors.path}, timeout=50)
    assert (done.stdout, done.stderr) == ("told as before\n", "")
    raised = errors.explained(own, 1)
    assert (
        isinstance(raised, EngineFailed)
        and str(raised) == "[rank 1] vLLM's engine failed: IndexError: list index out of range"
    )
    assert 'File "<string>", line 8, in <module>\nIndexError' in "".join(traceback.format_exception(raised))
    assert errors.explained(own, 1) is own  # said once


ENDS = """
import logging, multiprocessing, sys
from megarl.rollout.engine_errors import tell_owner
def engine():
    tell_owner()
    try:
        [][3]
    except IndexError:
        logging.getLogger("vllm.v1.engine.core").exception(sys.argv[1])
        raise
process = multiprocessing.get_context("fork").Process(target=engine)
process.start()
process.join()
sys.exit(process.exitcode)
"""


@pytest.mark.parametrize(
    "logged, printed",
    [("EngineCore encountered a fatal error.", 0), ("EngineCore failed to start.", 0), ("not its end", 1)],
)
def test_an_engine_that_ends_with_what_it_has_told_prints_it_not_again(logged, printed):
    errors = EngineErrors()
    done = run("-c", ENDS, logged, environment={ERRORS: errors.path}, timeout=50)
    assert done.returncode == 1 and done.stderr.count("Traceback") == printed, done.stderr
    assert isinstance(errors.explained(ConnectionError(), 0), EngineFailed)
