"""The graph of a step: both ways to write it give the same one, and every mistake is named. `pytest
tests/flow`"""

from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from megarl.flow import (
    Flow,
    FlowError,
    Node,
    Role,
    SymbolicRole,
    background,
    columns,
    dataflow,
    method,
    symbolic_roles,
)
from megarl.flow.draw import ranges

GAE = SimpleNamespace(
    advantage_reads=("rewards", "old_log_probs", "ref_log_probs?", "values"),
    advantage_writes=("advantages", "returns"),
)
GRPO = SimpleNamespace(
    advantage_reads=("rewards", "old_log_probs", "ref_log_probs?"), advantage_writes=("advantages",)
)
ROLES = "actor critic reference reward"


def mesh(*ranks: int) -> SimpleNamespace:
    return SimpleNamespace(ranks=ranks)


COLOCATED = dict.fromkeys(["actor", "rollout", "critic", "reference", "reward"], mesh(0, 1))


def ppo_flow(present=None) -> Flow:
    """As in DESIGN 4."""
    actor, critic, reference, reward = symbolic_roles(ROLES, present)
    return (
        actor.rollout()
        .join(reward.score)
        .join(reference.log_probs)
        .join(critic.values)
        .advantages(GAE)
        .update(critic)
        .update(actor)
    )


@dataflow
def ppo(actor, critic, reference, reward):
    samples = actor.rollout()
    scores, ref_log_probs, values = (
        reward.score(samples),
        reference.log_probs(samples),
        critic.values(samples),
    )
    advantages = actor.advantages(scores, ref_log_probs, values, algorithm=GAE)
    critic.update(advantages)
    return actor.update(advantages)


def test_both_ways_to_write_a_flow_give_the_same_nodes():
    nodes = [
        Node(
            role="rollout",
            method="generate",
            reads=("weights:actor", "weights:rollout"),
            writes=("tokens", "lengths"),
        ),
        Node(role="reward", method="score", reads=("tokens", "lengths"), writes=("rewards",)),
        Node(role="reference", method="log_probs", reads=("tokens", "lengths"), writes=("ref_log_probs",)),
        Node(
            role="critic", method="values", reads=("tokens", "lengths", "weights:critic"), writes=("values",)
        ),
        Node(
            role="actor",
            method="log_probs",
            reads=("tokens", "lengths", "weights:actor"),
            writes=("old_log_probs",),
        ),
        Node(
            role="actor",
            method="advantages",
            reads=("rewards", "old_log_probs", "ref_log_probs", "values"),
            writes=("advantages", "returns"),
        ),
        Node(
            role="critic", method="update", reads=("tokens", "values", "returns"), writes=("weights:critic",)
        ),
        Node(
            role="actor",
            method="update",
            reads=("tokens", "old_log_probs", "ref_log_probs", "advantages"),
            writes=("weights:actor",),
        ),
        Node(role="rollout", method="sync", reads=("weights:actor",), writes=("weights:rollout",)),
    ]
    assert ppo_flow().nodes == tuple(nodes)
    assert ppo_flow() == ppo() == Flow(nodes) != Flow(nodes[:-1])
    ppo_flow().validate(COLOCATED)


def test_both_ways_to_write_a_flow_say_what_an_update_reads_and_writes():
    @dataflow
    def tuned(actor, student):
        rows = actor.receive_rows()
        actor.update(rows, reads=("tokens",))
        student.update(rows, reads=("tokens",), writes=("loss",))

    @dataflow
    def rolled_out(actor):
        actor.update(actor.rollout(), reads=("tokens",))

    actor, student = symbolic_roles("actor student")
    flow = actor.receive_rows().update(actor, reads=("tokens",))
    assert tuned() == flow.update(student, ("tokens",), ("loss",)) and tuned().errors() == []
    assert [node.reads for node in tuned().nodes[1:]] == [("tokens",), ("tokens",)]
    assert rolled_out() == actor.rollout().update(actor, reads=("tokens",))
    assert rolled_out().nodes[-1].name == "rollout.sync"


def test_both_ways_to_write_a_flow_say_how_stale_its_samples_may_be():
    @dataflow
    def stale(actor):
        samples = actor.rollout(staleness=2)
        return actor.advantages(samples, algorithm=GRPO)

    actor, *_ = symbolic_roles(ROLES)
    flow = actor.rollout(staleness=2).advantages(GRPO)
    assert flow == stale() != actor.rollout().advantages(GRPO)
    assert [node.staleness for node in flow.nodes] == [2, None, None]
    assert flow.of_actor("_2").nodes[0].staleness == 2


