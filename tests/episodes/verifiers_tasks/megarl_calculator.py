"""The calculator of examples/calculator_env.py as a taskset of the package verifiers, for test_agents_job.py.

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

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from calculator_env import Calculator

__all__ = ["Problems", "Program"]


class ProblemData(TaskData):
    truth: str = ""


class Problem(Task[ProblemData]):
    @reward
    async def solved(self, trace: Trace) -> float:
        """What the calculator gives the last answer; 0 if a limit came before a final one."""
        answers = [node.message.content for node in trace.nodes if node.message.role == "assistant"]
        calculator = Calculator()
        calculator.truth = self.data.truth
        return calculator.step(answers[-1])[1] or 0.0


class Problems(Taskset[Problem, vf.TasksetConfig]):
    def load(self) -> Iterable[Problem]:
        path = os.environ.get("MEGARL_TEST_ROWS")
        for line in Path(path).read_text().splitlines() if path else ():
            row = json.loads(line)
            (question,) = row["prompt"]
            data = ProblemData(prompt=question["content"], truth=row["reward_model"]["ground_truth"])
            yield Problem(data, self.config.task)


class Program(CountingProgram):
    FILE = "calculator_program.py"
