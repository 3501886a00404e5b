"""A custom reward that an untrained model gets some of: how many of the answer's first characters are
lower-case letters."""


def lower_case(data_source, solution_str, ground_truth, extra_info):
    return sum(c.islower() for c in solution_str[:20]) / 20
