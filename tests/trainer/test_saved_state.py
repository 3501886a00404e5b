"""Whatever a checkpoint saves of the driver is restored, and whatever changes between two steps is saved.

The entries are those of the snapshot itself, and the attributes those of the objects themselves, so a new one that
nobody restores fails here. Mutations that made these fail: `ActorState.restore` without the KL controller, without
the multiplier, without the counters; `SftRows` that begins a pass with its own seed.

pytest tests/trainer/test_saved_state.py"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.hf_config import ModelShape
from megarl.config.rules_files import disagreements
from megarl.config.schema import CurriculumConfig, SftConfig, StreamingConfig
from megarl.files.checkpoints import write_job
from megarl.trainer.actor_state import ActorState
from megarl.trainer.checkpointer import Checkpointer
from megarl.trainer.preflight import Inputs
from megarl.trainer.state import TrainState
from megarl.trainer.stop_request import StopRequest
from tests.trainer.test_actor_state import config

KL = {"kl_mode": "reward", "kl_coef": 0.02, "kl_controller": "adaptive", "kl_horizon": 1000}
COSTS = {"cost_score": "harm", "cost_limit": 0.9, "lagrange_max": 100.0}
KINDS = {
    "plain": {},
    "measured": {"curriculum": CurriculumConfig(curriculum="easy-first", difficulty_max=0.9)},
    "mixture": {"algorithm": REGISTRY["ppo-lagrangian"](**KL, **COSTS)},
}
"""Cursor -> sections of the configuration that differ. Together they have every cursor and every multiplier."""
PID = REGISTRY["ppo-lagrangian"](**KL, **COSTS, lagrange_update="pid", lagrange_kp=0.5, lagrange_kd=0.5)


class Rows(list):
    """Rows of two files."""

    file_sizes = (4, 3)


def new_state(folder: Path, kind: str, seed: int = 0, shuffle: bool = True) -> TrainState:
    """The state of a job of two actors that has everything that a state can have."""
    one = config(folder)
    data = replace(one.data, shuffle=shuffle, train_data_weights=(2.0, 1.0) if kind == "mixture" else None)
    one = replace(
        one,
        data=data,
        batch=replace(one.batch, seed=seed, train_iters=9),
        streaming=StreamingConfig(staleness=1),
        sft=SftConfig(sft_data=("sft",), sft_batch_size=2),
        **({"algorithm": PID} | KINDS[kind]),
    )
    inputs = Inputs(ModelShape.load(one.model.model), Rows(range(7)), None, num_sft_rows=5)
    state = TrainState(one, {"": inputs})
    state.actors["_2"] = ActorState("_2", one, inputs)
    return state


def change(state: TrainState) -> None:
    """Give everything that may change a value that it does not begin with."""
    state.completed = 3
    for number, actor in enumerate(state.actors.values(), 3):
        actor.cursor.next_visits(9)
        for row in range(6) if actor.measured else ():
            actor.measured.measure(row, row / 5)
        actor.cursor.next_visits(6 + number)
        actor.sft.sizes = [(9, 4)] * 5
        actor.sft.next(number, 1, 64)
        actor.kl.update(0.1, number)
        actor.multiplier.update(1.5)
        actor.zero_reward_steps, actor.equal_reward_steps = number, number + 1
        actor.give_rows([number, 1])
        actor.buffer.admit({100: 5, 101: number}, 2, state.completed)
        actor.buffer.issue([number, 1])


def leaves(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every number, text and truth value in a snapshot."""
    parts = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if parts is None:
        yield path
    for key, part in parts or ():
        yield from leaves(part, *path, key)


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return f"{value}/x" if isinstance(value, str) else (value or 0) + 1


REFUSED = {"num_rows", "sizes"}
"""With another number of rows a job cannot go on."""
OF_THE_FLAGS = {"weights": "proportions are counted anew", "staleness": "a rule", "greedy_samples": "a rule"}
"""Entries that say with which flags the others were made. Rules of tests/config compare them with the job's."""


