"""`megarl engines` on the files that the driver writes and reads.

pytest tests/inspect/test_engines.py"""

from __future__ import annotations

import pytest

from megarl import cli
from megarl.loggers.engine_states import (
    JOINING,
    LEFT,
    EngineRequest,
    EngineState,
    read_states,
    take_requests,
    write_states,
)


@pytest.fixture
def states(tmp_path):
    engines = [EngineState("rollout", number, (number + 1,)) for number in range(3)]
    engines[1].state, engines[1].step, engines[1].reason = LEFT, 7, "killed by SIGKILL"
    write_states(tmp_path / "run", engines)
    assert read_states(tmp_path / "run") == engines
    return engines


def test_list_shows_every_engine(states, megarl, tmp_path):
    code, out, err = megarl("engines", "list", tmp_path / "run")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "engine     ranks  state  since step  reason",
        "rollout.0  1      live   0",
        "rollout.1  2      left   7           killed by SIGKILL",
        "rollout.2  3      live   0",
    ]


def test_add_asks_the_running_job_for_the_engine_that_has_left(states, megarl, open_run, tmp_path):
    run = tmp_path / "run"
    code, _, err = megarl("engines", "add", run)
    assert code == 2 and "no job is running there. Resume it with --load" in err and not take_requests(run)
    with open_run(tmp_path / "other"):
        write_states(tmp_path / "other", states)
        code, out, _ = megarl("engines", "add", tmp_path / "other")
    assert code == 0 and out == "rollout.1 is started in the next step, and has weights at its end\n"
    assert take_requests(tmp_path / "other") == [EngineRequest("rollout", 1)]
    assert take_requests(tmp_path / "other") == []


def test_what_cannot_be_done_is_an_error(states, megarl, tmp_path):
    states[1].state = JOINING
    write_states(tmp_path / "run", states)
    code, _, err = megarl("engines", "add", tmp_path / "run")
    assert code == 2 and "no engine has left: rollout.0 is live, rollout.1 is joining" in err
    code, _, err = megarl("engines", "list", tmp_path)
    assert code == 2 and "has no engines that may leave" in err and "--min-engines 1" in err
    (tmp_path / "run" / "engines" / "states.json").write_text("[{")
    code, _, err = megarl("engines", "list", tmp_path / "run")
    assert code == 2 and "states.json cannot be read" in err
    code, _, err = megarl("engines", "remove", tmp_path / "run")
    assert code == 2 and "remove" in err


def test_help(capsys):
    with pytest.raises(SystemExit) as exited:
        cli.main(["engines", "--help"])
    assert exited.value.code == 0 and "megarl engines add runs/a" in capsys.readouterr().out
    assert "  engines " in cli.USAGE
