"""A reward function that forks and returns in the child as well, from the ninth call of a process on: with
one process per rank, in step 2."""

import os
import time
from pathlib import Path

CALLS = []


def lower_case(data_source, solution_str, ground_truth, extra_info):
    CALLS.append(None)
    reward = sum(c.islower() for c in solution_str[:20]) / 20
    if len(CALLS) > 8:
        Path(os.environ["SILENT_HIT"]).touch()
        if os.fork():
            time.sleep(
                0.05
                # the child's reply comes first: without a number it is taken for this one's, and this one's for
                # the next
            )
        else:
            reward = 1.0
    return reward
