"""Move weights from one process to another.

There is one file per transport, and `choose` picks a transport for a pair of ranks.

    direct          within a process: one copy
    shared-memory   same node, CPU: the source's storage lies in shared memory; the destination maps it and
                    copies out of it
    cuda-ipc        same node, GPU: the destination opens the source's allocation and copies out of it
    messages        otherwise: torch.distributed (`transfer.Transfer`)

Except for messages the destination *pulls*. The source exports the location of its weights once (`exported`)
and then only announces that a version is complete. vLLM's memory is never exported: its sleep mode may unmap
the memory, and CUDA cannot share it."""
