"""The contract on ranks that are processes: `python -m contract_job FOLDER [ray] [ENDS]` starts them itself;
`torchrun -m contract_job FOLDER` is ranks with a driver beside the first. What each check found goes to
FOLDER/found.json."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import executor_contract as contract

WORLD_SIZE, CALL_TIMEOUT_S = 2, 60.0
RANKS = contract.ranks_of(WORLD_SIZE)


def rank_main(folder: str) -> int:
    from megarl.runtime.mailbox import connect, world_store
    from megarl.runtime.process import DRIVER_PID, end_on_signals, end_with_parent
    from megarl.runtime.torchrun import start_driver
    from megarl.runtime.worker_loop import serve

    end_on_signals()
    rank, driver_pid = int(os.environ["RANK"]), os.environ.get(DRIVER_PID)
    if driver_pid:
        end_with_parent(int(driver_pid))
    driver = start_driver([folder], module="contract_job") if rank == 0 and not driver_pid else None
    agree = StoreAgreement(rank, world_store(30.0))
    return serve(
        lambda context: contract.build_roles(context, RANKS, agree), rank, connect(timeout_s=30), driver
    )


class StoreAgreement:
    """Gives all ranks the first one's value, call by call."""

    def __init__(self, rank: int, store):
        self.rank, self.store, self.number = rank, store, 0

    def __call__(self, value: bool) -> bool:
        self.number += 1
        if self.rank == 0:
            self.store.set(f"agree/{self.number}", str(int(value)))
            self.store.get(f"taken/{self.number}")  # as in a collective: the first rank must not run ahead
            return value
        agreed = self.store.get(f"agree/{self.number}") == b"1"
        self.store.set(f"taken/{self.number}", "1")
        return agreed


def beside_torchrun(executor, folder: Path) -> None:
    found = {check.__name__: contract._outcome(check, executor) for check in contract.CHECKS}
    (folder / "found.json").write_text(json.dumps(found))
    found["raises"] = contract.run_failure(executor, "raises")
    (folder / "found.json").write_text(json.dumps(found))
    raise executor.failure


def local_ranks(argv: list[str]):
    from megarl.runtime.local_ranks import LocalRanks

    return LocalRanks(argv, WORLD_SIZE, "contract_job")


def ray_ranks(argv: list[str]):
    from megarl.runtime.ray_ranks import RayRanks

    return RayRanks(argv, 1, WORLD_SIZE, "local", "contract_job")


def on_own_ranks(folder: Path, make, ends: Sequence[str]) -> None:
    """One job after another: one that ends well, then one for each of these failures, which a store executor
    adds to what all executors share."""
    from megarl.runtime.local_ranks import started

    found, pids = {}, []

    def job(run, name: str) -> None:
        have_begun = False
        try:
            processes = make([str(folder)])
            with started(processes, RANKS, CALL_TIMEOUT_S, contract.INTERFACES) as executor:
                pids.extend(executor.call("both", "pid").result())
                have_begun = True
                found.update(run(executor))
                if executor.failure is not None:
                    raise executor.failure
        except RuntimeError as error:
            if not have_begun:
                raise
            found[f"end of {name}"] = None if error is executor.failure else repr(error)
        found[f"processes left by {name}"] = (
            str(left) if (left := [p for p in pids if Path(f"/proc/{p}").exists()]) else None
        )

    job(contract.run, "a whole job")
    for name in ends:
        job(lambda executor: {name: contract.run_failure(executor, name)}, name)
    (folder / "found.json").write_text(json.dumps(found))


def main(folder: str, started_by: str = "", ends: str = "") -> int:
    if "RANK" in os.environ:
        return rank_main(folder)
    if "MEGARL_STORE" in os.environ:
        from megarl.runtime.torchrun import run_driver

        return run_driver(
            lambda executor: beside_torchrun(executor, Path(folder)),
            RANKS,
            CALL_TIMEOUT_S,
            contract.INTERFACES,
        )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if started_by == "ray":  # one for all jobs, which leave a Ray that they have found
        import ray

        os.environ["RAY_worker_niceness"] = "0"  # 15: on a busy machine the ranks would not start in minutes
        ray.init(address="local", num_cpus=WORLD_SIZE, include_dashboard=False, logging_level="error")
    on_own_ranks(
        Path(folder), ray_ranks if started_by == "ray" else local_ranks, ends.split(",") if ends else ()
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
