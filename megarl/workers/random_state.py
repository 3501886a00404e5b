"""Save and restore the random number generators of a rank for the driver."""

from __future__ import annotations

from collections.abc import Mapping


class RandomStateOfRank:
    """Gives the driver access to a rank's random number generators. It is a base class of the role that is on
    every rank.

    That role is data or, in supervised fine-tuning, the actor."""

    def random_state(self) -> dict[str, str]:
        """Return the state of this process's random number generators as text by name."""
        from megarl.megatron.random_state import random_state

        return random_state()

    def set_random_state(self, state: Mapping[str, str]) -> None:
        from megarl.megatron.random_state import set_random_state

        set_random_state(state)
