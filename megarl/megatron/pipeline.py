"""Run micro-batches through Megatron's pipeline schedules.

The schedules are a single stage, a pipeline (1F1B), and an interleaved pipeline whose stages hold several
chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megarl.batch import MicroBatch
from megarl.megatron.cpu_shim import cpu_megatron
from megarl.megatron.fixes import backward_ranges

with cpu_megatron():
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_no_pipelining,
        forward_backward_pipelining_with_interleaving,
        forward_backward_pipelining_without_interleaving,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig


@backward_ranges()
def run_schedule(
    chunks: list[torch.nn.Module],
    forward_step: Callable,
    micro_batches: list[MicroBatch],
    forward_only: bool,
    groups: ProcessGroupCollection,
    config: TransformerConfig,
) -> list:
    """Run Megatron's schedule and return a list of what the last stage collected of each micro-batch; [] on
    earlier stages.

    Collective over the mesh.

    Args:
        chunks: this rank's model, or each of its chunks. They are wrapped by DDP unless forward_only."""
    arguments = dict(
        forward_step_func=forward_step,
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        pg_collection=groups,
    )
    if groups.pp.size() > 1:
        arguments["p2p_communicator"] = p2p_communication.P2PCommunicator(groups.pp, config)
    if len(chunks) == 1:
        schedule = (
            forward_backward_no_pipelining
            if groups.pp.size() == 1
            else forward_backward_pipelining_without_interleaving
        )
        return schedule(
            model=chunks, data_iterator=iter(micro_batches), num_microbatches=len(micro_batches), **arguments
        )
    # The chunks take turns after as many micro-batches as there are stages. Empty micro-batches fill an
    # incomplete turn.
    fill = -len(micro_batches) % groups.pp.size()
    filled = micro_batches + [MicroBatch.of(micro_batches[0].batch.select_samples([]))] * fill
    collected = forward_backward_pipelining_with_interleaving(
        model=chunks, data_iterator=[iter(filled) for _ in chunks], num_microbatches=len(filled), **arguments
    )
    return collected[: len(micro_batches)]