def test_a_rollout_without_a_staleness_has_the_job_s():
    actor, *_ = symbolic_roles(ROLES)
    synced = ppo_flow().with_staleness(2)
    assert [node.name for node in synced.nodes if node.staleness] == ["rollout.generate"]
    assert actor.rollout(staleness=1).with_staleness(2) == actor.rollout(staleness=1)
    assert synced.stale_edges == [("rollout.sync", "rollout.generate", 2)] and ppo_flow().stale_edges == []
    synced.validate(COLOCATED, staleness=2)
    ppo_flow().validate(COLOCATED, staleness=2)
    both = ppo_flow().with_staleness(1).beside(ppo_flow().of_actor("_2").with_staleness(1))
    assert both.stale_edges == [
        ("rollout.sync", "rollout.generate", 1),
        ("rollout_2.sync", "rollout_2.generate", 1),
    ]
    assert actor.rollout(staleness=1).stale_edges == []  # weights that no node writes


@pytest.mark.parametrize(
    "flow, of_job, told",
    [
        (
            ppo_flow().with_staleness(2),
            1,
            r"node \(rollout.generate\): staleness \(2\) must be the job's --staleness \(1\), .* start the "
            "job with --staleness 2.",
        ),
        (ppo_flow().with_staleness(1), 0, r"staleness \(1\) must be the job's --staleness \(0\)"),
        (ppo_flow().with_staleness(-1), None, r"staleness \(-1\) must be a whole number, 0 or more."),
        (
            ppo_flow().then(symbolic_roles("rollout")[0].sync, staleness=1),
            1,
            r"node \(rollout.sync\): staleness \(1\) is the age of samples, and this node makes none. Write "
            r"actor.rollout\(staleness=1\).",
        ),
    ],
)
def test_a_staleness_that_the_job_does_not_have_is_named(flow, of_job, told):
    with pytest.raises(FlowError, match=told):
        flow.validate(staleness=of_job)


def test_a_role_that_is_not_there_leaves_no_trace():
    present = COLOCATED.keys() - {"reference"}
    flow = ppo_flow(present)
    assert flow == ppo(present)
    assert [n.name for n in flow.nodes if "ref" in n.name or {"ref_log_probs"} & {*n.reads}] == []
    flow.validate({role: COLOCATED[role] for role in present})
    actor, reward = symbolic_roles("actor reward")
    assert actor.rollout().join(None, reward.score) == actor.rollout().join(reward.score)
    assert actor.rollout().update(SymbolicRole("critic", present=False)) == actor.rollout()


def test_dependencies_follow_columns_and_state_follows_the_order_written():
    needs = ppo_flow().dependencies
    assert (
        needs["rollout.generate"] == {}
    )  # reads weights:actor, which update writes: that of the step before
    assert needs["actor.advantages"] == {
        "reward.score": ("rewards",),
        "actor.log_probs": ("old_log_probs",),
        "reference.log_probs": ("ref_log_probs",),
        "critic.values": ("values",),
    }
    assert needs["rollout.sync"] == {
        "actor.update": ("weights:actor",),
        "rollout.generate": (),
    }  # () : only not before
    assert (
        needs["actor.update"].items()
        >= {"rollout.generate": ("tokens",), "actor.log_probs": ("old_log_probs",)}.items()
    )
    depth = ppo_flow().depth
    assert [
        depth[n]
        for n in ("rollout.generate", "critic.values", "actor.advantages", "actor.update", "rollout.sync")
    ] == [0, 1, 2, 3, 4]
    assert ppo_flow().chain_behind["rollout.generate"] == 4
    assert (
        "critic.update" in ppo_flow().behind["reward.score"]
        and "actor.update" not in ppo_flow().behind["critic.update"]
    )


def test_two_reward_models_write_two_columns_and_both_count():
    actor, one, two = symbolic_roles("actor reward_model reward_model_2")
    flow = actor.rollout().join(one.score, two.score).advantages(GRPO).update(actor)
    assert [n.writes for n in flow.nodes if n.method == "score"] == [("scores",), ("scores:reward_model_2",)]
    assert (
        flow.dependencies["actor.advantages"].items()
        >= {"reward_model.score": ("scores",), "reward_model_2.score": ("scores:reward_model_2",)}.items()
    )
    flow.validate(dict.fromkeys(["actor", "rollout", "reward_model", "reward_model_2"], mesh(0)))
    alone = actor.rollout().join(two.score).advantages(GRPO)
    assert [n.writes for n in alone.nodes if n.method == "score"] == [("scores",)]


