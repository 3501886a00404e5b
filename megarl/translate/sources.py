"""Read the configurations of other frameworks: YAML, JSON, and the words of a command."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megarl.config.errors import ConfigError
from megarl.frameworks.answers import is_override
from megarl.frameworks.rows import ASYNC_PROGRAMS, as_number
from megarl.translate.framework import (
    NO_GRPO_SETTING,
    NO_RL_SECTION,
    SLIME,
    TRL,
    TRL_TRAINING,
    VERL,
    Source,
    not_rl,
    nothing_found,
)

MEGATRON_OPTIONS = frozenset(
    "tensor-model-parallel-size pipeline-model-parallel-size max-tokens-per-gpu global-batch-size".split()
)
LAUNCHER = frozenset("num_processes num_machines config_file mixed_precision".split())
"""Options of `accelerate launch` that the table of TRL has."""
PER_NODE = ("nproc_per_node", "num_gpus")
"""Options of torchrun and deepspeed: processes of a node."""
CONFIG_OPTIONS = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")
"""Options of Hydra that name the configuration on which a verl command builds."""
DEFAULT_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "config")
"""Their values in whose place the table of verl has the defaults."""
NO_SHELL = (
    "which a shell expands or runs: a script is not read, only its command with all values put in. Run it "
    "with `bash -x`, or with `echo` in the place of its program, and translate the command that is printed "
    "(docs/from_verl.md). If this belongs to a value, quote it."
)
NO_PYTHON = (
    "is Python, which is not read. Write the arguments of GRPOConfig as YAML, name: value, as for "
    "`trl grpo --config grpo.yaml`, and translate that file."
)
_SHELL = re.compile(
    r"""(?<!\S)\#.*                                       # a comment
    |\\[ \t]*\r?\n                                        # the end of a line that goes on
    |(?P<kept>\\.|'[^']*'|"(?:\\.|\$(?![\w{(@*])|[^\\"$`])*")
    |(?:"(?:\\.|\$(?![\w{(@*])|[^\\"$`])*)?(?P<syntax>\$(?:\w+|\{[^}]*\}?|[(@*'"]+)|[`;&|<>()]+)""",
    re.VERBOSE,
)
"""Parts of a command that shlex does not read as a shell does; what is quoted is kept as it is."""
_PROGRAM = re.compile(r"^.*\b(?:python3?|torchrun|accelerate|deepspeed|trl)[ \t]", re.MULTILINE)
"""A line that runs a program, of which a file may have one."""
LOADERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".yaml": yaml.safe_load,  # reads 1e-6, as Hydra and TRL write it, as a string; as_number reads it
    ".yml": yaml.safe_load,
}
"""Ending of a file's name -> what reads it; any other file has the words of a command."""


def read_words(words: Sequence[str], place: str) -> Source:
    """Return the settings of a command of verl, TRL or slime, or of its arguments alone.

    Args:
        words: as a shell has expanded them.
        place: of the words, for errors.

    Raises: ConfigError if they set nothing of a known framework."""
    command = _split_launcher(list(words))
    if any(map(is_override, command.words)):
        return _verl_source(command, place)
    return _source_of_options(command, place)


def read_file(path: str) -> Source:
    """Return the settings of another framework that a file holds.

    Raises: ConfigError if the file cannot be read, or is no configuration of a known framework."""
    place = f"FILE ({path})"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not a UTF-8 text file"
        raise ConfigError([f"{place}: {reason}. Name a YAML or JSON file, or one with a command."]) from error
    suffix = Path(path).suffix.lower()
    if suffix == ".py":
        raise ConfigError([f"{place}: {NO_PYTHON}"])
    is_tree = suffix in LOADERS
    if not is_tree:
        if syntax := next(filter(None, (match["syntax"] for match in _SHELL.finditer(text))), None):
            raise ConfigError([f"{place}: has {syntax}, {NO_SHELL}"])
        text = _SHELL.sub(r"\g<kept>", text)
        if len(_PROGRAM.findall(text)) > 1:
            raise ConfigError([f"{place}: has several commands. Keep the one that is to be translated."])
    try:
        content = LOADERS.get(suffix, shlex.split)(text)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError([f"{place}: cannot be parsed: {reason}. Correct it, or name another."]) from error
    return _read_tree(content, place) if is_tree else read_words(content, place)


