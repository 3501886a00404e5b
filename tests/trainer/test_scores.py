"""How many rewards of a step may fail. `pytest tests/trainer/test_scores.py`"""

import pytest

from megarl.trainer.scores import check_failed_rewards, means_of_scores, RewardsFailed
from megarl.trainer.rollout_batch import RolloutBatch


def step_of(*rewards, failure=None, model_scores=None) -> RolloutBatch:
    records = {
        "reward": {
            s: {"sample_id": s, "reward": r} | ({"failure": failure} if r is None and failure else {})
            for s, r in enumerate(rewards)
        }
    }
    if model_scores is not None:
        records["reward_model"] = {
            s: {"sample_id": s, "score": score} for s, score in enumerate(model_scores)
        }
    whole = [
        None
        if None in (records[role][s].get("reward", records[role][s].get("score")) for role in records)
        else 1.0
        for s in range(len(rewards))
    ]
    return RolloutBatch(3, {0: 0}, records=records, rewards=dict(enumerate(whole)))


def test_a_share_may_fail():
    check_failed_rewards(step_of(None, *[1.0] * 9), ["reward"], 0.1)
    check_failed_rewards(step_of(None, None), ["reward"], 1.0)
    check_failed_rewards(step_of(0.0), ["reward"], 0.0)
    check_failed_rewards(RolloutBatch(1, {}), ["reward"], 0.0)


def test_more_end_the_run_with_the_first_reason():
    wanted = (
        r"2 of 10 rewards have failed, and --reward-max-failed-share \(0\.1\) allows 1\. The first: it hung$"
    )
    with pytest.raises(RewardsFailed, match=wanted):
        check_failed_rewards(step_of(None, None, *[1.0] * 8, failure="it hung"), ["reward"], 0.1)


def test_failed_episodes_lead_to_their_page():
    batch = step_of(None, 1.0, failure="it hung")
    with pytest.raises(RewardsFailed) as of_a_reward:
        check_failed_rewards(batch, ["reward"], 0.0)
    batch.records["reward"][0]["cause"] = "timeout"
    with pytest.raises(RewardsFailed) as of_an_episode:
        check_failed_rewards(batch, ["reward"], 0.0)
    assert "Your own reward" in of_a_reward.value.read_on
    assert "When an environment fails" in of_an_episode.value.read_on


def test_an_actor_that_was_asked_for_nothing_has_not_failed():
    batch = step_of(None, None, 1.0, 1.0, failure="it hung")
    batch.records["reward"][0]["cause"] = "silent"
    check_failed_rewards(batch, ["reward"], 0.25)
    with pytest.raises(RewardsFailed, match="1 of 4 .* allows 0. The first: it hung"):
        check_failed_rewards(batch, ["reward"], 0.2)


def test_one_that_gives_no_reason_is_named():
    with pytest.raises(RewardsFailed, match=r"1 of 2 .* The first: reward_model gave none for sample 1$"):
        check_failed_rewards(step_of(1.0, 1.0, model_scores=[0.5, None]), ["reward", "reward_model"], 0.0)


def test_scores_have_means_by_name():
    records = [{"scores": {"b": 1.0, "a": 0.5}}, {"scores": {"a": 0.0}}, {"scores": None}, {"reward": 3.0}]
    assert means_of_scores(records, "score/") == {"score/a": 0.25, "score/b": 1.0}
    assert means_of_scores([{"reward": 1.0}], "score/") == {}
