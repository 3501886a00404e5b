"""megarl.train with one fault planted in the workers: each is a real bug that other trainers have shipped."""

from __future__ import annotations

import sys

import megarl.batch
from megarl.megatron.policy import Policy
from megarl.reshard.transfer import Transfer
from megarl.train import main


def temperature_not_applied() -> None:
    original = Policy.log_probs
    Policy.log_probs = lambda self, micro_batches, temperature: original(self, micro_batches, 1.0)


def labels_off_by_one() -> None:
    megarl.batch.MicroBatch.predict_positions = property(lambda self: self.response_positions)


def stale_shard() -> None:
    """After the first sync one local parameter is never copied again."""
    original, runs = Transfer.run, []

    def run(self):
        runs.append(None)
        if len(runs) > 1:
            name, tensor = next((n, t) for n, t in self.dst_tensors.items() if "down_proj" in n)
            before = tensor.clone()
            result = original(self)
            tensor.copy_(before)
            return result
        return original(self)

    Transfer.run = run


FAULTS = {f.__name__: f for f in (temperature_not_applied, labels_off_by_one, stale_shard)}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
