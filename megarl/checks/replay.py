"""Check that --replay names a run that this job can repeat."""

from __future__ import annotations

from pathlib import Path

from megarl.config.errors import Errors
from megarl.config.schema import TrainConfig
from megarl.rollout.replay_log import DriverPlan, ReplayError
from megarl.rollout.replay_settings import replay_settings


def replay_errors(config: TrainConfig, world_size: int) -> Errors:
    """Yield an error if the run of --replay has no readable log, or other settings than this job."""
    run = config.streaming.replay
    if run is not None:
        try:
            DriverPlan.read(Path(run), replay_settings(config, world_size))
        except ReplayError as error:
            yield f"--replay ({run}): {error}"
