"""Faults that raise nothing by themselves, each in a whole job: the job must end within one step, by name.
`pytest tests/faults -m '' --write-table`

A fault acts from step 2 on (tests/faults/planted/silent.py). "By name": the message says what is wrong, and
of which sample or tensor."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.jobs import COMMON, replace_flags
from tests.faults import table
from tests.faults.harness import Job, megarl
from tests.launch import preloaded_python
from tests.faults.planted.silent import PLANTS, STEP

PPO_DISJOINT = (
    "--algorithm",
    "ppo",
    "--critic-lr",
    "1e-2",
    "--actor-ranks",
    "0",
    "--rollout-ranks",
    "0",
    "--critic-ranks",
    "1",
)
ASYNCHRONOUS = (
    *("--staleness", "1"),
    *("--rollout-block-size", "32", "--max-prompt-length", "64"),  # a canary has 68 tokens: two blocks and 4
)
FORKS = (
    "--reward-num-workers",
    "1",
    "--reward-function",
    f"{Path(__file__).parent / 'planted' / 'forking_reward.py'}:lower_case",
)


@dataclass(frozen=True)
class SilentFault:
    """caught_by: what the message says. flags: of the job. quick: in the default suite."""

    name: str
    what: str
    caught_by: str
    flags: tuple[str, ...] = ()
    quick: bool = False

    @property
    def key(self) -> str:
        return f"| {self.what} |"


FAULTS = [
    SilentFault(
        "advantages_reversed",
        "advantages reversed after they were computed",
        "InvariantError: advantages of sample .* written for it",
    ),
    SilentFault(
        "advantages_permuted_in_the_computation",
        "advantages permuted inside the computation",
        "InvariantError: advantages of sample .* its reference says",
        quick=True,
    ),
    SilentFault(
        "rewards_shifted_in_the_pool",
        "rewards shifted by one among the reward processes",
        "InvariantError: the reward of sample .* is that of sample",
    ),
    SilentFault(
        "rewards_shifted_in_the_driver",
        "rewards shifted by one in the driver",
        "InvariantError: the reward of sample .* but its scores make",
    ),
    SilentFault(
        "rewards_shifted_on_the_way",
        "rewards shifted by one between driver and ranks",
        "InvariantError: the reward of sample .* belongs to another sample",
    ),
    SilentFault(
        "forking_reward",
        "a reward function forks and returns in the child",
        "RewardsFailed: .* forked and returned in the child",
        FORKS,
    ),
    SilentFault(
        "columns_swapped_between_meshes",
        "values of equally long samples swapped between critic and actor",
        "InvariantError: values from batch shard 'critic' .* values of sample .* written for it",
        PPO_DISJOINT,
    ),
    SilentFault(
        "columns_swapped_where_they_leave",
        "values of equally long samples sent under each other's number",
        "InvariantError: values from batch shard 'critic' .* values of sample .* written for it",
        PPO_DISJOINT,
    ),
    SilentFault(
        "old_log_probs_of_another_sample",
        "old log-probs of equally long samples swapped",
        "InvariantError: old_log_probs of sample .* written for it",
    ),
    SilentFault(
        "a_token_changed_on_the_way",
        "one token changed between engine and trainer",
        "InvariantError: sample .* its tokens or its mask are not those that the engine made",
    ),
    SilentFault(
        "response_mask_shifted_by_one",
        "response mask shifted by one",
        "InvariantError: sample .* its tokens or its mask are not those that the engine made",
    ),
    SilentFault(
        "a_sample_dropped_from_the_plan",
        "one sample in no mini-batch",
        "InvariantError: sample .* is planned 0 times",
    ),
    SilentFault(
        "a_sample_dropped_on_a_rank",
        "the last sample of each micro-batch not trained on",
        "InvariantError: .*the loss was computed for .* tokens",
    ),
    SilentFault(
        "another_temperature_in_the_update",
        "another temperature in the update only",
        "InvariantError: .*the first update of the step does not reproduce the log-probs computed before it",
    ),
    SilentFault(
        "loss_divided_by_local_counts",
        "loss divided by the counts of one rank or micro-batch",
        "InvariantError: .*the weights that the loss gave",
    ),
    SilentFault(
        "one_tensor_stays_stale",
        "one tensor of the engine not written by a sync",
        "SyncError: .*down_proj.* is not what rank",
        ("--no-reshard-alias",),
    ),
    SilentFault(
        "prefix_cache_stays_stale",
        "prefixes of earlier weights served after a commit",
        "GateError: engine 0 of rollout, weights of version 1, canaries: trainer and engine disagree .*"
        "canary/clipped_abs .*TOO LARGE",
        (*ASYNCHRONOUS, "--weight-update", "keep"),
    ),
    SilentFault(
        "version_stays_the_old_one",
        "a commit does not change the engine's version",
        "InvariantError: engine 0 of rollout has sampled its canaries by version 0 of the weights, and the "
        "trainer's weights are version 1",
        ASYNCHRONOUS,
    ),
    SilentFault(
        "one_engine_stays_stale",
        "one engine of two goes on with its old weights",
        "GateError: engine 1 of rollout, weights of version 1, canaries: trainer and engine disagree",
        (*ASYNCHRONOUS, "--no-reshard-alias"),
    ),
    SilentFault(
        "a_canary_skipped",
        "one engine samples a canary less",
        "InvariantError: engine 1 of rollout has delivered 3 of 4 canaries of version 1",
        ASYNCHRONOUS,
    ),
    SilentFault(
        "a_token_of_another_version",
        "one token's version wrong where it was sampled",
        "InvariantError: sample .* versions must not decrease within a response",
        ASYNCHRONOUS,
    ),
    SilentFault(
        "a_group_reported_twice",
        "a group that was trained on comes again",
        "SampleBufferError: sample .* (belongs to no prompt that is being sampled|was sampled more than once)",
        ASYNCHRONOUS,
    ),
]
SILENT = table.Table(
    ("| silent fault | caught by | after |", "|---|---|---|"), 1, [fault.key for fault in FAULTS]
)


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.name, marks=[] if f.quick else [pytest.mark.nightly]) for f in FAULTS]
)
def test_a_silent_fault_ends_the_job_by_name_within_one_step(
    fault: SilentFault, sums_data, tmp_path, request
):
    data = ["--model", str(sums_data / "model"), "--train-data", str(sums_data / "train.jsonl")]
    arguments = replace_flags([*COMMON, *data, "--save", str(tmp_path / "run")], list(fault.flags))
    planted, hit = Path(__file__).parent / "planted", tmp_path / "hit"
    job = Job(
        tmp_path,
        [preloaded_python(), *megarl("train", arguments)[1:]],
        env={"PYTHONPATH": str(planted), "SILENT_FAULT": fault.name, "SILENT_HIT": str(hit)},
    )
    try:
        exit_code = job.launcher.wait(240)
    except subprocess.TimeoutExpired:
        exit_code = None
    finally:
        job.end()
    said, output = job.stderr(), (tmp_path / "stdout").read_text()
    assert hit.exists(), f"the fault was not planted:\n{said}\n{output}"
    assert exit_code == 1, f"exit code {exit_code}:\n{said}\n{output}"
    assert re.search(fault.caught_by, said.split("Traceback")[0], re.DOTALL), said
    message = re.search(r"^\[.*?\] (?:\w+ )?failed at step (\d+).*", said, re.MULTILINE)
    step = int(message[1])
    assert STEP <= step <= STEP + 1, said
    assert f"step={STEP - 1}/3" in output  # what was before the fault went well
    if request.config.getoption("write_table", False):
        after = "in the same step" if step == STEP else "one step"
        SILENT.write(
            fault.key,
            f"{fault.key} {table.quoted(message[0].replace('megarl.invariants.', ''), 240)} | {after} |",
        )


def test_every_silent_fault_is_planted_measured_and_documented():
    assert {f.name for f in FAULTS} == {*PLANTS, "forking_reward"}
    documented = SILENT.rows()
    assert list(documented) == [fault.key for fault in FAULTS]
    for fault, row in zip(FAULTS, documented.values(), strict=True):
        assert row.endswith(("| in the same step |", "| one step |")), fault.name
