"""A reward function with two scores: whether the sum is right, and how short the response is."""

import re


def reward(data_source, solution_str, ground_truth, extra_info):
    found = re.findall(r"-?\d+", solution_str)
    return {
        "scores": {
            "correct": float(found[-1:] == [ground_truth]),
            "short": max(0.0, 1 - len(solution_str) / 100),
        },
        "pred": found[-1] if found else "",
    }
