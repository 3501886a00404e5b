"""Run as two processes: updates of an actor on both ranks and of a critic on one, in steps in which rewards
fail.

    run_failed_rewards.py FOLDER RANK DATA

Each case is two steps by the real roles: one without a failure, so that actor, reference and critic differ,
then one in which all rewards of the second mini-batch fail, and one reward of the first. FOLDER/<case>/ gets
the weights between the two (actor/, critic/) and step.json: the samples, which mini-batch each is in, and the
metrics of the second step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from role_steps import Step, build, main, make_rows

CASES = {
    "sequences": "--loss-aggregation seq-mean-token-mean --entropy-coef 0.02 --kl-mode loss "
    "--kl-coef 0.3 --kl-estimator k2 --tis-clip 1.5",
    "tokens": "--loss-aggregation token-mean --kl-mode reward --kl-coef 0.1 --value-clip-eps none",
}
PLACED = (
    "--algorithm ppo --actor-lr 1e-2 --critic-lr 1e-2 --actor-ranks 0-1 --critic-ranks 1 "
    "--reference-ranks 0-1 --rollout-ranks 0-1"
)


def run(folder: Path, data: Path) -> None:
    for case, flags in CASES.items():
        roles, meshes = build(f"{PLACED} {flags}", data, folder / case / "run")
        Step(roles, meshes, make_rows(1), seed=1).learn()
        for name in ("actor", "critic"):
            if name in roles:
                roles[name].export_hf(str(folder / case / name))
        rows = make_rows(2)
        step = Step(roles, meshes, rows, seed=2)
        first = [r for r in rows if step.mini_batch_of[r["sample"]] == 0]
        for row in rows:
            row |= {"mini_batch": step.mini_batch_of[row["sample"]]}
            if row["mini_batch"] == 1 or row is first[2]:
                row["reward"] = None
        found = {"rows": rows, "metrics": step.learn()}
        if dist.get_rank() == 0:
            (folder / case / "step.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(run)
