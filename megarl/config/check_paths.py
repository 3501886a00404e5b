"""Rules about files and folders that flags name. Only looks whether they are there, and at the names in a
reward's file; nothing is run or created."""

from __future__ import annotations

import ast
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from megarl.config.checkpoint_folders import goes_on
from megarl.config.flags import numbered
from megarl.config.near import nearest, try_path
from megarl.config.schema import TrainConfig

DATA_SUFFIXES = (".jsonl", ".parquet")
RUN_FILES = ("resolved.args", "metrics.jsonl")


def unreachable_paths(config: TrainConfig) -> Iterator[str]:
    """One line per path that the system does not even look at: a name that is too long, a folder that this
    user may not enter."""
    seen = set()
    for number, of_actor in enumerate((config, *config.others), 1):
        model, data, rewards = of_actor.model, of_actor.data, of_actor.reward_models
        of_flag = {
            "model": [model.model],
            "tokenizer-model": [model.tokenizer_model],
            "critic-model": [model.critic_model],
            "train-data": data.train_data,
            "eval-data": data.eval_data,
            "reward-function": [(data.reward_function or "").rpartition(":")[0]],
            "reward-model": rewards.reward_model,
            "judge-template": [rewards.judge_template],
            "save": [of_actor.run.save],
            "load": [of_actor.checkpoint.load],
        }
        for flag, path in (
            (flag, path) for flag, paths in of_flag.items() for path in paths if path and path not in seen
        ):
            seen.add(path)
            try:
                os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue  # other rules say whether it must be there
            except (OSError, ValueError) as error:
                yield (
                    f"--{numbered(flag, number)} ({path}): {getattr(error, 'strerror', error)}. "
                    "Give another path."
                )


def path_findings(config: TrainConfig, new_run: bool = True) -> Iterator[str]:
    """One line per missing or unfit file, and for a new run one if --save holds a run."""
    yield from _model(config)
    for flag, files in (("--train-data", config.data.train_data), ("--eval-data", config.data.eval_data)):
        yield from _data(flag, files)
    yield from _reward_function(config.data.reward_function)
    if new_run and not goes_on(config):
        yield from _save(Path(config.run.save))


def _model(config: TrainConfig) -> Iterator[str]:
    folder, tokenizer = Path(config.model.model), config.model.tokenizer_model
    if (
        (folder / "config.json").is_file()
        and not config.model.random_init
        and not any(folder.glob("*.safetensors"))
    ):
        yield f"--model ({folder}): holds no *.safetensors. Give a folder with weights, or --random-init."
    if tokenizer is not None and not Path(tokenizer).exists():
        own = any(
            (folder / name).exists()
            for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
        )
        advice = (
            "Leave it out: --model has one."
            if own
            else "Give a Hugging Face tokenizer's folder, or a SentencePiece *.model file."
        )
        yield f"--tokenizer-model ({tokenizer}): does not exist. {advice}"


def _data(flag: str, files: tuple[str, ...]) -> Iterator[str]:
    for name in files:
        if not Path(name).is_file():
            yield f"{flag} ({name}): there is no such file.{_other_data(Path(name))}"
        elif Path(name).suffix.lower() not in DATA_SUFFIXES:
            yield f"{flag} ({name}): must end in {' or '.join(DATA_SUFFIXES)}.{_other_data(Path(name))}"


def _other_data(path: Path) -> str:
    return try_path(
        path,
        lambda one: one.suffix.lower() in DATA_SUFFIXES and one.is_file(),
        "Give one or more *.jsonl or *.parquet files.",
    )


def _reward_function(name: str | None) -> Iterator[str]:
    if name is None:
        return
    path, _, function = name.rpartition(":")
    if not path or not function.isidentifier():
        yield (
            f"--reward-function ({name}): must be "
            f"path/to/file.py:function.{_other_function(Path(path or name))}"
        )
    elif not Path(path).is_file():
        yield f"--reward-function ({name}): there is no file {path}.{_other_function(Path(path))}"
    else:
        yield from _function_in_file(name, Path(path), function)


def _other_function(path: Path) -> str:
    """Of the Python file beside it that is named most like it."""

    def functions(one: Path) -> list[str]:
        try:
            tree = ast.parse(one.read_bytes()) if one.suffix == ".py" else ast.Module([], [])
        except (OSError, SyntaxError, ValueError):
            return []
        return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]

    found = path if functions(path) else nearest(path, lambda one: bool(functions(one)))
    return (
        f" Try {found}:{functions(found)[0]}."
        if found is not None
        else " Give a function of a file of yours."
    )


def _function_in_file(name: str, path: Path, function: str) -> Iterator[str]:
    """Read, not run. A file that binds names in ways that only running shows (star imports) is left to the
    run."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        yield f"--reward-function ({name}): {path} is not Python: {error.msg}, line {error.lineno}."
        return
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in tree.body):
        return
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    bound = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    bound |= {alias.asname or alias.name for node in imports for alias in node.names}
    bound |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    if function not in bound:
        advice = f" Try {path}:{functions[0]}." if functions else ""
        yield (
            f"--reward-function ({name}): {path} defines no {function}, but "
            f"{', '.join(functions) or 'no function at all'}.{advice}"
        )


def _save(folder: Path) -> Iterator[str]:
    taken = next((name for name in RUN_FILES if (folder / name).exists()), None)
    if taken is not None:
        yield (
            f"--save ({folder}): holds another run ({taken}), which would be overwritten. Try "
            f"--save {free_name(folder)}."
        )
    elif folder.exists() and not folder.is_dir():
        yield (
            f"--save ({folder}): is a file; it must be a folder, which is created. Try --save "
            f"{free_name(folder)}."
        )


def free_name(folder: Path) -> Path:
    """`folder` with the lowest number behind it that nothing is called yet: run-2."""
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    return next(
        path
        for number in itertools.count(2)
        if not (path := folder.with_name(f"{folder.name}-{number}")).exists()
    )
