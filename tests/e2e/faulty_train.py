"""megarl.train with one fault planted in the workers: each is a real bug that other trainers have shipped."""

from __future__ import annotations

import sys

import megarl.batch
from megarl.megatron.policy import Policy
from megarl.train import main


def temperature_not_applied() -> None:
    original = Policy.log_probs
    Policy.log_probs = lambda self, micro_batches, temperature: original(self, micro_batches, 1.0)


def labels_off_by_one() -> None:
    megarl.batch.MicroBatch.predict_positions = property(lambda self: self.response_positions)


def stale_shard() -> None:
    """After the first sync one of the engine's weights is never written again."""
    from megarl.rollout.environment import prepare_environment

    prepare_environment()
    from megarl.rollout.weight_transfer import MegarlWeightTransferEngine

    original, syncs = MegarlWeightTransferEngine.receive_weights, []

    def receive_weights(self, update_info):
        weight = next(tensor for name, tensor in self.tensors.items() if "down_proj" in name)
        before = weight.clone()
        original(self, update_info)
        syncs.append(None)
        if len(syncs) > 1:
            weight.copy_(before)

    MegarlWeightTransferEngine.receive_weights = receive_weights


FAULTS = {f.__name__: f for f in (temperature_not_applied, labels_off_by_one, stale_shard)}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
