"""Samples whose sampled tokens have holes between them: their batch, digests, advantages, loss and gradients.

The reference is padded, in float64 and plain PyTorch, and shares no code with megarl. The model is a table of
bigrams, whose gradient shows which token predicts which.

    pytest tests/test_multi_turn_batch.py"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from megarl.algorithms import GRPO, PPO, AdvantageInputs, LossInputs, ValueLossInputs
from megarl.batch import Batch, MicroBatch
from megarl.batch_invariants import check_batch, check_column, digests_of
from megarl.invariants import InvariantError, digest
from megarl.packing import run_lengths

VOCAB, MAX_RESPONSE_LENGTH = 11, 40
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "dr-grpo"]


@dataclass
class Episode:
    """One sample as lists, token by token."""

    tokens: list[int]
    mask: list[bool]
    log_probs: list[float]
    """Of the sampled tokens."""
    reward: float
    group: int

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.mask.index(True)]

    @property
    def response(self) -> list[int]:
        return self.tokens[self.mask.index(True) :]

    @property
    def holes(self) -> list[tuple[int, int]]:
        of_response, found, start = self.mask[self.mask.index(True) :], [], None
        for at, is_sampled in enumerate(of_response):
            if not is_sampled and start is None:
                start = at
            elif is_sampled and start is not None:
                found.append((start, at))
                start = None
        return found


def make_episodes(seed: int, num: int = 6) -> list[Episode]:
    rng, episodes = random.Random(seed), []
    for index in range(num):
        mask = []
        for _ in range(rng.randint(1, 4) if index else 3):
            mask += [False] * rng.randint(1, 4) + [True] * rng.randint(1, 4)
        tokens = [rng.randrange(VOCAB) for _ in mask]
        log_probs = [-rng.random() - 0.1 for _ in range(sum(mask))]
        episodes.append(Episode(tokens, mask, log_probs, rng.choice([0.0, 1.0, -0.5]), index // 3))
    return episodes


def batch_of(episodes: list[Episode]) -> Batch:
    return Batch.from_samples(
        list(range(len(episodes))),
        [episode.prompt for episode in episodes],
        [episode.response for episode in episodes],
        [episode.log_probs for episode in episodes],
        [episode.holes for episode in episodes],
    )


def digest_of(episode: Episode) -> int:
    return digest(episode.prompt, episode.response, episode.holes)


def assert_holds(batch: Batch, episodes: list[Episode]) -> None:
    assert batch.tokens.tolist() == [token for episode in episodes for token in episode.tokens]
    assert batch.response_mask.tolist() == [one for episode in episodes for one in episode.mask]
    assert batch.lengths.tolist() == [len(episode.tokens) for episode in episodes]
    assert batch.response_lengths.tolist() == [sum(episode.mask) for episode in episodes]
    told = torch.tensor([value for episode in episodes for value in episode.log_probs])
    assert torch.equal(batch.rollout_log_probs[batch.response_mask], told)
    assert not batch.rollout_log_probs[~batch.response_mask].any()


@pytest.mark.parametrize("seed", range(5))
def test_holes_survive_packing_selecting_and_concatenating(seed):
    episodes = make_episodes(seed)
    batch = batch_of(episodes)
    assert_holds(batch, episodes)
    rows = [3, 0, 5]
    assert_holds(batch.select(rows), [episodes[row] for row in rows])
    assert_holds(Batch.cat([batch.select([4]), batch.select([1, 2])]), [episodes[row] for row in (4, 1, 2)])
    check_batch(batch, {row: digest_of(episode) for row, episode in enumerate(episodes)}, VOCAB)
    check_column(batch, "rollout_log_probs")


def test_the_digest_says_where_holes_are():
    """A digest over prompt and response tokens alone cannot tell these two apart."""
    one = Batch.from_samples([0], [[5]], [[6, 7, 8]], holes=[[(1, 2)]])
    other = Batch.from_samples([0], [[5, 7]], [[6, 8]])
    assert one.response_mask.tolist() == [False, True, False, True]
    told = [digests_of(batch, ["tokens"])["tokens"][0] for batch in (one, other)]
    assert told == [digest([5], [6, 7, 8], [(1, 2)]), digest([5, 7], [6, 8])] and told[0] != told[1]
    with pytest.raises(InvariantError, match="its tokens or its mask are not those that the engine made"):
        check_batch(one, {0: told[1]}, VOCAB)


def test_every_place_of_the_holes_has_another_digest():
    """All masks over the same tokens that begin with the prompt, also those that end in the environment's
    tokens, which no engine makes."""
    tokens, found = [1, 1, 1, 1, 1, 1], {}
    for number in range(1, 2 ** (len(tokens) - 1)):
        mask = [False, *(bool(number >> at & 1) for at in range(len(tokens) - 1))]
        batch = Batch.from_samples([0], [tokens[:1]], [tokens[1:]])
        batch.response_mask = torch.tensor(mask)
        found.setdefault(digests_of(batch, ["tokens"])["tokens"][0], []).append(mask)
    assert all(len(masks) == 1 for masks in found.values())


def test_a_sample_without_holes_has_the_digest_that_it_had():
    """Numbers of earlier versions: logs and checkpoints hold them."""
    assert digest([5, 6], [7]) == 1843211928
    assert digest([], [1, 2, 3]) == 734760327
    batch = Batch.from_samples([4, 9], [[5, 6], [1]], [[7], [2, 2]])
    assert digests_of(batch, ["tokens"])["tokens"] == {4: 1843211928, 9: digest([1], [2, 2])}


def test_run_lengths_begin_with_the_prompt_and_end_with_sampled_tokens():
    assert run_lengths(3, 4, ()) == [3, 4]
    assert run_lengths(3, 9, [(2, 4), (5, 8)]) == [3, 2, 2, 1, 3, 1]


def policy(table: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the log-prob of each sampled token, at the position that predicts it."""
    micro = MicroBatch.of(batch)
    logits = table[batch.tokens[micro.predict_positions]]
    return logits.log_softmax(-1).gather(1, micro.targets[:, None])[:, 0]