def test_two_actors_read_columns_of_their_own_samples_only():
    meshes = {}
    flow = Flow()
    for suffix in ("", "_2"):
        actor, critic, reward = (SymbolicRole(f"{kind}{suffix}") for kind in ("actor", "critic", "reward"))
        part = (
            actor.rollout()
            .join(reward.score, critic.values)
            .advantages(GAE, actor)
            .update(critic)
            .update(actor)
        )
        flow = Flow((*flow.declared, *part.declared))
        meshes |= dict.fromkeys(
            [f"{kind}{suffix}" for kind in ("actor", "rollout", "critic", "reward")], mesh(len(meshes))
        )
    flow.validate(meshes)
    second = [name for name in flow.dependencies if name.split(".")[0].endswith("_2")]
    assert len(second) == len(flow.nodes) / 2
    assert {need for name in second for need in flow.dependencies[name]} <= {*second}
    assert next(n for n in flow.nodes if n.name == "actor_2.update").writes == ("weights:actor_2",)
    # With one reward for both, the second actor has none: those there are belong to other samples.
    without = Flow(n for n in flow.declared if n.role != "reward_2")
    told = [
        "node (actor_2.advantages) reads rewards:*_2, which nobody writes. Add reward_2.score, which does."
    ]
    assert [f.split(" Written")[0] for f in without.errors(meshes)] == told


def test_a_missing_node_is_named_also_where_only_the_algorithm_of_the_job_needs_its_column():
    actor, critic, reward = symbolic_roles("actor critic reward")
    algorithm = SimpleNamespace(
        advantage_reads=("rewards", "ref_log_probs", "values"), advantage_writes=("advantages", "returns")
    )
    flow = actor.rollout().join(reward.score, critic.values).advantages(algorithm).update(actor)
    [told] = flow.errors(COLOCATED)
    assert told.startswith(
        "node (actor.advantages) reads ref_log_probs, which nobody writes. Add reference.log_probs, "
        "which does."
    )
    # The flow was written with an algorithm that reads less than the job's own.
    needs = {
        ("actor", "advantages"): ("rewards", "values"),
        ("actor", "update"): ("old_log_probs", "ref_log_probs"),
    }
    flow = (
        actor.rollout()
        .join(reward.score)
        .advantages(SimpleNamespace(advantage_reads=("rewards",), advantage_writes=("advantages",)))
    )
    told = [line.split(" Written")[0] for line in flow.update(actor).errors(COLOCATED, needs)]
    assert told == [
        "node (actor.advantages) reads values, which nobody writes. Add critic.values, which does.",
        "node (actor.update) reads ref_log_probs, which nobody writes. Add reference.log_probs, which does.",
    ]
    scored = actor.rollout().join(SymbolicRole("reward_model").score).advantages(GRPO).update(actor)
    assert (
        scored.errors(COLOCATED | {"reward_model": mesh(0)}, {("actor", "advantages"): ("rewards",)}) == []
    )  # scores are rewards


class Grader(Role, kind="grader"):
    @method(reads=["tokens", "lengths"], writes=["rewards"])
    def judge(self) -> None: ...


def test_methods_of_ones_own():
    actor = SymbolicRole("actor")
    declared = actor.rollout().then(SymbolicRole("grader").judge)
    assert declared.nodes[1].reads == ("tokens", "lengths") and declared.nodes[1].writes == ("rewards",)
    said = actor.rollout().then(SymbolicRole("other").judge, reads=("tokens", "lengths"), writes=("rewards",))
    assert [(n.reads, n.writes) for n in said.nodes] == [(n.reads, n.writes) for n in declared.nodes]

    @dataflow
    def traced(actor, grader):
        grader.judge(actor.rollout())

    @dataflow
    def traced_by_name(actor, other):
        other.judge(actor.rollout(), writes=("rewards",))

    assert traced() == declared and traced_by_name() == said
    declared.advantages(GRPO).update(actor).validate(dict.fromkeys(["actor", "rollout", "grader"], mesh(0)))


def test_background_work():
    @columns(reads=["rewards"])
    def log_table(rewards): ...

    actor, reward, logger = symbolic_roles("actor reward logger")
    flow = (
        actor.rollout()
        .join(reward.score)
        .background(log_table)
        .background(logger.write, reads=("tokens",), writes=())
    )
    assert [(n.name, n.role, n.background, n.function) for n in flow.nodes[2:]] == [
        ("log_table", "driver", True, log_table),
        ("logger.write", "logger", True, None),
    ]

    @dataflow
    def traced(actor, reward, logger):
        samples = actor.rollout()
        background(log_table, reward.score(samples))
        background(logger.write, samples, reads=("tokens",))

    assert traced() == flow
    flow.validate({"actor": mesh(0), "rollout": mesh(0), "reward": mesh(0), "logger": mesh(1)})


