"""What of a flow may be issued now, step by step and without a clock. `pytest tests/flow/test_schedule.py`

With a simulated machine: tests/trainer/test_scheduler.py.
"""

from types import SimpleNamespace

import pytest

from megarl.flow import Flow, FlowError, Node
from megarl.flow.schedule import Candidate, FlowStep, PreparedFlow


def node(name, reads=(), writes=(), **options):
    role, method = name.split(".")
    return Node(role=role, method=method, reads=tuple(reads), writes=tuple(writes), **options)


def prepared(nodes, ranks, driver_columns=()):
    meshes = {role: SimpleNamespace(ranks=of_role) for role, of_role in ranks.items()}
    shard_of = {role: str(of_role) for role, of_role in ranks.items()}
    return PreparedFlow(Flow(nodes), meshes, shard_of, driver_columns)


def names(step):
    """What may be issued now, in order: nodes by name, exchanges as columns>reader."""
    return [f"{','.join(c.columns)}>{c.node.role}" if c.columns else c.node.name for c in step.candidates()]


def test_a_reader_on_the_ranks_of_the_writer_follows_at_once_unless_the_driver_needs_the_value():
    nodes = [node("a.x", writes=["p"]), node("a.y", reads=["p"])]
    for driver_columns, behind in (((), ["a.y"]), (("p",), [])):
        step = FlowStep(prepared(nodes, {"a": [0]}, driver_columns), ())
        assert names(step) == ["a.x"] and step.has_unissued()
        step.issued.add("a.x")
        assert names(step) == behind
        step.ended.add("a.x")
        assert names(step) == ["a.y"] and not step.is_over()
        step.issued.add("a.y")
        assert step.is_over() and not step.has_unissued() and names(step) == []


def test_columns_are_brought_to_other_ranks_once_for_all_readers():
    nodes = [
        node("a.x", writes=["p", "q"]),
        node("b.y", reads=["p"]),
        node("b.z", reads=["q"]),
        node("b.free"),
    ]
    step = FlowStep(prepared(nodes, {"a": [0], "b": [1]}), ())
    assert names(step) == ["a.x", "b.free"]
    step.issued.add("a.x")  # calls on a rank run in order, so the exchange comes after a.x
    assert names(step) == ["p,q>b", "b.free"]
    assert step.candidates()[0].ranks == {0, 1}
    step.moved["a.x", "[1]"] = True
    assert names(step) == ["b.y", "b.z", "b.free"]


def test_the_longest_chain_goes_first_and_functions_and_background_last():
    nodes = [
        node("a.short"),
        node("a.log", background=True),
        Node(role="driver", method="f", reads=(), writes=(), function=print),
        node("a.first", writes=["p"]),
        node("a.second", reads=["p"]),
    ]
    step = FlowStep(prepared(nodes, {"a": [0]}), ())
    assert names(step) == ["a.first", "a.short", "driver.f", "a.log"]
    log = step.candidates()[-1]
    assert step.critical_path_wants(log) and not step.critical_path_wants(Candidate(log.node, frozenset([1])))
    step.issued |= {"a.first", "a.short", "driver.f", "a.second"}
    assert not step.critical_path_wants(log) and names(step) == ["a.log"]
    assert not step.is_over()  # a.second reads what a.first has not returned
    step.ended.add("a.first")
    assert step.is_over() and step.has_unissued()


def test_a_background_reader_of_weights_does_not_wait_for_what_overwrites_them():
    """Two of them on the same rank do not wait for each other's update either."""
    nodes = [
        node("a.look", ["weights:a"], background=True),
        node("b.look", ["weights:b"], background=True),
        node("a.last"),
        node("a.update", (), ["weights:a"]),
        node("b.update", (), ["weights:b"]),
    ]
    step = FlowStep(prepared(nodes, {"a": [0], "b": [0]}), ())
    assert names(step) == ["a.last", "a.look", "b.look"]
    assert [step.critical_path_wants(c) for c in step.candidates()[1:]] == [True, True]
    step.issued.add("a.last")
    assert [step.critical_path_wants(c) for c in step.candidates()] == [False, False]


def test_an_exchange_does_not_wait_for_what_waits_for_one_of_its_readers():
    nodes = [
        node("far.x", (), ["p"], background=True),
        node("b.first", ["p"], ["q"], background=True),
        node("b.second", ["q"], background=True),
        node("b.look", ["p", "weights:a"], background=True),
        node("a.update", (), ["weights:a"]),
    ]
    step = FlowStep(prepared(nodes, {"far": [1], "b": [0], "a": [0]}), ())
    step.issued.add("far.x")
    (exchange,) = step.candidates()
    assert exchange.columns == ("p",) and exchange.node.name == "b.first"
    assert not step.critical_path_wants(exchange)


def test_what_comes_after_a_skipped_node_comes_after_what_was_before_it():
    nodes = [node("a.x", writes=["p"]), node("a.y", reads=["p"], writes=["q"]), node("a.z", reads=["q"])]
    step = FlowStep(prepared(nodes, {"a": [0]}), ["a.y"])
    assert names(step) == ["a.x"]
    step.issued.add("a.x")
    assert names(step) == [] and "a.y" not in step.ended
    step.ended.add("a.x")
    assert names(step) == ["a.z"] and "a.y" in step.ended


def test_others_want_the_ranks_that_a_call_would_wait_on():
    nodes = [node("a.x"), node("b.y", writes=["p"]), node("both.z", reads=["p"])]
    step = FlowStep(prepared(nodes, {"a": [0], "b": [1], "both": [0, 1]}), ())
    by_name = {c.node.name: c for c in step.candidates()}
    assert by_name.keys() == {"a.x", "b.y"}
    assert step.others_want(by_name["a.x"])  # both.z, which does not wait for it
    assert not step.others_want(by_name["b.y"])  # all that is left on rank 1 waits for it


def test_a_wrong_flow_is_refused():
    with pytest.raises(FlowError, match="reads p, which nobody writes"):
        prepared([node("a.x", reads=["p"])], {"a": [0]})
