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


def loss_not_finite() -> None:
    """Of the third update (with two a step, the first of the second step), on rank 1."""
    _multiply_a_loss(Policy)


def value_loss_not_finite() -> None:
    """The same of the critic."""
    from megarl.megatron.value_model import ValueModel

    _multiply_a_loss(ValueModel)


def _multiply_a_loss(model: type) -> None:
    import torch.distributed as dist

    original, updates = model.update, []

    def update(self, micro_batches, loss, *arguments):
        updates.append(None)

        def planted(*of_micro):
            value, metrics = loss(*of_micro)
            return value * float("nan"), metrics

        return original(
            self, micro_batches, planted if len(updates) == 3 and dist.get_rank() == 1 else loss, *arguments
        )

    model.update = update


def engine_step_fails() -> None:
    """The 5th step that an engine takes between calls (--staleness)."""
    from megarl.workers.request_stream import RequestStream

    original, steps = RequestStream.step, []

    def step(self):
        steps.append(None)
        if len(steps) == 5:
            raise RuntimeError("planted")
        original(self)

    RequestStream.step = step


FAULTS = {
    f.__name__: f
    for f in (
        temperature_not_applied,
        labels_off_by_one,
        stale_shard,
        loss_not_finite,
        value_loss_not_finite,
        engine_step_fails,
    )
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
