"""Implement the console command `megarl` and its subcommands.

Every subcommand reads the configuration first and reports all of its errors. Only training and evaluation
import torch."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import megarl
from megarl.config.errors import ConfigError, did_you_mean, raise_errors
from megarl.runtime.process import exit_on_signals, ignore_signals_for_good, open_standard_streams
from megarl.runtime.signing import SecretError

if TYPE_CHECKING:
    from megarl.config.mesh import MeshSpec
    from megarl.config.schema import TrainConfig

USAGE = """\
usage: megarl <command> [@file.args ...] [--flag value ...]

  new        Lay out a task of your own, to edit: `megarl new my-task`.
  tiny-model  Write a tiny model with random weights and a tokenizer: `megarl tiny-model --help`.
  train      Train; starts as many ranks as --nproc-per-node says.
  eval       Evaluate a model: `megarl eval --model RUN`; `megarl eval --help`.
  convert    Convert models and checkpoints: `megarl convert --help`.
  check      Report all errors of a job, and what memory and disk it needs, without touching a device.
             With --gpu-memory GB as on GPUs of that size, wherever it is run.
  algorithms  List the algorithms, policy losses and corrections with their papers and flags.
  graph      Print the flow of a step of a configuration, or draw it:
             `megarl graph @file.args --svg step.svg`.
  translate  Print the args file of a verl, TRL or slime configuration: `megarl translate grpo.yaml`.
  show       Show samples of a run, such as the best and the worst: `megarl show --help`.
  plot       Draw the curves of one or several runs into a picture: `megarl plot --help`.
  balance    Say which --staleness and how many rollout ranks a run should have: `megarl balance RUN`.
  data       Show data files as the model will see them: `megarl data --help`.
  chat       Talk to a model, in a terminal or through a pipe: `megarl chat --help`.
  env-serve  Serve environments to jobs on other hosts: `megarl env-serve --help`.
  engines    Show the engines of a running job, and start one again that has ended:
             `megarl engines --help`.
  doctor     Show what this installation and machine have, and try the parts (about 15 s);
             `megarl doctor --json` for programs. With --nnodes N --head HOST, on each of N machines:
             whether they fit together.
  reshard-plan   What a weight sync of a configuration moves: `megarl reshard-plan --help`.

  megarl train --help     every flag
  megarl --version        the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    The code is 0; 1 if the job failed; 2 if it cannot start; 130 after Ctrl-C; 143 after SIGTERM. Without
    `argv` this process is the command, and signals are handled until the process ends."""
    if argv is not None:
        return _run(argv)
    open_standard_streams()
    exit_on_signals(signal.SIGTERM)  # until the command has something to undo
    try:
        try:
            return _run(sys.argv[1:])
        finally:
            ignore_signals_for_good()
    except KeyboardInterrupt:  # a second one, or one that came when the command was done
        ignore_signals_for_good()
        return 130


def _run(argv: Sequence[str]) -> int:
    command, *rest = list(argv) or ["--help"]
    if command in ("--help", "-h", "--version"):
        sys.stdout.write(f"megarl {megarl.__version__}\n" if command == "--version" else USAGE)
        return 0
    if command not in COMMANDS:
        sys.stderr.write(
            f"megarl {command}: no such command.{did_you_mean(command, COMMANDS, prefix='')}\n{USAGE}"
        )
        return 2
    try:
        return COMMANDS[command](rest)
    except (ConfigError, SecretError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def train(argv: list[str]) -> int:
    """Check the job as `megarl check` does, run it in this process or on ranks that it starts, and return the
    exit code."""
    from megarl.trainer.executors import has_rank_processes
    from megarl.trainer.worker_check import CHECK_AND_TRY, checked_on_worker

    _refuse_rank()
    from megarl.checks.job import check_everything

    config = _load(argv, "megarl train")
    placement = config.placement
    if placement.nnodes > 1 and placement.executor == "torchrun":
        raise ConfigError(
            [
                f"--nnodes ({placement.nnodes}): megarl train starts ranks on this machine only. Try --executor "
                f"ray, or on every node torchrun --nnodes {placement.nnodes} --nproc-per-node "
                f"{placement.nproc_per_node} ... -m megarl.train with the same arguments."
            ]
        )
    code = checked_on_worker(config, CHECK_AND_TRY, argv)
    if code:
        return code
    if code is None:
        check_everything(config, config.placement.world_size)
    if not has_rank_processes(config):
        from megarl.train import run_in_process

        return run_in_process(config, argv=argv)
    from megarl.trainer.__main__ import train_job
    from megarl.trainer.launch import launch

    return launch(config, argv, train_job, is_checked=code is not None)


def _refuse_rank() -> None:
    rank = os.environ.get("RANK")
    if rank is not None:
        raise ConfigError(
            [
                f"RANK ({rank}): is set in the environment, as torchrun does, but megarl train starts the "
                "ranks itself. Try env -u RANK megarl train ..., or torchrun ... -m megarl.train ..."
            ]
        )


def evaluate(argv: list[str]) -> int:
    """Check an evaluation, run it, and return the exit code."""
    from megarl.evaluation.command import main as evaluate_here

    return evaluate_here(argv)


def convert(argv: list[str]) -> int:
    from megarl.convert import main as convert_here

    return convert_here(argv)


def check(argv: list[str]) -> int:
    """Print a summary of the job that begins with 'ok' or 'not ok'. Returns 0, or raises ConfigError with all
    errors of the job."""
    _refuse_rank()
    from megarl.checks.job import examine
    from megarl.checks.machine import Machine
    from megarl.inspect.arguments import Parser, number
    from megarl.trainer.worker_check import checked_on_worker

    parser = Parser("check", "", add_help=False)  # --help lists the flags of the job
    parser.add_argument("--gpu-memory", type=number(0.001, 80, at_most=100_000), metavar="GB")
    options, rest = parser.parse_known_args(argv)
    config = _load(rest, "megarl check [--gpu-memory GB]")
    if options.gpu_memory is None:
        code = checked_on_worker(config, "megarl.cli", ["check", *rest])
        if code is not None:
            return code
    machine = (
        None
        if options.gpu_memory is None
        else Machine(None, has_gpu=True, gpu_bytes=int(options.gpu_memory * 1e9), is_this=False)
    )
    report = examine(config, config.placement.world_size, machine=machine, calls_reward=machine is None)
    sys.stdout.write("".join(f"{line}\n" for line in report.lines))
    sys.stdout.flush()  # so that it precedes the errors if both go to one file
    raise_errors([*report.errors, *report.estimates], report.is_complete)
    return 0


def reshard_plan(argv: list[str]) -> int:
    """Print which bytes a weight sync of a configuration moves between which ranks, and return 0.

    Only the model's config.json must exist, but no run folder or data."""
    from megarl.config.flags import algorithm_name
    from megarl.config.hf_config import ModelShape
    from megarl.config.mesh import engine_mode
    from megarl.config.roles import configs_of_actors
    from megarl.reshard.report import parse, report

    options, rest = parse(argv)
    config, meshes = _load_layout(rest, "megarl reshard-plan", options.world_size)
    if "rollout" not in meshes:
        name = algorithm_name(type(config.algorithm))
        rule = "has no rollout engine, so no weights are synced. Try --algorithm grpo."
        raise ConfigError([f"--algorithm ({name}): {rule}"])
    mode = engine_mode(config, options.world_size or config.placement.world_size)
    for suffix, of_actor in configs_of_actors(config).items():
        shape = ModelShape.load(of_actor.model.model)
        sys.stdout.write(f"actor{suffix}\n" if suffix else "")
        actor, engines = meshes[f"actor{suffix}"], meshes[f"rollout{suffix}"]
        sys.stdout.write(report(of_actor, shape, actor, engines, mode, options))
    return 0


