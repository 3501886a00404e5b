"""A taskset of the package verifiers for test_verifiers.py: an answer, "more", and another answer.

The harness is a program of this folder, so that nothing has to be downloaded for a rollout."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import Task, TaskData
from verifiers.v1.taskset import Taskset
from verifiers.v1.trace import Trace
from verifiers.v1.utils.decorators import reward

__all__ = ["Counting", "Program"]


class CountingData(TaskData):
    bonus: float = 0.0


class CountingTask(Task[CountingData]):
    @reward
    async def answered(self, trace: Trace) -> float:
        """The number of answers, and the task's bonus."""
        if self.data.bonus < 0:
            raise ValueError("a bonus below 0")
        answers = [node for node in trace.nodes if node.message.role == "assistant"]
        return len(answers) + self.data.bonus


class Counting(Taskset[CountingTask, vf.TasksetConfig]):
    def load(self) -> Iterable[CountingTask]:
        for bonus in (0.25, 0.5, -1.0):
            yield CountingTask(CountingData(prompt=f"start {bonus}", bonus=bonus), self.config.task)


class Program(Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    FILE = "counting_program.py"

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        program = Path(__file__).with_name(self.FILE)
        arguments = [endpoint, secret, ctx.model, str(data.prompt)]
        return await runtime.run_program([sys.executable, str(program), *arguments], {})
