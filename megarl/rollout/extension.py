"""Define the methods that a rank calls in vLLM workers of other processes.

vLLM mixes them into its worker class (its `worker_extension_cls` argument), and `collective_rpc` calls them
by name. Arguments and results are plain values, because vLLM would pickle others."""

from __future__ import annotations

from megarl.messages import encode


class WorkerExtension:
    def megarl_weights(self) -> dict[str, tuple[list[int], str]]:
        """Return [rows, cols] and dtype of each weight that a sync writes on this rank, by name."""
        tensors = self.weight_transfer_engine.tensors
        return {
            name: (list(view.shape), str(view.dtype).removeprefix("torch.")) for name, view in tensors.items()
        }

    def megarl_atlas(self) -> bytes:
        """Return this rank's atlas, encoded as bytes: which part of which Hugging Face tensor each weight
        holds."""
        return encode(self.weight_transfer_engine.atlas)

    def megarl_wait_for_weights(self, timeout_s: float) -> tuple[str | None, int]:
        """Wait for the copies that update_weights started. Returns (error or None, bytes written)."""
        outcome = self.weight_transfer_engine.puller.wait(timeout_s)
        return outcome.problem, outcome.bytes

    def megarl_give_up_weights(self) -> None:
        """Abandon the copies, so that finish_weight_update changes nothing."""
        self.weight_transfer_engine.puller.give_up()