def padded(episodes: list[Episode]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(episode.tokens) for episode in episodes)
    tokens = torch.zeros(len(episodes), longest, dtype=torch.int64)
    mask = torch.zeros(len(episodes), longest, dtype=torch.bool)
    for row, episode in enumerate(episodes):
        tokens[row, : len(episode.tokens)] = torch.tensor(episode.tokens)
        mask[row, : len(episode.tokens)] = torch.tensor(episode.mask)
    return tokens, mask


def reference_log_probs(table: torch.Tensor, episodes: list[Episode]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([B, L - 1] log-prob of the next token, [B, L - 1] whether it was sampled) in float64."""
    tokens, mask = padded(episodes)
    log_probs = table[tokens[:, :-1]].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    return log_probs, mask[:, 1:]


def aggregated(losses: torch.Tensor, mask: torch.Tensor, how: str) -> torch.Tensor:
    losses, lengths = losses * mask, mask.sum(1)
    match how:
        case "token-mean":
            return losses.sum() / mask.sum()
        case "seq-mean-token-mean":
            return (losses.sum(1) / lengths).mean()
        case "seq-mean-token-sum":
            return losses.sum(1).mean()
        case "dr-grpo":
            return (losses.sum(1) / MAX_RESPONSE_LENGTH).mean()


def tables(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights now and before, in float64."""
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    return before + 0.3 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64), before


def group_advantages(episodes: list[Episode]) -> list[float]:
    found = []
    for episode in episodes:
        rewards = [one.reward for one in episodes if one.group == episode.group]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        found.append((episode.reward - mean) / (std + 1e-4))
    return found