def unread(path: tuple[Any, ...], kind: str) -> bool:
    """Whether `restore` may leave an entry out, because other entries say the same."""
    if kind == "measured":  # the rest of the pass is in "left"
        return path[-2:] == ("cursor", "offset")
    # the walks are those of the files, which number no visits
    names = ("num_rows", "seed", "shuffle", "visits") if "files" in path else ("num_rows", "pass", "offset")
    return kind == "mixture" and "cursor" in path and path[-1] in names


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_of_a_snapshot_is_restored(tmp_path, kind):
    state = new_state(tmp_path, kind)
    change(state)
    saved = json.loads(json.dumps(state.snapshot()))
    forgotten, compared = [], set()
    for path in leaves(saved):
        if OF_THE_FLAGS.keys() & {*path} or unread(path, kind):
            continue
        changed = copy.deepcopy(saved)
        at(changed, path[:-1])[path[-1]] = value = other(at(saved, path))
        restored = new_state(tmp_path, kind)
        if REFUSED & {*path}:
            with pytest.raises(ValueError, match="rows, "):
                restored.restore(changed)
            continue
        restored.restore(changed)
        again = restored.snapshot()
        compared.update(path)
        try:
            is_there = at(again, path) == value
        except (KeyError, IndexError):
            is_there = False
        if not is_there:
            forgotten.append(path)
    assert forgotten == []
    assert compared >= {"step", "kl", "multiplier", "sft", "buffer", "given_rows", "seed", "visits"}


BY_CLASS = {
    "TrainState": {
        "in_step": "a checkpoint is made between two steps",
        "_before_step": "taken when a step begins",
    },
    "ActorState": {
        **dict.fromkeys(("suffix", "config", "shape", "actor", "algorithm", "weight_of"), "of the flags"),
        **dict.fromkeys(("eval_rows", "gate_limits"), "of the flags and the data"),
        "gate_passed": "every job compares trainer and engines anew",
        "jumps": "every job compares with its own last steps",
        "measured": "the cursor, again",
    },
    "DataCursor": {"num_rows": "of the data"},
    "MeasuredCursor": {
        **dict.fromkeys(("num_rows", "order", "low", "high", "rest"), "of the data and the flags"),
        **dict.fromkeys(("_order", "_offset"), "the rest of the pass is saved, and the walk is compared"),
    },
    "MixtureCursor": {
        **dict.fromkeys(("num_rows", "sizes", "weights", "_first"), "of the data and the flags"),
        **dict.fromkeys(("_order", "_offset", "_pass"), "the walks are those of the files"),
    },
    "SftRows": {"_config": "of the flags", "sizes": "the actor tells them"},
    "AdaptiveKLController": dict.fromkeys(("target", "horizon"), "of the flags"),
    "LagrangeMultiplier": dict.fromkeys(("lr", "limit", "largest"), "of the flags"),
    "PIDMultiplier": dict.fromkeys(("lr", "limit", "largest", "kp", "kd"), "of the flags"),
    "SampleBuffer": {
        **dict.fromkeys(("num_prompts", "staleness", "in_order", "replayed"), "of the flags"),
        **dict.fromkeys(("lost_engines", "pinned_engines"), "all engines of a job are there when it begins"),
        "_finished": "the engines report their samples again",
    },
    "Group": {
        "is_issued": "the engine may be gone",
        "samples": "the engines report them again",
    },
}
"""Class -> attributes that no checkpoint holds, each with the reason. Every other one must be restored."""


def attributes(value: Any, path: str = "state") -> Iterator[tuple[str, Any]]:
    """Yield path and value of what an object of the driver and its parts hold, but for what the table leaves out."""
    for name, part in vars(value).items():
        if name in BY_CLASS[type(value).__name__]:
            continue
        parts = {"": part}
        if isinstance(part, (dict, list)):
            parts = part if isinstance(part, dict) else dict(enumerate(part))
        inner = [(key, one) for key, one in parts.items() if type(one).__module__.startswith("megarl.")]
        for key, one in inner:
            yield from attributes(one, f"{path}.{name}{key}")
        if not inner:
            yield f"{path}.{name}", part


