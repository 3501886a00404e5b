"""Log to TensorBoard event files in <run folder>/tensorboard, by torch's own writer."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.loggers.base import LoggerContext, Metrics, Purpose, Samples, flags_of


class TensorBoard:
    """Logs scalars by metric name, samples as texts, and flags as hyper-parameters.

    Every call is flushed, so that TensorBoard follows the run. In a resumed run TensorBoard hides what
    earlier files hold of the steps that are made again (`purge_step`)."""

    def __init__(self, context: LoggerContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(context.folder / "tensorboard", purge_step=context.first_step)

    def log_config(self, arguments: str) -> None:
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(flags_of(arguments), {}):
            self._writer.file_writer.add_summary(summary)
        self._writer.add_text("arguments", _code_block(arguments))
        self._writer.flush()

    def log_metrics(self, step: int, metrics: Metrics, wall_time: float) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, wall_time)
        self._writer.flush()

    def log_rollouts(self, step: int, samples: Samples, purpose: Purpose) -> None:
        for number, sample in enumerate(samples):
            self._writer.add_text(
                f"rollouts/{sample.get('name', number)}", _code_block(_readable(sample)), step
            )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _readable(sample: Mapping[str, object]) -> str:
    """Return one sample as lines of `name: value`, without its token ids."""
    return "\n".join(f"{name}: {value}" for name, value in sample.items() if not name.endswith("_ids"))


def _code_block(text: str) -> str:
    """Return Markdown that shows a text as it is: TensorBoard renders texts as Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())
