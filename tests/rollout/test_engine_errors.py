"""An exception that vLLM logs in another process arrives at the rank with its traceback, and is not printed
beside it."""

from __future__ import annotations

import traceback

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