def check_against_padded(
    loss: torch.Tensor,
    table: torch.Tensor,
    now: torch.Tensor,
    before: torch.Tensor,
    episodes: list[Episode],
    aggregation: str,
) -> None:
    """Compare a loss and its gradient with those of PPO's clipped loss over whole, padded episodes in float64."""
    wanted_table = now.clone().requires_grad_()
    log_probs, mask = reference_log_probs(wanted_table, episodes)
    ratio = (log_probs - reference_log_probs(before, episodes)[0]).exp()
    advantages = torch.tensor(group_advantages(episodes), dtype=torch.float64)[:, None]
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    wanted = aggregated(losses, mask, aggregation)
    wanted.backward()
    assert wanted_table.grad.abs().max() > 1e-3
    assert loss.item() == pytest.approx(wanted.item(), abs=3e-6 * max(1, losses[mask].abs().sum().item()))
    torch.testing.assert_close(
        table.grad.double(), wanted_table.grad, rtol=0, atol=4e-6 * float(wanted_table.grad.abs().max())
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradients_equal_a_padded_reference(aggregation, seed):
    episodes, algorithm = make_episodes(seed), GRPO(loss_aggregation=aggregation)
    batch, (now, before) = batch_of(episodes), tables(seed)
    table = now.float().requires_grad_()
    old = policy(before.float(), batch)
    columns, _ = algorithm.compute_advantages(advantage_inputs(batch, episodes, old, None))
    # through the batch, as on a rank
    batch.set_column("advantages", batch.scatter(columns["advantages"]))
    micro = MicroBatch.of(batch)
    loss, _ = algorithm.loss(
        LossInputs(
            log_probs=policy(table, batch),
            entropy=None,
            old_log_probs=old,
            rollout_log_probs=micro.column("rollout_log_probs"),
            ref_log_probs=None,
            advantages=micro.column("advantages"),
            response_lengths=micro.response_length_of_token,
            num_tokens=int(batch.response_lengths.sum()),
            num_sequences=len(batch),
            max_response_length=MAX_RESPONSE_LENGTH,
            kl_coef=0.0,
        )
    )
    loss.backward()
    check_against_padded(loss, table, now, before, episodes, aggregation)


def advantage_inputs(
    batch: Batch, episodes: list[Episode], old: torch.Tensor, values: torch.Tensor | None
) -> AdvantageInputs:
    return AdvantageInputs(
        rewards=torch.tensor([episode.reward for episode in episodes]),
        group_ids=torch.tensor([episode.group for episode in episodes]),
        rows=torch.arange(len(episodes)),
        response_lengths=batch.response_lengths,
        kl_coef=0.0,
        sum_over_ranks=lambda total: total,
        old_log_probs=old,
        values=values,
    )


def reference_gae(values: torch.Tensor, mask: torch.Tensor, rewards: list[float], algorithm: PPO):
    """Return ([B, L] advantages, [B, L] returns), by a loop from the last token that skips the environment's
    tokens: the next state of a sampled token is that of the next sampled token."""
    advantages = torch.zeros_like(values)
    for row in range(len(values)):
        next_value, advantage, reward = 0.0, 0.0, rewards[row]
        for at in reversed(range(values.shape[1])):
            if not mask[row, at]:
                continue
            delta = reward + algorithm.gamma * next_value - float(values[row, at])
            advantage = delta + algorithm.gamma * algorithm.gae_lambda * advantage
            advantages[row, at] = advantage
            next_value, reward = float(values[row, at]), 0.0
    return advantages, advantages + values


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("gamma, gae_lambda", [(0.9, 0.7), (1.0, 0.95)])
def test_gae_and_the_value_loss_equal_a_padded_reference(gamma, gae_lambda, aggregation):
    episodes = make_episodes(7)
    algorithm = PPO(gamma=gamma, gae_lambda=gae_lambda, whiten_advantages=False, loss_aggregation=aggregation)
    batch = batch_of(episodes)
    tokens, mask = padded(episodes)
    generator = torch.Generator().manual_seed(1)
    before, now = torch.randn(2, VOCAB, generator=generator, dtype=torch.float64)
    predicting = MicroBatch.of(batch).predict_positions
    old_values = before.float()[batch.tokens[predicting]]
    columns, _ = algorithm.compute_advantages(
        advantage_inputs(batch, episodes, policy(tables(7)[1].float(), batch), old_values)
    )
    wanted_values, sampled = before[tokens[:, :-1]], mask[:, 1:]
    rewards = [episode.reward for episode in episodes]
    advantages, returns = reference_gae(wanted_values, sampled, rewards, algorithm)
    for name, wanted in (("advantages", advantages), ("returns", returns)):
        torch.testing.assert_close(
            columns[name].double(), wanted[sampled], rtol=0, atol=4e-6 * float(wanted.abs().max())
        )
    critic = now.float().requires_grad_()
    loss, _ = algorithm.value_loss(
        ValueLossInputs(
            values=critic[batch.tokens[predicting]],
            old_values=old_values,
            returns=columns["returns"],
            response_lengths=MicroBatch.of(batch).response_length_of_token,
            num_tokens=int(batch.response_lengths.sum()),
            num_sequences=len(batch),
            max_response_length=MAX_RESPONSE_LENGTH,
        )
    )
    loss.backward()
    wanted_critic = now.clone().requires_grad_()
    values = wanted_critic[tokens[:, :-1]]
    clipped = wanted_values + (values - wanted_values).clamp(
        -algorithm.value_clip_eps, algorithm.value_clip_eps
    )
    losses = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2
    wanted = aggregated(losses, sampled, aggregation)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=4e-6)
    torch.testing.assert_close(
        critic.grad.double(), wanted_critic.grad, rtol=0, atol=4e-6 * float(wanted_critic.grad.abs().max())
    )


