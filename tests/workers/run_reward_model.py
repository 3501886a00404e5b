"""One rank with a judge as its reward model, in real vLLM.

    python tests/workers/run_reward_model.py FOLDER

FOLDER holds actor/, judge/ and rows.jsonl (see test_reward_model.py). Writes FOLDER/report.json, then leaves
while a judge is up."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "examples")]
from reward_jobs import ROWS, config, store
from transformers import AutoTokenizer

from megarl.config.mesh import MeshSpec
from megarl.rollout.processes import EngineDied
from megarl.workers.offload_manager import OffloadManager
from megarl.workers.reward_model import RewardModelRole


def judge_role(folder: Path) -> RewardModelRole:
    role = RewardModelRole(
        "reward_model",
        config(
            folder,
            "judge",
            judge_template=str(folder / "template.txt"),
            judge_score_pattern=r"^(\d)",
            judge_score_range=(0.0, 8.0),
            judge_max_tokens=2,
            judge_max_model_len=60,
        ),
        {"reward_model": MeshSpec((0,))},
        store(folder),
        OffloadManager(),
    )
    role.setup()
    return role


def caught(call) -> dict:
    """What it raised, and how long after `killed_at`."""
    try:
        call()
    except EngineDied as error:
        return {"error": str(error), "at": time.monotonic()}
    return {"error": "", "at": time.monotonic()}


def kill_while_it_works(role: RewardModelRole) -> dict:
    pid = role.judge.pids[0]
    os.kill(pid, signal.SIGSTOP)  # so that it works when it is killed
    times = {}

    def kill() -> None:
        time.sleep(0.5)
        times["killed"] = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    report = caught(lambda: role.score(ROWS))
    thread.join()
    again = caught(lambda: role.score(ROWS))
    role.shut_down()
    return {
        "pid": pid,
        "error": report["error"],
        "seconds": report["at"] - times["killed"],
        "again": again["error"],
    }


def kill_at_start(folder: Path) -> dict:
    times = {}

    def kill() -> None:
        while not (
            children := [p for p in multiprocessing.active_children() if p.name.startswith("EngineCore")]
        ):
            time.sleep(0.01)
        time.sleep(0.5)
        times["killed"] = time.monotonic()
        children[0].kill()

    thread = threading.Thread(target=kill)
    thread.start()
    report = caught(lambda: judge_role(folder))
    thread.join()
    return {"error": report["error"], "seconds": report["at"] - times["killed"]}


def hot(role: RewardModelRole) -> list[dict]:
    options = role.judge.options
    role.judge.options = replace(options, judge_temperature=2.0)
    records = role.score(ROWS)
    role.judge.options = options
    return records


def main(folder: Path) -> None:
    role = judge_role(folder)
    report = {"scores": role.score(ROWS), "hot": [hot(role), hot(role)]}
    role.judge._tokenizer = AutoTokenizer.from_pretrained(
        folder / "actor"
    )  # the same words, and a chat template
    report["with a chat template"] = role.score(ROWS)
    report["killed"] = kill_while_it_works(role)
    report["killed at start"] = kill_at_start(folder)
    role = judge_role(folder)
    report |= {"restarted": role.score(ROWS), "pids": role.judge.pids}
    report["hot"].append(hot(role))
    (folder / "report.json").write_text(json.dumps(report))
    os._exit(7)


if __name__ == "__main__":  # vLLM starts its processes by spawn
    main(Path(sys.argv[1]))
