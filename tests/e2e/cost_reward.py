"""A reward and a cost of a response, by name."""


def letters(data_source, solution_str, ground_truth, extra_info):
    """Share of lower-case letters among the first 20 characters, and as the cost that of vowels."""
    first = solution_str[:20]
    return {
        "scores": {
            "letters": sum(c.islower() for c in first) / 20,
            "cost": sum(c in "aeiou" for c in first) / 5,
        }
    }


def length(data_source, solution_str, ground_truth, extra_info):
    """1 for the right number after "####"; the cost is the number of characters over 20."""
    is_right = solution_str.rpartition("####")[2].strip() == ground_truth
    return {"scores": {"correct": float(is_right), "cost": len(solution_str) / 20}}
