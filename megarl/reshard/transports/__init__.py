"""How weights get from one process to another; one file per way, and `choose` says which pair of ranks takes
which.

    direct          within a process: one copy
    shared-memory   same node, CPU: the source's storage lies in shared memory, the destination maps it and copies out of it
    cuda-ipc        same node, GPU: the destination opens the source's allocation and copies out of it
    messages        otherwise: torch.distributed (`transfer.Transfer`)

Except for messages the destination *pulls*: the source exports where its weights lie, once (`exported`), and
then only says when a version is complete. vLLM's memory is never exported: it may be unmapped by its sleep
mode, and CUDA cannot share it."""
