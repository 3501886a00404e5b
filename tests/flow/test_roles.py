"""Role classes: what they declare, and their handles. `pytest tests/flow/test_roles.py`"""

from collections.abc import Mapping
from pathlib import Path
from typing import get_type_hints

import pytest

from megarl.flow import Actor, Critic, Data, Reward, Role, Roles, SymbolicRole, method, role_class
from megarl.flow.columns import COLUMNS, base, is_state
from megarl.flow.role import ROLE_CLASSES, declaration, methods_of, writer_of
from megarl.packing import MiniBatch, Sample
from tests.launch import run, succeed

ROOT = Path(__file__).resolve().parents[2]


class Recorder:
    """A caller that keeps the calls and returns their number."""

    def __init__(self) -> None:
        self.calls = []

    def call(self, role, method, /, *args, **kwargs):
        self.calls.append((None, role, method, args, kwargs))
        return len(self.calls)

    def call_on(self, ranks, role, method, /, *args, **kwargs):
        self.calls.append(([*ranks], role, method, args, kwargs))
        return len(self.calls)


def test_a_handle_calls_the_method_on_all_ranks_or_on_some():
    recorder = Recorder()
    actor, data = Actor(recorder, "actor_2"), Data(recorder, "data")
    assert [actor.update(kl_coef=0.5), actor.update(0.1), actor.call("anything", 1, a=2)] == [1, 2, 3]
    data.on([0, 3]).exchange(["values"], "critic", "actor")
    assert recorder.calls == [
        (None, "actor_2", "update", (), {"kl_coef": 0.5}),
        (None, "actor_2", "update", (0.1,), {}),
        (None, "actor_2", "anything", (1,), {"a": 2}),
        ([0, 3], "data", "exchange", (["values"], "critic", "actor"), {}),
    ]


def test_a_wrong_call_is_refused_before_any_rank_is_called():
    recorder = Recorder()
    actor = Actor(recorder, "actor")
    with pytest.raises(TypeError, match=r"actor.update\(\): got an unexpected keyword argument 'kl'"):
        actor.update(kl=1.0)
    with pytest.raises(TypeError, match=r"actor.export_hf\(\): missing a required argument: 'folder'"):
        actor.export_hf()
    with pytest.raises(
        AttributeError, match=r"actor.log_prob is not declared in class Actor. Did you mean log_probs\?"
    ):
        actor.log_prob()
    assert recorder.calls == []


def test_roles_of_a_job_are_found_by_name():
    roles = Roles(Recorder(), ["actor", "critic_2", "judge_of_others"])
    assert type(roles.actor) is Actor and type(roles.critic_2) is Critic
    assert roles.critic_2.name == "critic_2"
    assert type(roles.judge_of_others) is Role
    assert [*roles] == dir(roles) == ["actor", "critic_2", "judge_of_others"] and "critic" not in roles
    with pytest.raises(
        AttributeError, match=r"role \(critic\): this job has actor, critic_2, judge_of_others"
    ):
        roles.critic


def test_annotations_resolve_without_torch():
    assert get_type_hints(Actor.update.function) == {
        "kl_coef": float,
        "sft_visits": Mapping[int, int] | None,
        "sft_mini_batches": list[MiniBatch] | None,
        "return": dict[str, float],
    }
    assert get_type_hints(Data.distribute.function)["mini_batches"] == list[MiniBatch]
    code = (
        "import sys, typing; from megarl.flow.role import ROLE_CLASSES, methods_of\n"
        "hints = [typing.get_type_hints(m.function) for c in ROLE_CLASSES.values() "
        "for m in methods_of(c).values()]\n"
        "assert 'torch' not in sys.modules and len(hints) > 30 and all('return' in h for h in hints)"
    )
    succeed("-c", code, timeout=60)
    assert get_type_hints(role_class("rollout").generate.function)["return"] == list[Sample]


def test_declared_columns_are_in_the_table_and_each_computed_one_has_a_writer():
    for cls in ROLE_CLASSES.values():
        for declared in methods_of(cls).values() if cls.__module__.startswith("megarl.") else ():
            for column in (*(declared.reads or ()), *(declared.writes or ())):
                assert is_state(column) or base(column) in COLUMNS, (cls.kind, declared.name, column)
    writers = {
        name: writer_of("tokens" if column.is_sampled else name, "_2") for name, column in COLUMNS.items()
    }
    assert writers == {
        "tokens": "rollout_2.generate",
        "response_mask": "rollout_2.generate",
        "rollout_log_probs": "rollout_2.generate",
        "weight_versions": "rollout_2.generate",
        "old_log_probs": "actor_2.log_probs",
        "old_scores": "actor_2.scores",
        "ref_log_probs": "reference_2.log_probs",
        "teacher_hidden": "reference_2.hidden_states",
        "teacher_top_k": "reference_2.top_tokens",
        "values": "critic_2.values",
        "cost_values": "cost_critic_2.values",
        "advantages": "actor_2.advantages",
        "returns": "actor_2.advantages",
        "cost_returns": "actor_2.advantages",
        "correction_weights": "actor_2.advantages",
        "selected_tokens": "actor_2.advantages",
        "ce_weights": "actor_2.advantages",
        "behavior_weights": "actor_2.advantages",
        "routed_experts": "rollout_2.generate",
        "lengths": "rollout_2.generate",
        "rewards": "reward_2.score",
        "scores": "reward_model_2.score",
    }
    assert writer_of("nobody") is None


