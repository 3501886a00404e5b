"""PPO's advantages and value loss written the long way: Python loops over sequences and tokens, Python's fp64
floats, no code of megarl's.

A sample is a dict: reward (NaN: failed), and lists per response token under old, ref and old_values.
"""

import math


def estimate_kl(d, kind):
    k3 = min(math.exp(-d) - 1 + d, 10)
    return {"k1": d, "abs": abs(d), "k2": d * d / 2, "k3": k3}[kind]


def token_rewards(sample, algorithm, kl_coef):
    rewards = [0.0] * len(sample["old_values"])
    if algorithm.kl_mode == "reward":
        rewards = [
            -kl_coef * estimate_kl(old - ref, algorithm.kl_estimator)
            for old, ref in zip(sample["old"], sample["ref"])
        ]
    rewards[-1] += sample["reward"]
    return rewards


def gae(rewards, values, gamma, gae_lambda):
    """A(t) = sum over n of (gamma lambda)^n delta(t + n): the definition, not the recursion."""
    num_tokens = len(rewards)
    deltas = [
        rewards[t] + (gamma * values[t + 1] if t + 1 < num_tokens else 0) - values[t]
        for t in range(num_tokens)
    ]
    return [
        sum((gamma * gae_lambda) ** n * deltas[t + n] for n in range(num_tokens - t))
        for t in range(num_tokens)
    ]


def variance(numbers, unbiased):
    mean = sum(numbers) / len(numbers)
    return sum((x - mean) ** 2 for x in numbers) / (len(numbers) - unbiased)


def naive_advantages(samples, algorithm, kl_coef):
    """(advantages, returns), lists per sample of lists per token, and the metrics."""
    scored = [not math.isnan(sample["reward"]) for sample in samples]
    alpha, of_critic = algorithm.gae_lambda_alpha, algorithm.critic_gae_lambda

    def estimates(lambda_of):
        return [
            gae(token_rewards(s, algorithm, kl_coef), s["old_values"], algorithm.gamma, lambda_of(s))
            for s in samples
        ]

    advantages = estimates(
        lambda s: algorithm.gae_lambda if alpha is None else max(1 - 1 / (alpha * len(s["old_values"])), 0)
    )
    errors = estimates(lambda s: algorithm.gae_lambda if of_critic is None else of_critic)
    returns = [
        [a + v for a, v in zip(row, s["old_values"])] if ok else [math.nan] * len(row)
        for row, s, ok in zip(errors, samples, scored)
    ]
    flat = [a for row, ok in zip(advantages, scored) if ok for a in row]
    flat_errors = [a for row, ok in zip(errors, scored) if ok for a in row]
    flat_returns = [r for row, ok in zip(returns, scored) if ok for r in row]
    flat_values = [v for s, ok in zip(samples, scored) if ok for v in s["old_values"]]
    metrics = {
        "reward/failed": len(samples) - sum(scored),
        "critic/value_mean": sum(flat_values) / len(flat),
        "critic/return_mean": sum(flat_returns) / len(flat),
        "critic/explained_variance": 1 - variance(flat_errors, False) / variance(flat_returns, False),
    }
    if algorithm.whiten_advantages:
        mean, std = sum(flat) / len(flat), math.sqrt(variance(flat, True))
        advantages = [[(a - mean) / std for a in row] for row in advantages]
    advantages = [row if ok else [0.0] * len(row) for row, ok in zip(advantages, scored)]
    metrics["advantage/max_abs"] = max(abs(a) for row in advantages for a in row)
    if algorithm.kl_mode != "none":
        kls = [
            estimate_kl(old - ref, algorithm.kl_estimator)
            for s, ok in zip(samples, scored)
            if ok
            for old, ref in zip(s["old"], s["ref"])
        ]
        metrics |= {"kl/per_response": sum(kls) / sum(scored), "kl/coef": kl_coef}
    return advantages, returns, metrics


def naive_value_loss(samples, returns, algorithm, max_response_length):
    """(loss, gradient per token, metrics) of the whole mini-batch, of samples with a reward; a sample has
    `values` now."""
    num_tokens, eps = sum(len(s["values"]) for s in samples), algorithm.value_clip_eps
    total, gradient, num_clipped = 0.0, [], 0
    for sample, targets in zip(samples, returns):
        weight = {
            "token-mean": 1 / num_tokens,
            "seq-mean-token-mean": 1 / len(samples) / len(targets),
            "seq-mean-token-sum": 1 / len(samples),
            "dr-grpo": 1 / len(samples) / max_response_length,
        }[algorithm.loss_aggregation]
        for value, old, target in zip(sample["values"], sample["old_values"], targets):
            loss, slope = (value - target) ** 2 / 2, value - target
            if eps is not None and abs(value - old) > eps:
                held = old + eps if value > old else old - eps
                if (held - target) ** 2 / 2 > loss:
                    loss, slope, num_clipped = (held - target) ** 2 / 2, 0.0, num_clipped + 1
            total += weight * loss
            gradient.append(weight * slope)
    return total, gradient, {"critic/loss": total, "critic/clip_fraction": num_clipped / num_tokens}
