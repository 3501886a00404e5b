"""Run torchrun so that a node may take the place of one that was lost.

    python -m megarl.runtime.torchrun_agent --nnodes 2 --max-restarts 3 ... -m megarl.train @job.args

torchrun's agent on the node of rank 0 has the store of the ranks. In torch 2.13 it publishes the store's
address at its first rendezvous only, and other agents keep the address that they have read. After a restart a
new node waits for an address that nobody publishes, and all agents end after 60 s. Here every rendezvous
makes a new store, and its address is published and read anew. Ranks also learn from it which attempt this is,
by a number that is the same on all nodes, and by which start of torchrun."""

from __future__ import annotations

import os
import secrets

from torch.distributed import Store, run
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from megarl.runtime.process import ATTEMPT, LAUNCHER


def launcher_name(store: Store, run_id: str) -> str:
    """Return a name that all agents of one start of torchrun share, and that no other start has.

    Args:
        store: the rendezvous's store. It ends with the agent of the head, so another start has another store,
            even with the same id and the same secret."""
    name: bytes = store.compare_set(f"megarl/{run_id}/launcher", "", secrets.token_hex(16))
    return name.decode()


def change_the_rendezvous() -> None:
    """Let agents forget the ranks' store before each rendezvous, and note its number and torchrun's name for
    their ranks."""
    rendezvous = DynamicRendezvousHandler.next_rendezvous

    def next_rendezvous(handler: DynamicRendezvousHandler) -> RendezvousInfo:
        handler._bootstrap_store_info = None
        joined = rendezvous(handler)
        os.environ[ATTEMPT] = str(handler._state_holder.state.round)
        os.environ[LAUNCHER] = launcher_name(handler._store, handler.settings.run_id)
        return joined

    DynamicRendezvousHandler.next_rendezvous = next_rendezvous


if __name__ == "__main__":
    change_the_rendezvous()
    run.main()
