"""The random number generators of a rank, as the driver asks for them."""

from __future__ import annotations

from collections.abc import Mapping


class RandomStateOfRank:
    """For the role that is on every rank of a job: data, or of supervised fine-tuning the actor."""

    def random_state(self) -> dict[str, str]:
        """Of this process; see `megatron.random_state`."""
        from megarl.megatron.random_state import random_state

        return random_state()

    def set_random_state(self, state: Mapping[str, str]) -> None:
        from megarl.megatron.random_state import set_random_state

        set_random_state(state)
