"""What can go wrong where: one row of docs/reliability.md each, and what must be seen then."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from tests.faults.harness import Fault, Outcome

END_WITHIN_S = 10.0
CALL_TIMEOUT_S = float(
    os.environ.get("FAULTS_CALL_TIMEOUT_S", "30")
)  # of the jobs in which something hangs; their set-up takes less
RESHARD_TIMEOUT_S, REWARD_TIMEOUT_S = 10.0, 3.0
PAUSE_S = CALL_TIMEOUT_S + 5.0
# a call's time begins when the driver makes it, and the first ranks may be there before the driver is
DRIVER_START_S = 15.0
REST_S = 30.0  # of a job that goes on
STEP = 2  # in which it happens, where it is not the start

PLACES = {  # phase -> in a rank: where, which call of it is that of STEP, and how the message calls it
    "join": ("megarl.workers.worker:join_world", 1, "worker start-up"),
    "start": ("megarl.workers.actor:ActorRole.setup", 1, "actor setup"),
    "rollout": ("megarl.workers.rollout:RolloutRole.generate", 2, "rollout generate"),
    "reward": ("megarl.workers.reward:RewardRole.score", 2, "reward score"),
    "log-probs": ("megarl.workers.actor:ActorRole.log_probs", 2, "actor log_probs"),
    "update": ("megarl.workers.actor:ActorRole.update", 2, "actor update"),
    "sync": ("megarl.workers.rollout:RolloutRole.sync", 3, "rollout sync"),  # the first is before step 1
    "save": ("megarl.checkpoint.save:SavePlan.write", 2, "actor checkpoint_written"),  # beside step 3
}
IN_ENGINE = {
    "rollout": ("vllm.v1.executor.uniproc_executor:UniProcExecutor.execute_model", 20, "rollout generate"),
    "sync": ("megarl.rollout.weight_transfer:MegarlWeightTransferEngine.receive_weights", 3, "rollout sync"),
}
IN_DRIVER = {
    "rollout": ("megarl.trainer.step_runner:StepRunner._take_samples", 2, ""),
}
IN_REWARD_PROCESS = {"reward": ("megarl.rewards.base:judge", 6, "")}
STARTS = ("join", "start")


@dataclass(frozen=True)
class Case:
    kind: str
    """raise; SIGKILL; SIGSTOP and sleep, which hang; Ctrl-Z: SIGSTOP, and SIGCONT PAUSE_S later"""
    victim: str
    phase: str

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.victim}-{self.phase}".replace(" ", "_")

    @property
    def place(self) -> tuple[str, int, str]:
        """As in PLACES. Of what happens to the driver from outside: where rank 0 is."""
        if self.victim == "driver" and self.kind != "raise":
            return PLACES[self.phase]
        return {"driver": IN_DRIVER, "engine": IN_ENGINE, "reward process": IN_REWARD_PROCESS}.get(
            self.victim, PLACES
        )[self.phase]

    @property
    def fault(self) -> Fault:
        target, call, _ = self.place
        if self.victim == "driver" and self.kind != "raise":
            return Fault(
                self.kind.replace("Ctrl-Z", "SIGSTOP"),
                "rank 0",
                target,
                call,
                victim="driver",
                resume_after_s=PAUSE_S if self.kind == "Ctrl-Z" else None,
            )
        return Fault(self.kind, self.victim, target, call)

    @property
    def hangs(self) -> bool:
        return self.kind in ("SIGSTOP", "sleep")

    @property
    def is_raised(self) -> bool:
        """By another rank, that noticed."""
        return self.victim == "engine" or self.phase == "sync" and self.hangs

    @property
    def goes_on(self) -> bool:
        """The job: a reward process costs one reward, and a driver that is stopped is waited for."""
        return self.victim == "reward process" or self.kind == "Ctrl-Z"

    @property
    def noticed_after(self) -> tuple[str, float]:
        """The time that must pass first, by name and in seconds."""
        if self.kind == "Ctrl-Z":
            return "the pause", PAUSE_S
        if self.victim == "reward process":
            return ("`--reward-timeout-s`", REWARD_TIMEOUT_S) if self.hangs else ("", 0.0)
        if not self.hangs:
            return "", 0.0
        in_sync, in_call = (
            ("`--reshard-timeout-s`", RESHARD_TIMEOUT_S),
            ("`--call-timeout-s`", CALL_TIMEOUT_S),
        )
        return in_sync if self.phase == "sync" else in_call

    @property
    def limit_s(self) -> float:
        """After `noticed_after`, to the end of everything; of a job that goes on, which then has a step and
        its export before it, too."""
        starting = DRIVER_START_S if self.phase == "join" and self.hangs else 0.0
        return REST_S if self.goes_on else END_WITHIN_S + starting

    @property
    def flags(self) -> list[str]:
        timeouts = [
            "--call-timeout-s",
            f"{CALL_TIMEOUT_S:g}",
            "--reshard-timeout-s",
            f"{RESHARD_TIMEOUT_S:g}",
        ]
        flags = timeouts if self.hangs or self.kind == "Ctrl-Z" else []
        flags += ["--save-interval", "1"] if self.phase == "save" else []
        flags += ["--actor-ranks", "0", "--rollout-ranks", "1"] if self.victim == "engine" else []
        if self.victim == "reward process":
            flags += [
                "--reward-timeout-s",
                f"{REWARD_TIMEOUT_S:g}",
                "--reward-max-failed-share",
                "0.5",
            ]  # all are hit
        return flags

    @property
    def message(self) -> str:
        """A pattern of the one message: who, which method, which step."""
        # of a job in which the first call gets no answer; under Ray it asks all nodes for the run folder
        first = "(actor|data) (setup|read_nonce)"
        place = first if self.phase == "join" and self.hangs else self.place[2]
        role, _, method = place.partition(" ")
        when = " at step [23]" if self.phase == "save" else "" if self.phase in STARTS else f" at step {STEP}"
        rank = {"engine": "1", "driver": ""}.get(self.victim, self.victim[-1])
        if self.goes_on or self.victim == "driver" and self.kind == "SIGKILL":
            return ""
        if self.victim == "driver":
            return rf"\[driver\] failed{when}: RuntimeError: planted fault\nTraceback"
        if self.victim == "engine" and not self.hangs:
            how = "killed by SIGKILL" if self.kind == "SIGKILL" else "planted fault"
            return rf"\[(rollout rank 1|actor rank 0)\] ({method}|send_weights) failed{when}: .*{how}"
        if self.phase == "sync" and self.hangs:
            return (
                rf"\[(rollout|actor) rank 0\] \w+ failed{when}: .*rank 1\] did not take part "
                r"within --reshard-timeout-s"
            )
        if self.kind == "raise":
            return rf"\[{role} rank {rank}\] {method} failed{when}: RuntimeError: planted fault\nTraceback"
        if self.kind == "SIGKILL":
            call = "" if self.phase == "save" else f"{role}.{method}"
            where = f"{when.strip() or 'before the first step'}, waiting for .*{call} on rank "
            waiting = "" if self.phase == "join" else rf".*The job was {where}"
            # torchrun does not tell other nodes why a rank has ended
            return (
                rf"\[rank {rank}: actor, rollout\] (was killed by SIGKILL|has ended on node node\d){waiting}"
            )
        return (
            rf"\[{role}\] {method} timed out{when}: no answer from rank(?=(?s:.*)\[rank 0\] "
            r"(was|does))(?=(?s:.*)\[rank 1\] (was|does))"
        )

    def problems(self, outcome: Outcome, launcher: str = "", patience: float = 1.0) -> list[str]:
        """What is not as it must be. torchrun outlives the driver: its first rank says that the driver has ended,
        and torchrun's exit code is 1.

        Args:
            patience: times the limit, for a machine that has other work to do."""
        exit_code, message = 1, self.message
        if self.goes_on:
            exit_code = 0
        elif (self.kind, self.victim) == ("SIGKILL", "driver"):
            exit_code = 1 if launcher == "torchrun" else -9
            message = (
                r"\[rank 0\] the driver process was killed by signal 9" if launcher == "torchrun" else ""
            )
        found = []
        if (seconds := outcome.seconds - self.noticed_after[1]) > patience * self.limit_s:
            found.append(
                f"over after {outcome.seconds:.1f} s, {seconds:.1f} after it could be noticed; the "
                f"limit is {self.limit_s:g}"
            )
        if outcome.exit_code != exit_code:
            found.append(f"exit code {outcome.exit_code}, not {exit_code}")
        if outcome.orphans:
            found.append(f"orphans: {outcome.orphans}")
        if outcome.shared_memory:
            found.append(f"left in /dev/shm: {outcome.shared_memory}")
        if not re.match(message, outcome.stderr):
            found.append(f"the message is not {message}")
        begins = re.findall(r"^\[(?!rank \d+\] (?:was here|does not say)).*", outcome.stderr, re.MULTILINE)
        if len(begins) != (message != ""):
            found.append(f"{len(begins)} messages: {begins}")
        if (tracebacks := outcome.stderr.count("Traceback (most")) > (self.victim == "engine") + (
            self.kind == "raise" or self.is_raised
        ):
            found.append(f"{tracebacks} tracebacks")
        if self.goes_on and "step=3/3" not in outcome.stdout:
            found.append("the job did not go on to its end")
        return found


CASES = [
    *(
        Case("raise", victim, phase)
        for victim, phase in (
            ("rank 1", "join"),
            ("rank 1", "start"),
            ("rank 1", "rollout"),
            ("rank 0", "reward"),
            ("rank 1", "log-probs"),
            ("rank 0", "update"),
            ("rank 1", "sync"),
            ("rank 0", "save"),
            ("driver", "rollout"),
            ("engine", "rollout"),
        )
    ),
    *(
        Case("SIGKILL", victim, phase)
        for victim, phase in (
            ("rank 1", "join"),
            ("rank 0", "start"),
            ("rank 1", "rollout"),
            ("rank 0", "reward"),
            ("rank 0", "log-probs"),
            ("rank 1", "update"),
            ("rank 1", "sync"),
            ("rank 0", "save"),
            ("driver", "rollout"),
            ("driver", "update"),
            ("engine", "rollout"),
            ("engine", "sync"),
            ("reward process", "reward"),
        )
    ),
    *(
        Case("sleep", victim, phase)
        for victim, phase in (
            ("rank 1", "join"),
            ("rank 1", "rollout"),
            ("rank 0", "update"),
            ("rank 1", "save"),
        )
    ),
    *(
        Case("SIGSTOP", victim, phase)
        for victim, phase in (
            ("rank 0", "rollout"),
            ("rank 1", "update"),
            ("rank 1", "sync"),
            ("engine", "rollout"),
            ("engine", "sync"),
            ("reward process", "reward"),
        )
    ),
    Case("Ctrl-Z", "driver", "update"),
]
QUICK = "SIGKILL-rank_1-rollout"  # of those the one that `make test` runs
ACROSS_NODES = [
    case
    for case in CASES
    if (case.kind, case.victim, case.phase)
    in {
        ("raise", "rank 1", "join"),
        ("raise", "rank 1", "rollout"),
        ("raise", "rank 0", "update"),
        ("raise", "driver", "rollout"),
        ("SIGKILL", "rank 1", "join"),
        ("SIGKILL", "rank 1", "rollout"),
        ("SIGKILL", "rank 1", "update"),
        ("SIGKILL", "rank 1", "sync"),
        ("SIGKILL", "driver", "rollout"),
        ("SIGKILL", "engine", "rollout"),
        ("SIGKILL", "reward process", "reward"),
        ("sleep", "rank 0", "update"),
        ("SIGSTOP", "rank 1", "update"),
        ("SIGSTOP", "rank 1", "sync"),
        ("Ctrl-Z", "driver", "update"),
    }
]
"""Cases that are also run with the two ranks on different nodes: each kind and each victim."""
LAUNCHERS = ("torchrun", "ray")
"""What starts the jobs on two nodes."""
