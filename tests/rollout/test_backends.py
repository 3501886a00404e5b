"""Both backends give the same responses on a CPU: the same tokens, log-probs up to rounding.

pytest tests/rollout/test_backends.py -m nightly -s"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import succeed
from tests.rollout.run_backends import COUNT, WAYS


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_same_keys_draw_the_same_tokens(tmp_path):
    """By the quickstart's model. A tie within rounding may go the other way, in one of a thousand
    responses."""
    from sums.files import make_sums

    make_sums(tmp_path, seed=0)
    script, report = Path(__file__).with_name("run_backends.py"), tmp_path / "report.json"
    succeed(script, tmp_path / "model", report, timeout=280, preloaded=True)
    told = json.loads(report.read_text())
    print(told)
    for way in WAYS:
        assert told[way]["equal"] >= 0.999 * COUNT, told
        assert told[way]["same_ends"] == told[way]["equal"]
        assert told[way]["gap"] <= 1e-4 and told[way]["tokens"] > 10_000