def graph(argv: list[str]) -> int:
    """Print the flow of one step of a configuration; with --svg draw it too. Needs the model's config.json
    only."""
    parser = argparse.ArgumentParser("megarl graph", description=graph.__doc__, allow_abbrev=False)
    parser.add_argument("--svg", metavar="FILE", help="draw the flow into this file")
    options, rest = parser.parse_known_args(argv)
    config, meshes = _load_layout(rest, "megarl graph")
    from megarl.algorithms.flows import flow_of_actors

    flow = flow_of_actors(config, meshes)
    if options.svg is not None:
        try:
            Path(options.svg).write_text(flow.svg(meshes))
        except OSError as error:
            text = f"--svg ({options.svg}): cannot be written: {error.strerror}."
            raise ConfigError([f"{text} Name a file in a folder that exists."]) from error
    sys.stdout.write(flow.text(meshes))
    return 0


def translate(argv: list[str]) -> int:
    """Print the args file of another framework's configuration."""
    from megarl.translate.command import main as translate_here

    return translate_here(argv)


def doctor(argv: list[str]) -> int:
    from megarl.doctor.report import main as examine

    return examine(argv)


def show(argv: list[str]) -> int:
    from megarl.inspect.show import main as show_samples

    return show_samples(argv)


def plot(argv: list[str]) -> int:
    from megarl.inspect.plot import main as draw_curves

    return draw_curves(argv)