def split(episode: Episode, rng: random.Random) -> list[Episode]:
    """Return the samples that an episode becomes if some of its turns were branches. A further branch has the
    beginning of the episode as context, and the last turn before it ends the sample before it."""
    parts, start = [], 0
    ends = [at for at in range(1, len(episode.mask)) if episode.mask[at - 1] and not episode.mask[at]]
    for cut in [*(at for at in ends if rng.random() < 0.6), len(episode.mask)]:
        own = [at >= start and is_sampled for at, is_sampled in enumerate(episode.mask[:cut])]
        first, last = (sum(episode.mask[:at]) for at in (start, cut))
        parts.append(
            Episode(episode.tokens[:cut], own, episode.log_probs[first:last], episode.reward, episode.group)
        )
        start = cut
    return parts


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_an_episode_split_into_branches_keeps_its_weight(aggregation, seed):
    """Loss and gradients of branches are those of the whole episodes. The reference pads the episodes and
    knows no branches. The policy of this test depends on the last token alone, so that a turn has the same
    log-probs in every conversation."""
    whole, rng = make_episodes(seed), random.Random(seed)
    of_episodes = [split(episode, rng) for episode in whole]
    parts = [(e, number, part) for e, of_one in enumerate(of_episodes) for number, part in enumerate(of_one)]
    rng.shuffle(parts)  # an episode's samples need not be next to each other
    assert len(parts) > len(whole)
    samples, algorithm = [part for _, _, part in parts], GRPO(loss_aggregation=aggregation)
    batch, (now, before) = batch_of(samples), tables(seed)
    table = now.float().requires_grad_()
    old = policy(before.float(), batch)
    lengths = torch.tensor([sum(episode.mask) for episode in whole])
    rows = torch.tensor([e for e, _, _ in parts])
    inputs = AdvantageInputs(
        rewards=torch.tensor([episode.reward for episode in whole]),
        group_ids=torch.tensor([episode.group for episode in whole]),
        rows=rows,
        branches=torch.tensor([number for _, number, _ in parts]),
        response_lengths=batch.response_lengths,
        sample_lengths=lengths,
        kl_coef=0.0,
        sum_over_ranks=lambda total: total,
        old_log_probs=old,
    )
    columns, metrics = algorithm.compute_advantages(inputs)
    assert metrics["reward/failed"] == 0.0 and sorted(inputs.counted_rows.tolist()) == [*range(len(whole))]
    micro = MicroBatch.of(batch)
    loss, _ = algorithm.loss(
        LossInputs(
            log_probs=policy(table, batch),
            entropy=None,
            old_log_probs=old,
            rollout_log_probs=micro.column("rollout_log_probs"),
            ref_log_probs=None,
            advantages=columns["advantages"],
            response_lengths=lengths[rows].repeat_interleave(batch.response_lengths),
            num_tokens=int(lengths.sum()),
            num_sequences=len(whole),
            max_response_length=MAX_RESPONSE_LENGTH,
            kl_coef=0.0,
        )
    )
    loss.backward()
    check_against_padded(loss, table, now, before, whole, aggregation)