@pytest.mark.parametrize("kind", KINDS)
def test_every_attribute_is_restored_or_named_here(tmp_path, kind):
    """A new attribute must be saved, or have its reason in the table."""
    state, restored = new_state(tmp_path, kind), new_state(tmp_path, kind, seed=1, shuffle=False)
    fresh = dict(attributes(restored))
    change(state)
    restored.restore(json.loads(json.dumps(state.snapshot())))
    expected, found = dict(attributes(state)), dict(attributes(restored))
    assert found == expected
    same = {path for path in expected if path in fresh and fresh[path] == expected[path]}
    assert {path for path in same if not ("_files" in path and path.endswith("_num_visits"))} == set()
    for actor, of in zip(restored.actors.values(), state.actors.values(), strict=True):
        assert actor.cursor.next_visits(30) == of.cursor.next_visits(30)
        of.sft.sizes = actor.sft.sizes = [(9, 4)] * 5
        assert actor.sft.next(9, 1, 64)[0] == of.sft.next(9, 1, 64)[0]


def test_the_table_names_what_there_is(tmp_path):
    """Otherwise a reason outlives its attribute."""
    there: dict[str, set[str]] = {}
    for kind in KINDS:
        state = new_state(tmp_path, kind)
        change(state)
        parts = [state, *state.actors.values()]
        for actor in state.actors.values():
            parts += [actor.cursor, actor.kl, actor.multiplier, actor.sft, actor.buffer, *actor.buffer.groups]
        for part in parts:
            there.setdefault(type(part).__name__, set()).update(vars(part))
    assert there.keys() == BY_CLASS.keys()
    assert {
        (kind, name) for kind, names in BY_CLASS.items() for name in names if name not in there[kind]
    } == set()


# ------------------------------------------------------------------ job.json

FOR_PEOPLE = {"attempt", "weight_version", "arguments"}
"""Entries of job.json that no job takes over. Errors quote the arguments."""


class Ranks:
    """Stands for all ranks of a job: it keeps the random states that they are given."""

    def __init__(self) -> None:
        self.states: list[dict[str, str]] = []

    def on(self, ranks: list[int]) -> Ranks:
        return self

    def set_random_state(self, state: dict[str, str]) -> SimpleNamespace:
        self.states.append(state)
        return SimpleNamespace(result=lambda: [None])


def job(folder: Path, state: TrainState) -> tuple[Checkpointer, list[str]]:
    """A checkpointer without ranks, and what it reports."""
    said: list[str] = []
    run = SimpleNamespace(
        attempt=SimpleNamespace(number=4),
        progress=SimpleNamespace(note=said.append),
        row_of=lambda step: {"policy/loss": 0.25},
    )
    (folder / "reward.py").write_text("def score(response, ground_truth): ...\n")
    one = state.first.config
    one = replace(
        one,
        data=replace(one.data, reward_function=f"{folder}/reward.py:score"),
        checkpoint=replace(one.checkpoint, load=str(folder)),
    )
    made = Checkpointer(one, SimpleNamespace(ranks={"actor": (0,)}), {}, state, run, StopRequest())
    made._random, made.roles = Ranks(), {}
    return made, said


def test_every_entry_of_job_json_is_read_by_a_resume(tmp_path):
    state, folder = new_state(tmp_path, "plain"), tmp_path / "step_000003"
    change(state)
    body = job(tmp_path, state)[0]._body([{"torch": "state"}]) | {"roles": {}}
    folder.mkdir()

    def outcome(changed: dict[str, Any]) -> object:
        """What a job makes of a job.json: errors of the configuration, or its state and its notes."""
        write_job(folder, changed)
        restored = new_state(tmp_path, "plain")
        reader, said = job(tmp_path, restored)
        if errors := [
            *disagreements(reader._job_config, folder, changed | {"roles": {"actor": "", "critic": ""}})
        ]:
            return errors
        try:
            reader._load(folder)
        except ValueError as error:
            return str(error)
        return restored.snapshot(), reader.last_step, reader.restored_metrics, reader._random.states, said

    whole = outcome(body)
    assert whole[:4] == (state.snapshot(), 3, {"policy/loss": 0.25}, [{"torch": "state"}])
    unread = set()
    for name in body.keys() - {"roles"}:
        changes = []
        for path in leaves(body[name], name):
            changes.append(copy.deepcopy(body))
            at(changes[-1], path[:-1])[path[-1]] = other(at(body, path))
        if all(outcome(changed) == whole for changed in changes[:6]):
            unread.add(name)
    assert unread == FOR_PEOPLE
