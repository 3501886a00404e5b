"""The game of tests/e2e/letters.py as a taskset of the package verifiers, for test_agents_job.py.

Its tasks are the rows of the file that MEGARL_TEST_ROWS names. Without the variable it has none."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import verifiers.v1 as vf
from megarl_counting import Program as CountingProgram
from verifiers.v1.task import Task, TaskData
from verifiers.v1.taskset import Taskset
from verifiers.v1.trace import Trace
from verifiers.v1.utils.decorators import reward

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "e2e"))
from letters import reward_of

__all__ = ["Problems", "Program"]


class Problem(Task[TaskData]):
    @reward
    async def written(self, trace: Trace) -> float:
        """The sum of what the game gives for each answer."""
        answers = [node.message.content for node in trace.nodes if node.message.role == "assistant"]
        return float(sum(map(reward_of, answers), 0.0))


class Problems(Taskset[Problem, vf.TasksetConfig]):
    def load(self) -> Iterable[Problem]:
        path = os.environ.get("MEGARL_TEST_ROWS")
        for line in Path(path).read_text().splitlines() if path else ():
            (question,) = json.loads(line)["prompt"]
            yield Problem(TaskData(prompt=question["content"]), self.config.task)


class Program(CountingProgram):
    FILE = "letters_program.py"