def engines(argv: list[str]) -> int:
    from megarl.inspect.engines import main as engines_of_run

    return engines_of_run(argv)


def balance(argv: list[str]) -> int:
    from megarl.inspect.balance import main as balance_phases

    return balance_phases(argv)


def data(argv: list[str]) -> int:
    from megarl.inspect.data import main as show_data

    return show_data(argv)


def chat(argv: list[str]) -> int:
    from megarl.inspect.chat import main as talk

    return talk(argv)


def env_serve(argv: list[str]) -> int:
    from megarl.env_serve import main as serve

    return serve(argv)


def new(argv: list[str]) -> int:
    """Lay out a task of the user's own in a new folder."""
    from megarl.new.command import main as lay_out

    return lay_out(argv)


def tiny_model(argv: list[str]) -> int:
    """Write a tiny model with random weights and a tokenizer."""
    from megarl.new.tiny_command import main as write_model

    return write_model(argv)


def algorithms(argv: list[str]) -> int:
    """Print the tables of algorithms, policy losses, corrections and settings of papers."""
    from megarl.algorithms.listing import as_markdown, as_text

    parser = argparse.ArgumentParser("megarl algorithms", description=algorithms.__doc__, allow_abbrev=False)
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/algorithms.md")
    options = parser.parse_args(argv)
    sys.stdout.write(as_markdown() if options.markdown else as_text())
    return 0


def _load_layout(
    argv: list[str], prog: str, world_size: int | None = None
) -> tuple[TrainConfig, dict[str, MeshSpec]]:
    """Return the configuration, and role -> its mesh (ranks and parallel sizes). Run folder, data and steps
    need not be given."""
    from megarl.config.check import check_layout
    from megarl.config.mesh import role_meshes

    config = _load(argv, prog, ["--save", "unneeded", "--train-data", "unneeded", "--train-iters", "1"])
    world_size = world_size or config.placement.world_size
    check_layout(config, world_size)
    return config, role_meshes(config, world_size)


def _load(argv: list[str], prog: str, defaults: Sequence[str] = ()) -> TrainConfig:
    from megarl.algorithms import REGISTRY
    from megarl.config.loader import load_config

    return load_config(argv, REGISTRY, prog, defaults, download=prog == "megarl train")


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "eval": evaluate,
    "convert": convert,
    "check": check,
    "algorithms": algorithms,
    "graph": graph,
    "translate": translate,
    "doctor": doctor,
    "show": show,
    "plot": plot,
    "balance": balance,
    "data": data,
    "chat": chat,
    "env-serve": env_serve,
    "engines": engines,
    "new": new,
    "tiny-model": tiny_model,
    "reshard-plan": reshard_plan,
}

if __name__ == "__main__":
    sys.exit(main())
