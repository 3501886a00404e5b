"""The reward of the task. `python reward.py` tries the examples below."""


def reward(data_source, solution_str, ground_truth, extra_info):
    """Return 1 for the right answer, and up to 0.5 for some right letters in the right places.

    Args:
        data_source: the row's column of this name; "" without one.
        solution_str: what the model wrote.
        ground_truth: the row's right answer.
        extra_info: the row's column of this name; {} without one.

    >>> reward("", "tac", "tac", {})
    1.0
    >>> reward("", "taxi", "tac", {})
    0.25
    >>> reward("", "", "tac", {})
    0.0
    """
    if solution_str == ground_truth:
        return 1.0
    num_right = sum(a == b for a, b in zip(solution_str, ground_truth))
    return 0.5 * num_right / max(len(solution_str), len(ground_truth))


if __name__ == "__main__":
    import doctest

    failed, tried = doctest.testmod()
    print(f"{tried - failed} of {tried} examples are right")
    raise SystemExit(failed > 0)
