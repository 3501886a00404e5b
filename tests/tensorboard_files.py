"""Event files of TensorBoard that one test process writes one after the other."""

from __future__ import annotations

import pytest


def number_files_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the numbers of event files have equally many digits.

    TensorBoard reads files in the order of their names: the second, the process, a number. In one process and
    second file 10 would come before file 9, and what it hides of earlier files would be shown."""
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