def _read_tree(content: object, place: str) -> Source:
    """Return the settings of a YAML or JSON file."""
    if not isinstance(content, dict):
        raise nothing_found(place, "settings by name")
    flat = dict(_flatten(content, ""))
    if any(is_override(f"{key}=") for key in flat):
        if not _has_rl_settings(flat) and "ppo" not in str(content.get("defaults")):
            raise not_rl(place, NO_RL_SECTION)
        source = Source(VERL, {key: value for key, value in flat.items() if not key.startswith("defaults")})
        if "defaults" in content:
            source.remarks.append(
                "`defaults:` names other files, which are not read; verl's defaults stand for them"
            )
        _resolve(source)
        return source
    sections = {key: value for key, value in content.items() if isinstance(value, dict)}
    outer = {key: value for key, value in content.items() if key not in sections}
    found = [key for key, section in sections.items() if TRL.marks & section.keys()]
    if TRL.marks & outer.keys() or found:
        inner = sections if TRL.marks & outer.keys() else sections[found[0]]
        source = Source(TRL, {key: value for key, value in (outer | inner).items() if key != "_target_"})
        if inner is not sections and len(found) > 1:
            source.remarks.append(f"{', '.join(found)} are configurations each: {found[0]} is translated")
        return source
    if TRL_TRAINING & content.keys():
        raise not_rl(place, NO_GRPO_SETTING)
    raise nothing_found(place, "settings of verl or TRL")


def _flatten(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        elif value != {}:
            yield f"{prefix}{key}", value


_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^${}]*))?\}")


def _resolve(source: Source) -> None:
    """Put in the values that ${other.key} and ${oc.select:other.key,default} stand for."""
    for _ in range(5):
        for key, value in list(source.settings.items()):
            if isinstance(value, str):
                source.settings[key] = _resolved(value, key, source.settings)
            elif isinstance(value, list):
                source.settings[key] = [
                    _resolved(item, key, source.settings) if isinstance(item, str) else item for item in value
                ]
    for key, value in list(source.settings.items()):
        if any(
            isinstance(one, str) and "${" in one for one in (value if isinstance(value, list) else [value])
        ):
            source.unknown[key] = f"{value} cannot be resolved"
            del source.settings[key]
        elif value == "???":  # has no value yet
            del source.settings[key]
        elif value in ("null", "None"):
            source.settings[key] = None


def _resolved(value: str, key: str, settings: Mapping[str, object]) -> object:
    match = _REFERENCE.fullmatch(value)
    if match is None:
        return _REFERENCE.sub(lambda found: str(settings.get(found[1], found[0])), value)
    name = f"{key.rpartition('.')[0]}{match[1]}" if match[1].startswith(".") else match[1]
    found = settings.get(name, match[2] if match[2] is not None else value)
    return found.strip("\"'") if isinstance(found, str) else found


class _Launched(NamedTuple):
    """A command, with the words of its launcher apart.

    Args:
        launcher: words up to the Python file or module; empty if there is none.
        words: its own arguments."""

    launcher: list[str]
    words: list[str]

    @property
    def program(self) -> str:
        """The Python file or module; "" if there is none."""
        return self.launcher[-1] if self.launcher else ""

    def asynchrony(self) -> dict[str, object]:
        """Return the setting that stands for a program that samples while it trains; none for any other."""
        return {name: True for name in ASYNC_PROGRAMS if name in self.program}

    def options(self) -> dict[str, object]:
        """Return the --name value pairs; of the launcher only those that a framework has a setting for."""
        found = _options(self.words)
        launched = _underscored(_options(self.launcher))
        for name, value in launched.items():
            if name in LAUNCHER:
                found.setdefault(name, value[0] if isinstance(value, list) else value)
        given = next((launched[name] for name in PER_NODE if name in launched), None)
        per_node = as_number(given[0] if isinstance(given, list) else given)
        nodes = as_number(launched.get("nnodes", launched.get("num_nodes", 1)))
        if isinstance(per_node, int) and isinstance(nodes, int):
            found.setdefault("num_processes", str(per_node * nodes))
            found.setdefault("num_machines", str(nodes))
        return found


