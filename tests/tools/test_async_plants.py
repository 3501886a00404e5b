"""The sitecustomize.py of bench_async.py measures when a rank is busy, and lengthens the answers that it is
told to.

pytest tests/tools/test_async_plants.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch import succeed

PLANTS = Path(__file__).resolve().parents[2] / "tools" / "benchmarks" / "async_plants"
BUSY_RANK = """
import time
from megarl.runtime.hosting import HostedRoles
from megarl.runtime.messages import Call, encode_arguments
from megarl.workers.engine_steps import EngineSteps

class Sleeper:
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

class Engine:
    def has_unfinished(self): return True
    def is_held(self): return False
    def step(self): time.sleep(0.02)

roles = HostedRoles({"sleeper": Sleeper()}, rank=3)
roles.run(Call("sleeper", (3,), "sleep", None, encode_arguments("sleeper", "sleep", (0.03,), {})), 0)
time.sleep(0.05)  # idle
steps = EngineSteps()
steps.add(Engine())
steps.agree(False)
steps.step()
"""
SAMPLING = """
import json
from vllm import SamplingParams

lengthened = []
for key in range(4000, 5000, 50):
    params = SamplingParams(max_tokens=8, stop_token_ids=[7], extra_args={"megarl_draw_key": key})
    params.update_from_generation_config({}, 5)
    lengthened.append((key, params.ignore_eos, params.stop_token_ids))
print(json.dumps(lengthened))
"""


def test_busy_intervals_are_calls_and_engine_steps(tmp_path):
    environment = {"PYTHONPATH": str(PLANTS), "BUSY": str(tmp_path), "RANK": "3", "LONG_ANSWERS": None}
    succeed("-c", BUSY_RANK, timeout=120, preloaded=True, environment=environment)
    lines = (tmp_path / "3").read_text().splitlines()
    (call_start, call_end), (step_start, step_end) = (map(float, line.split()) for line in lines)
    assert call_end - call_start >= 0.03 and step_end - step_start >= 0.02
    assert step_start - call_end >= 0.05  # idle


@pytest.mark.parametrize("share", [None, "0.1"])
def test_answers_that_are_long_ignore_their_end(share):
    environment = {"PYTHONPATH": str(PLANTS), "BUSY": None, "LONG_ANSWERS": share}
    told = succeed("-c", SAMPLING, timeout=120, preloaded=True, environment=environment).stdout
    found = json.loads(told.splitlines()[-1])
    assert len(found) == 20
    for key, ignores_eos, stop_tokens in found:
        is_long = share is not None and key % 1000 < 100
        assert ignores_eos == is_long and (stop_tokens == []) == is_long
