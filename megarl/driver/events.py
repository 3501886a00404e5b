"""TensorBoard event files by tensorboard's own record writer. `torch.utils.tensorboard` would import torch for it."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path


class EventFile:
    """One file of scalars. Every call is flushed, so that TensorBoard follows the run.

    Args:
        first_step: of a run that goes on: what other files of the folder have of this step and later ones counts no more."""

    def __init__(self, folder: Path, first_step: int | None = None):
        from tensorboard.compat.proto import event_pb2, summary_pb2  # 0.2 s
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"  # TensorBoard reads files in the order of their names
        self._file = open(
            next(path for n in itertools.count() if not (path := folder / f"{name}.{n}").exists()), "xb"
        )
        self._records = RecordWriter(self._file)
        self._add(self._event(wall_time=now, file_version="brain.Event:2"))
        if first_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(self._event(wall_time=now, step=first_step, session_log=start))

    def add_scalars(self, step: int, scalars: Mapping[str, float], wall_time: float) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(self._event(wall_time=wall_time, step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._records.close()

    def _add(self, event: object) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()
