"""The reward that examples/calculator_agent.py prints, as a reward function."""


def reward(data_source, solution_str, ground_truth, extra_info):
    assert extra_info["split"] in ("train", "test")
    return float("####" in solution_str and solution_str.split("####")[-1].strip() == ground_truth) or (
        len(solution_str) / 1000
    )