def _split_launcher(words: list[str]) -> _Launched:
    """Split a command after its Python file, or after the module that -m names."""
    start = 0
    for position, word in enumerate(words):
        if word == "--":  # ray job submit ... -- python3 ...
            return _split_launcher(words[position + 1 :])
        is_file = word.endswith(".py") and not word.startswith("-") and "=" not in word
        is_module = position > 0 and words[position - 1] in ("-m", "--module")
        if is_file or is_module:
            start = position + 1
        if is_file or (is_module and not word.startswith(("torch.", "accelerate.", "deepspeed."))):
            break
    return _Launched(words[:start], words[start:])


def _verl_source(command: _Launched, place: str) -> Source:
    for before, word in itertools.pairwise(["", *command.words]):
        if "=" not in word and not word.startswith(("-", "~")) and before not in CONFIG_OPTIONS:
            raise ConfigError(
                [f"{place}: has {word} among verl's settings. Each must be key=value, or -OPTION."]
            )
    settings = _overrides([word for word in command.words if not word.startswith("-")])
    if command.program and "main_ppo" not in command.program and not _has_rl_settings(settings):
        raise not_rl(place, NO_RL_SECTION)
    return Source(VERL, settings | command.asynchrony(), remarks=list(_config_remarks(command.words)))


def _config_remarks(words: Sequence[str]) -> Iterator[str]:
    """Yield a remark for an option of a verl command that names another configuration than verl's own."""
    for word, following in itertools.pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        if option in CONFIG_OPTIONS:
            value = (value if equals else following).strip("'\"")
            if value.removesuffix(".yaml").removeprefix("./") not in DEFAULT_CONFIGS:
                yield (
                    f"`{option} {value}` names another configuration, which is not read; verl's defaults "
                    "stand for it: add its settings as key=value"
                )


def _has_rl_settings(settings: Mapping[str, object]) -> bool:
    return any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in settings)


def _source_of_options(command: _Launched, place: str) -> Source:
    """Return the settings of TRL's or slime's command."""
    options = command.options()
    of_trl = _underscored(options)  # Hugging Face's parser takes --max-steps for --max_steps
    if TRL.marks & of_trl.keys():
        return Source(TRL, of_trl)
    if str(options.get("loss-type")) == "sft_loss":
        raise not_rl(place, "has --loss-type sft_loss")
    if (SLIME.marks | MEGATRON_OPTIONS) & options.keys():
        return Source(SLIME, options | command.asynchrony())
    if TRL_TRAINING & of_trl.keys():
        raise not_rl(place, NO_GRPO_SETTING)
    raise nothing_found(place, "settings of verl, TRL or slime")


def _underscored(options: Mapping[str, object]) -> dict[str, object]:
    return {name.replace("-", "_"): value for name, value in options.items()}


def _overrides(words: Sequence[str]) -> dict[str, object]:
    """Return the settings of key=value words.

    The last of equal keys counts, null is None, and ~key takes a setting or a section away."""
    settings: dict[str, object] = {}
    for word in words:
        key, _, value = word.partition("=")
        is_removed = key.startswith("~")
        key = key.lstrip("+~")
        for name in [name for name in settings if name == key or (is_removed and name.startswith(f"{key}."))]:
            del settings[name]
        if not is_removed and value:
            settings[key] = None if value in ("null", "None") else value.strip("'\"")
    return settings


def _options(words: Sequence[str]) -> dict[str, object]:
    """Return the --name value pairs of words: True without a value, a list for several."""
    found: dict[str, list[str]] = {}
    name = None
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            found[name] = [value] if equals else []
        elif name is not None:
            found[name].append(word.rstrip(",") if word.endswith(",") else word)
    return {name: values[0] if len(values) == 1 else values or True for name, values in found.items()}
