"""Where the flags of fine-tuning that is mixed into RL are refused. `pytest
tests/config/test_rules_sft.py`"""

import pytest

from megarl.config.rules_layout import Job
from megarl.config.rules_sft import sft_stream
from tests.algorithms.test_listing import load

REFUSED = {
    "--sft-coef 0.5": "--sft-coef (0.5): has no effect without --sft-data",
    "--sft-batch-size 8": "--sft-batch-size (8): has no effect without --sft-data",
    "--algorithm sft --sft-data a.jsonl": "--sft-data (a.jsonl): is mixed into training on samples",
    "--algorithm dpo --sft-data a.jsonl": "this job samples nothing",
    "--sft-data a.jsonl --moe-routing-replay engine": "--moe-routing-replay (engine): replays the experts",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refused(flags):
    (error,) = sft_stream(Job(load(flags), None, None, 1, {}))
    assert REFUSED[flags] in error and ("Try" in error or "Leave" in error)


@pytest.mark.parametrize("flags", ["", "--sft-data a.jsonl b.parquet --sft-coef 0.5 --sft-batch-size 8"])
def test_allowed(flags):
    assert [*sft_stream(Job(load(flags), None, None, 1, {}))] == []
