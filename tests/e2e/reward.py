"""A custom reward that an untrained model gets some of: how many of the answer's first characters are
lower-case letters."""

import zlib


def often_equal(data_source, solution_str, ground_truth, extra_info):
    """All samples of two of three prompts get 1, those of the others 0 or 1 by their text."""
    if zlib.crc32(str(ground_truth).encode()) % 3:
        return 1.0
    return float(zlib.crc32(solution_str.encode()) % 2)


def never_equal(data_source, solution_str, ground_truth, extra_info):
    """Another reward for each text."""
    return zlib.crc32(solution_str.encode()) / 2**32


def lower_case(data_source, solution_str, ground_truth, extra_info):
    return sum(c.islower() for c in solution_str[:20]) / 20


def always_equal(data_source, solution_str, ground_truth, extra_info):
    """1 for every answer."""
    return 1.0