def test_what_the_step_does_with_each_call():
    of_job = [cls for cls in ROLE_CLASSES.values() if cls.__module__ == "megarl.flow.job_roles"]
    declared = {f"{cls.kind}.{name}": m for cls in of_job for name, m in methods_of(cls).items()}
    assert {call for call, m in declared.items() if m.commits} == {
        "actor.update",
        "critic.update",
        "cost_critic.update",
    }
    assert {call for call, m in declared.items() if m.reports} == {
        "rollout.sync",
        "reference.log_probs",
        "critic.update",
        "cost_critic.update",
        "actor.log_probs",
        "actor.advantages",
        "actor.update",
        "data.distribute",
        "data.exchange",
    }
    assert {call: m.phase for call, m in declared.items() if m.phase != "other"} == {
        "rollout.catch_up": "rollout",
        "rollout.generate": "rollout",
        "rollout.sample_canaries": "rollout",
        "rollout.sync": "reshard",
        "reward.score": "reward",
        "reward_model.score": "reward_model",
        "reward_model.score_groups": "reward_model_early",
        "reference.log_probs": "ref_log_probs",
        "reference.hidden_states": "ref_log_probs",
        "reference.top_tokens": "ref_log_probs",
        "critic.values": "values",
        "critic.update": "critic_update",
        "cost_critic.values": "values",
        "cost_critic.update": "critic_update",
        "actor.log_probs": "log_probs",
        "actor.scores": "log_probs",
        "actor.update": "update",
    }
    assert declaration("critic_2", "update") is Critic.update
    assert declaration("critic", "no") is declaration("nobody", "update") is None


class Inherited(Reward, kind="kind_of_reward"):
    @method(reads=["tokens"], writes=["opinion"])
    def look(self, closely: bool = False) -> None: ...


def test_a_role_class_of_ones_own():
    assert methods_of(Inherited).keys() == {"look", "setup", "score", "shut_down"}
    assert declaration("kind_of_reward_3", "score") is Reward.score
    assert SymbolicRole("kind_of_reward").look().nodes[0].writes == ("opinion",)
    assert "closely" in str(Inherited(Recorder(), "kind_of_reward").look.__signature__)
    with pytest.raises(TypeError, match=r"kind \(actor\) of .*Other is taken by megarl.flow.job_roles.Actor"):

        class Other(Role, kind="actor"): ...

    with pytest.raises(TypeError, match=r"kind \(numbered_2\) must not end in a number"):

        class Numbered(Role, kind="numbered_2"): ...

    with pytest.raises(TypeError, match=r"Named.name: every handle has a member of this name"):

        class Named(Role, kind="named"):
            @method()
            def name(self) -> str: ...

    assert role_class("numbered") is role_class("named") is Role


USES = """
from megarl.flow import Actor, Caller, Critic, Roles

def use(caller: Caller) -> None:
    roles = Roles(caller, ["actor", "critic"])
    metrics: list[dict[str, float]] = roles.actor.update(kl_coef=0.1).result()
    actor = Actor(caller, "actor_2")
    actor.call("anything", 1)
    Critic(caller, "critic").on([0]).values().done()
    {line}
"""


@pytest.mark.parametrize(
    "line, error",
    [
        ("", None),
        ("roles.actor.log_prob()", '"Actor" has no attribute "log_prob"'),
        ('actor.update("0.1")', 'Argument 1 to "__call__" of "RoleCall" has incompatible type "str"'),
        ("actor.update(kl=0.1)", 'Unexpected keyword argument "kl"'),
        ("number: int = actor.update().first()", 'expression has type "dict[str, float]", variable has type'),
        ("actor.export_hf()", 'Missing positional argument "folder"'),
    ],
)
def test_a_type_checker_finds_a_wrong_call(line, error, tmp_path):
    (tmp_path / "uses.py").write_text(USES.format(line=line))
    files = (
        "--config-file",
        ROOT / "pyproject.toml",
        "--cache-dir",
        ROOT / ".mypy_cache",
        tmp_path / "uses.py",
    )
    done = run("-m", "mypy", *files, folder=ROOT, timeout=120)
    assert (done.returncode == 0) == (error is None), done.stdout + done.stderr
    assert error is None or error in done.stdout and "Found 1 error" in done.stdout