def test_a_traced_call_refuses_what_it_does_not_read():
    @dataflow
    def wrong(actor, critic, reward):
        critic.values(reward.score(actor.rollout()))

    with pytest.raises(
        ValueError,
        match=r"node \(critic.values\) is given rewards, which it does not read. It reads tokens, lengths,",
    ):
        wrong()


def node(name: str, reads=(), writes=(), **options) -> Node:
    role, method = name.split(".")
    return Node(role=role, method=method, reads=reads, writes=writes, **options)


@pytest.mark.parametrize(
    "nodes, finding",
    [
        ([], r"flow \(empty\): it needs at least one node. Start it with actor.rollout\(\)."),
        (
            [node("a.x", writes=["values"]), node("b.y", reads=["value"])],
            r"node \(b.y\) reads value, which nobody writes. Did you mean values\? Written columns: values.",
        ),
        (
            [node("a.x", reads=["scores"], writes=["scores"])],
            r"node \(a.x\) reads scores, which nobody writes but this node itself.",
        ),
        (
            [node("a.x", writes=["scores"]), node("b.y", writes=["scores"])],
            r"column \(scores\) is written by a.x and b.y: one node writes it.",
        ),
        (
            [
                node("a.x", reads=["p"], writes=["q"]),
                node("b.y", reads=["q"], writes=["p"]),
                node("a.z", reads=["p"]),
            ],
            r"nodes (a.x, b.y|b.y, a.x) wait for each other: .*b.y reads q of a.x.*. One of them must",
        ),
        (
            [node("a.x", writes=["q"]), node("c.z", reads=["q"])],
            r"node \(c.z\): role \(c\) has no mesh. Place it with --c-ranks, or leave the node out. "
            r"Placed roles: a, actor, b.",
        ),
        ([node("actro.x")], r"node \(actro.x\): role \(actro\) has no mesh. Did you mean actor\?"),
        (
            [node("a.x", reads=["weights:actr"])],
            r"node \(a.x\) reads weights:actr, but role \(actr\) has no mesh. Did you mean actor\?",
        ),
        (
            [Node(role="actor", method="logprobs")],
            r"node \(actor.logprobs\): no columns are known for method \(logprobs\). Did you mean "
            r"log_probs\? "
            r"Known methods of actor: log_probs, receive_rows, scores, update. For one of your own",
        ),
        (
            [Node(role="a", method="x")],
            r"Nothing is known of role a. For one of your own, say what it reads= and writes=",
        ),
        (
            [node("a.x", writes=["q"], background=True), node("b.y", reads=["q"])],
            r"node \(b.y\) reads q of a.x, which is a background node: the critical path cannot wait for it. "
            r"Put a.x on the critical path, or b.y into the",
        ),
        (
            [node("a.x"), node("a.x")],
            r"node \(a.x\) is there 2 times: give each a name= of its own, or leave one out.",
        ),
    ],
)
def test_every_mistake_is_named(nodes, finding):
    meshes = {"a": mesh(0), "b": mesh(1), "actor": mesh(0)}
    with pytest.raises(FlowError, match=finding) as raised:
        Flow(nodes).validate(meshes)
    assert len(raised.value.errors) == 1, raised.value
    Flow(nodes).text(meshes)  # what is wrong can still be shown


def test_all_mistakes_are_told_at_once():
    nodes = [
        node("a.x", reads=["p"], writes=["q"]),
        node("b.y", reads=["q"], writes=["p", "q"]),
        Node(role="actor", method="logprobs"),
    ]
    with pytest.raises(FlowError) as raised:
        Flow(nodes).validate({"a": mesh(0)})
    assert len(raised.value.errors) == 5  # method, two roles, written twice, cycle
    assert str(raised.value).startswith(
        "the flow cannot run:\n  - node (actor.logprobs): no columns are known"
    )
    two = [node(f"{r}.x", reads=[a], writes=[b]) for r, a, b in ("apq", "bqp", "crs", "dsr")]
    assert len(Flow(two).errors()) == 2  # cycles


def test_text_shows_order_ranks_and_columns():
    meshes = {role: mesh(0, 1, 2, 5) for role in COLOCATED} | {"critic": mesh(7)}
    lines = ppo_flow().text(meshes).splitlines()
    assert lines[0].split() == ["node", "ranks", "reads", "writes"]
    assert lines[1].split() == [
        "0",
        "rollout.generate",
        "0-2,5",
        "(weights:actor),",
        "(weights:rollout)",
        "tokens,",
        "lengths",
    ]
    assert ["1", "critic.values", "7", "tokens,", "lengths,", "(weights:critic)", "values"] in [
        line.split() for line in lines
    ]
    assert lines[-1].startswith("longest chain: rollout.generate -> ") and lines[-1].endswith(
        "-> actor.update -> rollout.sync"
    )
    assert max(map(len, lines)) < 140
    assert ranges([]) == "" and ranges([3]) == "3" and ranges([4, 0, 1]) == "0-1,4"


