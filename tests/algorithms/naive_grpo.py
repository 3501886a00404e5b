"""GRPO written the long way, to compare with: Python loops over sequences and tokens, fp64 scalars, autograd,
no code of megarl's.

A sample is a dict: group, reward, and lists of fp64 scalars per response token under log_probs (requiring
gradients), entropy (likewise), old, rollout and ref.
"""

import math

import torch


def estimate_kl(log_prob, ref, kind):
    d = log_prob - ref
    match kind:
        case "k1":
            return d
        case "abs":
            return d if d > 0 else -d
        case "k2":
            return d * d / 2
        case "k3":
            k3 = torch.exp(-d) - 1 + d
            return k3 if k3 < 10 else torch.tensor(10.0, dtype=torch.float64)


def kl_loss(algorithm, log_prob, ref):
    if not algorithm.kl_straight_through:
        return estimate_kl(log_prob, ref, algorithm.kl_estimator)
    shown, pulls = (
        estimate_kl(log_prob.detach(), ref, algorithm.kl_estimator),
        estimate_kl(log_prob, ref, "k2"),
    )
    return shown + pulls - pulls.detach()


def naive_advantages(samples, algorithm):
    rewards = []
    for sample in samples:
        reward = sample["reward"]
        if algorithm.kl_mode == "reward":
            for old, ref in zip(sample["old"], sample["ref"]):
                reward = reward - algorithm.kl_coef * float(estimate_kl(old, ref, algorithm.kl_estimator))
        rewards.append(reward)
    advantages = []
    for sample, reward in zip(samples, rewards):
        group = [r for s, r in zip(samples, rewards) if s["group"] == sample["group"] and not math.isnan(r)]
        if math.isnan(reward) or len(group) < 2:
            advantages.append(0.0)
            continue
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        advantages.append((reward - mean) / (std + 1e-4 if algorithm.normalize_advantages_by_std else 1))
    return advantages


def token_loss(algorithm, advantage, log_prob, old, rollout, ref, entropy):
    """(loss of a token, whether clipped, whether dual-clipped)."""
    ratio = torch.exp(log_prob - old)
    low, high = 1 - algorithm.clip_eps_low, 1 + algorithm.clip_eps_high
    clipped_ratio = (
        ratio if low <= ratio <= high else torch.tensor(low if ratio < low else high, dtype=torch.float64)
    )
    if algorithm.policy_loss == "cispo":
        clipped = not low <= ratio <= high
        loss = -advantage * clipped_ratio.detach() * log_prob
    else:
        clipped = bool(-advantage * clipped_ratio > -advantage * ratio)
        loss = -advantage * (clipped_ratio if clipped else ratio)
    dual_clipped = (
        algorithm.clip_ratio_c is not None
        and advantage < 0
        and bool(loss > -advantage * algorithm.clip_ratio_c)
    )
    if dual_clipped:
        loss = torch.tensor(-advantage * algorithm.clip_ratio_c, dtype=torch.float64)
    if algorithm.tis_clip is not None:
        loss = loss * min(math.exp(float(old - rollout)), algorithm.tis_clip)
    if algorithm.kl_mode == "loss":
        loss = loss + algorithm.kl_coef * kl_loss(algorithm, log_prob, ref)
    if algorithm.entropy_coef != 0:
        loss = loss - algorithm.entropy_coef * entropy
    return loss, clipped, dual_clipped


def naive_grpo(samples, algorithm, max_response_length):
    """(loss, metrics) of the whole mini-batch, whose failed samples are as if they had never been."""
    advantages = naive_advantages(samples, algorithm)
    samples, advantages = zip(*((s, a) for s, a in zip(samples, advantages) if not math.isnan(s["reward"])))
    num_tokens = sum(len(sample["old"]) for sample in samples)
    total, deviation = torch.zeros((), dtype=torch.float64), 0.0
    sums = dict.fromkeys(
        ["clip_fraction", "dual_clip_fraction", "kl", "entropy", "ref_kl", "tis_weight"], 0.0
    )
    for sample, advantage in zip(samples, advantages):
        length = len(sample["old"])
        for t in range(length):
            token = [sample[name][t] for name in ("log_probs", "old", "rollout", "ref", "entropy")]
            loss, clipped, dual_clipped = token_loss(algorithm, advantage, *token)
            match algorithm.loss_aggregation:
                case "token-mean":
                    total = total + loss / num_tokens
                case "seq-mean-token-mean":
                    total = total + loss / length / len(samples)
                case "seq-mean-token-sum":
                    total = total + loss / len(samples)
                case "dr-grpo":
                    total = total + loss / max_response_length / len(samples)
            log_prob, old, rollout, _, entropy = (float(value.detach()) for value in token)
            ratio = math.exp(log_prob - old)
            sums["clip_fraction"] += clipped
            sums["dual_clip_fraction"] += dual_clipped
            sums["kl"] += ratio - 1 - math.log(ratio)
            sums["entropy"] += entropy if algorithm.entropy_coef != 0 else -rollout
            sums["ref_kl"] += float(estimate_kl(token[0].detach(), token[3], algorithm.kl_estimator))
            sums["tis_weight"] += min(math.exp(old - rollout), algorithm.tis_clip or 1)
            deviation = max(deviation, abs(ratio - 1))
    if algorithm.kl_mode == "none":
        del sums["ref_kl"]
    if algorithm.tis_clip is None:
        del sums["tis_weight"]
    metrics = {f"policy/{name}": value / num_tokens for name, value in sums.items()}
    return total, metrics | {"policy/loss": float(total.detach()), "policy/ratio_deviation_max": deviation}
