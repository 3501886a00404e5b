"""Word the command that resumes a job after Ctrl-C or SIGTERM, as one can paste it into a shell."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.config.args_file import is_flag
from megarl.config.rules_files import RUN_FILES, free_name, goes_on, is_savable
from megarl.config.schema import TrainConfig
from megarl.files.checkpoints import checkpoints_in, step_of
from megarl.runtime.process_tree import agent_of
from megarl.runtime.end_message import EndNotes
from megarl.trainer.failed_step import how_to_see_samples

FAILURE_LOG = "failure.log"
"""File of the run folder that holds the tracebacks which the driver's messages leave out."""


def end_notes(config: TrainConfig, command: Sequence[str], argv: Sequence[str]) -> EndNotes:
    """Return what the last message of a training job needs: the log of failures, and the commands that resume
    the job and show a failed step's samples.

    Args:
        command: words of the command line before the flags, such as megarl and train.
        argv: flags and @files of the command line."""
    return EndNotes(
        Path(config.run.save) / FAILURE_LOG,
        lambda has_begun: how_to_resume(config, command, argv, has_begun),
        how_to_see_samples(Path(config.run.save)),
    )


def how_to_resume(config: TrainConfig, command: Sequence[str], argv: Sequence[str], has_begun: bool) -> str:
    """Return two lines: where a stopped job can go on, and the command that does it.

    Args:
        has_begun: whether a step of the job had begun."""
    run, load = config.run.save, config.checkpoint.load
    found = checkpoints_in(Path(run))
    replaced: dict[str, str] = {} if load is None else {"load": load}
    if not has_begun:
        head = "No step has begun. To start again:"
    elif found:
        head, replaced = f"To go on after step {step_of(found[0])}:", {"load": run}
    else:
        head = "There is no checkpoint yet (--save-interval writes them). To start anew:"
        if not is_savable(config):
            head = "The state of --optimizer-cpu-offload cannot be saved in a checkpoint. To start anew:"
        if load is not None and not goes_on(config):  # the folder that --save names holds this run already
            head = f"{head.removesuffix('To start anew:')}To start again from {load}:"
            is_taken = any((Path(run) / name).exists() for name in RUN_FILES)
            replaced = {"load": load, **({"save": str(free_name(Path(run)))} if is_taken else {})}
        elif is_savable(config):
            replaced = {"load": run}
        else:
            replaced = {"save": str(free_name(Path(run)))}
    return f"{head}\n  {shlex.join([*command, *with_flags(argv, replaced)])}"


def with_flags(argv: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return a command line with each of these flags given once: the new values replace those in `argv`.

    Flags in args files stay, because the command line overrides them.

    Example: with_flags(["@a.args", "--load", "old", "--lr", "1"], {"load": "new"}) gives
    ["@a.args", "--lr", "1", "--load", "new"]."""
    kept, is_left_out = [], False
    for word in argv:
        if is_flag(word):
            is_left_out = word.removeprefix("--").partition("=")[0] in values
        elif word.startswith("@"):
            is_left_out = False
        if not is_left_out:
            kept.append(word)
    for name, value in values.items():
        is_plain = not is_flag(value) and not value.startswith("@") and value != "none"
        kept += [f"--{name}", value] if is_plain else [f"--{name}={value}"]
    return kept


def torchrun_command(argv: Sequence[str]) -> list[str]:
    """Return the words with which torchrun was started on this node, up to the job's own flags.

    Read from /proc, in the driver process that rank 0 has started: torchrun has started rank 0. If its
    command line does not end with the flags, a plain command for all ranks is returned."""
    try:
        torchrun = agent_of(os.getppid())
        words = Path(f"/proc/{torchrun}/cmdline").read_text().rstrip("\0").split("\0")
    except (OSError, ValueError):  # ended meanwhile, or not UTF-8
        words = []
    start = len(words) - len(argv)
    if start > 1 and words[start:] == list(argv):
        return words[1:start] if Path(words[1]).name == "torchrun" else words[:start]
    return ["torchrun", "--nproc-per-node", os.environ["MEGARL_WORLD_SIZE"], "-m", "megarl.train"]