def test_text_and_svg_show_the_edge_to_later_steps():
    flow = ppo_flow().with_staleness(1)
    lines = flow.text(COLOCATED).splitlines()
    assert lines[-2] == "later steps: rollout.sync -> rollout.generate, staleness <= 1"
    assert [*lines[:-2], lines[-1]] == ppo_flow().text(COLOCATED).splitlines()
    tag = "{http://www.w3.org/2000/svg}"
    drawn, plain = (ElementTree.fromstring(one.svg(COLOCATED)) for one in (flow, ppo_flow()))
    assert len(list(drawn.iter(f"{tag}path"))) == len(list(plain.iter(f"{tag}path"))) + 1
    [label] = [text for text in drawn.iter(f"{tag}text") if text.text == "staleness <= 1"]
    bottom = max(float(r.get("y")) + float(r.get("height")) for r in drawn.iter(f"{tag}rect") if r.get("rx"))
    assert bottom < float(label.get("y")) < float(drawn.get("height"))


def test_svg_has_a_box_per_node_that_covers_no_other_and_an_arrow_per_edge():
    meshes = COLOCATED | {"critic": mesh(2)}
    flow = ppo_flow().background(print, reads=["rewards"])
    svg = ElementTree.fromstring(flow.svg(meshes))
    tag = "{http://www.w3.org/2000/svg}"
    boxes = [
        [float(r.get(k)) for k in ("x", "y", "width", "height")]
        for r in svg.iter(f"{tag}rect")
        if r.get("rx")
    ]
    texts = [t.text for t in svg.iter(f"{tag}text")]
    assert len(boxes) == len(flow.nodes) and {n.name for n in flow.nodes} | {
        "ranks 0-1",
        "ranks 2",
        "driver",
    } <= {*texts}
    for i, (x, y, w, h) in enumerate(boxes):
        assert 0 <= x and x + w <= float(svg.get("width")) and y + h <= float(svg.get("height"))
        assert all(x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y for x2, y2, w2, h2 in boxes[:i])
    assert len(list(svg.iter(f"{tag}path"))) == sum(
        bool(c) for needs in flow.dependencies.values() for c in needs.values()
    )
    assert {r.get("fill") for r in svg.iter(f"{tag}rect") if r.get("rx")} == {"#cfe3f7", "#d8eecf", "#fbe3c4"}


def test_a_flow_of_another_actor_beside_the_first():
    """The same as written with numbered roles; state, custom names and functions of the driver get the number
    too."""
    actor, critic, reward = symbolic_roles("actor critic reward")
    of_one = (
        actor.rollout()
        .join(reward.score, critic.values)
        .advantages(GAE)
        .update(critic)
        .update(actor)
        .then(SymbolicRole("judge").look, reads=["tokens", "weights:actor"], writes=["opinion"])
    )
    assert of_one.of_actor("") is of_one
    second = of_one.of_actor("_2")
    both = of_one.beside(second)
    assert [node.name for node in second.declared] == [
        f"{node.role}_2.{node.method}" for node in of_one.declared
    ]
    alone = {name: needs.keys() for name, needs in of_one.dependencies.items()}
    for name, needs in alone.items():
        role, method = name.split(".")
        assert both.dependencies[name].keys() == needs
        assert both.dependencies[f"{role}_2.{method}"].keys() == {need.replace(".", "_2.") for need in needs}
    assert [node.reads[-1] for node in both.nodes if node.method == "look"] == [
        "weights:actor",
        "weights:actor_2",
    ]


def test_roles_without_a_rollout_of_their_number_work_on_the_samples_of_the_first():
    actor, student = symbolic_roles("actor actor_2")
    flow = actor.rollout().join(actor.log_probs, student.log_probs)
    assert flow.rollout_source("actor_2") == flow.rollout_source("critic") == ""
    assert flow.dependencies["actor_2.log_probs"].keys() == {"rollout.generate"}
    synced = flow.then(SymbolicRole("rollout_2").sync)  # gets weights, samples nothing
    assert (
        synced.rollout_source("actor_2") == ""
        and flow.beside(student.rollout()).rollout_source("actor_2") == "_2"
    )
