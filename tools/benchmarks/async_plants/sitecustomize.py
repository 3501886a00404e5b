"""Measure how busy the ranks of a job are, and let some of its answers be long (bench_async.py).

Every process imports this at its start, because bench_async.py puts this folder on the PYTHONPATH.

    BUSY=FOLDER           a rank appends "start end" of each call and of each engine step between calls to
                          FOLDER/<rank>, times as of time.time()
    LONG_ANSWERS=0.1      one answer in ten ignores the tokens that end an answer, chosen by the sample"""

import functools
import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "planting"))
from after_import import after_import


def note_times(owner, method):
    """Let a method append its start and its end to the rank's file."""
    original = getattr(owner, method)
    path = Path(os.environ["BUSY"]) / os.environ.get("RANK", "0")
    file = path.open("a", buffering=1)  # a rank ends without a chance to write anything

    @functools.wraps(original)
    def noted(*args, **kwargs):
        start = time.time()
        try:
            return original(*args, **kwargs)
        finally:
            file.write(f"{start} {time.time()}\n")

    setattr(owner, method, noted)


def lengthen_answers(module):
    """Let vLLM's requests of the chosen samples run to their largest length."""
    original = module.SamplingParams.update_from_generation_config

    def lengthened(self, *args, **kwargs):
        key = (self.extra_args or {}).get("megarl_draw_key", self.seed)
        if key is not None and key % 1000 < 1000 * float(os.environ["LONG_ANSWERS"]):
            self.ignore_eos, self.stop_token_ids = True, []
        original(self, *args, **kwargs)

    module.SamplingParams.update_from_generation_config = lengthened


if "BUSY" in os.environ:
    after_import("megarl.runtime.hosting", lambda module: note_times(module.HostedRoles, "run"))
    after_import("megarl.workers.engine_steps", lambda module: note_times(module.EngineSteps, "step"))
if "LONG_ANSWERS" in os.environ:
    after_import("vllm.sampling_params", lengthen_answers)
