"""Read the configurations of other frameworks: verl's YAML and command lines, TRL's and slime's arguments."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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
    choice_remarks,
    not_rl,
    nothing_found,
)
from megarl.translate.python_file import read_python
from megarl.translate.shell import Script

MEGATRON_OPTIONS = frozenset(
    "tensor-model-parallel-size pipeline-model-parallel-size max-tokens-per-gpu global-batch-size".split()
)
LAUNCHER = frozenset("num_processes num_machines config_file mixed_precision".split())
"""Options of `accelerate launch` that the table of TRL has."""
PER_NODE = ("nproc_per_node", "num_gpus")
"""Options of torchrun and deepspeed: processes of a node."""
CONFIG_OPTIONS = ("--config-name", "-cn", "--config-path", "-cp")
"""Options of Hydra that name the configuration on which a verl command builds."""
DEFAULT_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "config")
"""Their values in whose place the table of verl has the defaults."""
_SETTING = re.compile(r"[+~]*[A-Za-z_][\w.@/-]*=|~[A-Za-z_][\w.@/-]*$")
"""A word of a verl command that sets or removes a setting."""


def read_words(words: Sequence[str]) -> Source:
    """Return the settings of a verl command line: key=value words.

    Raises: ConfigError for a word of another form."""
    bad = [
        word
        for before, word in itertools.pairwise(["", *words])
        if "=" not in word and not word.startswith(("-", "~")) and before not in CONFIG_OPTIONS
    ]
    if bad or not words:
        shown = bad[0] if bad else "nothing"
        raise ConfigError(
            [f"-- ({shown}): must be key=value, as verl takes it. Try -- data.train_batch_size=128."]
        )
    settings = _overrides([word for word in words if not word.startswith("-")])
    return Source(VERL, settings, remarks=list(_config_remarks(words)))


def read_file(path: str, environment: Mapping[str, str]) -> Source:
    """Return the settings of another framework that a file holds.

    Raises: ConfigError if the file cannot be read, or is no configuration of a known framework."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not a UTF-8 text file"
        raise ConfigError(
            [f"FILE ({path}): {reason}. Name a script, a YAML, JSON or Python file."]
        ) from error
    reader = READERS.get(Path(path).suffix.lower(), _read_shell)
    return reader(text, path, environment)


def _read_yaml(text: str, path: str, environment: Mapping[str, str]) -> Source:
    try:
        # Hydra and TRL write 1e-6, which YAML 1.1 reads as a string; as_number reads it as a number.
        content = json.loads(text) if path.lower().endswith(".json") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            [f"FILE ({path}): cannot be parsed: {reason}. Correct it, or name another."]
        ) from error
    if not isinstance(content, dict):
        raise nothing_found(path, "settings by name")
    flat = dict(_flatten(content, ""))
    if any(is_override(f"{key}=") for key in flat):
        if not _has_rl_settings(flat) and "ppo" not in str(content.get("defaults")):
            raise not_rl(path, NO_RL_SECTION)
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
        raise not_rl(path, NO_GRPO_SETTING)
    raise nothing_found(path, "settings of verl or TRL")


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


def _read_shell(text: str, path: str, environment: Mapping[str, str]) -> Source:
    script = Script(text, environment)
    commands = [_split_launcher(words) for words in script.commands()]
    numbered = list(zip(script.lines, commands, strict=True))
    overrides = [(line, one) for line, one in numbered if sum(map(is_override, one.words)) > 1]
    if overrides:
        line, command = max(overrides, key=lambda one: len(one[1].words))
        source = _verl_source(command, path)
        source.remarks += choice_remarks("a command of verl", [line for line, _ in overrides], line)
    else:
        source = _source_of_options(numbered, path)
    if script.has_branches:
        source.remarks.append(
            "the script has conditions or loops, which are not followed: check the values that depend on them"
        )
    source.remarks += [
        f"${{{name}[@]}} is not set in the script, so its words are left out" for name in script.missing
    ]
    for key, value in list(source.settings.items()):
        if isinstance(value, str) and re.search(r"\$[\w{(]|`", value):
            source.unknown[key] = f"{value} is not set in the script"
            del source.settings[key]
    return source


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


def _verl_source(command: _Launched, path: str) -> Source:
    settings = _overrides([word for word in command.words if _SETTING.match(word)])
    if not _has_rl_settings(settings) and "main_ppo" not in command.program:
        raise not_rl(path, NO_RL_SECTION)
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


def _source_of_options(numbered: Sequence[tuple[int, _Launched]], path: str) -> Source:
    """Return the settings of TRL's or slime's command, which is the one with the most options.

    Args:
        numbered: line of each command, and the command."""
    commands = [(line, command.options(), command) for line, command in numbered]
    line, options, command = max(commands, key=lambda one: len(one[1]), default=(0, {}, _Launched([], [])))
    of_trl = _underscored(options)  # Hugging Face's parser takes --max-steps for --max_steps
    if TRL.marks & of_trl.keys():
        lines = [number for number, other, _ in commands if TRL.marks & _underscored(other).keys()]
        return Source(TRL, of_trl, remarks=choice_remarks("a command of TRL", lines, line))
    if str(options.get("loss-type")) == "sft_loss":
        raise not_rl(path, "has --loss-type sft_loss")
    if (SLIME.marks | MEGATRON_OPTIONS) & options.keys():
        lines = [number for number, other, _ in commands if SLIME.marks & other.keys()]
        options |= command.asynchrony()
        return Source(SLIME, options, remarks=choice_remarks("a command of slime", lines, line))
    if TRL_TRAINING & of_trl.keys():
        raise not_rl(path, NO_GRPO_SETTING)
    raise nothing_found(path, "command of verl, TRL or slime")


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


READERS: dict[str, Callable[[str, str, Mapping[str, str]], Source]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".json": _read_yaml,
    ".py": read_python,
}
"""Ending of a file's name -> what reads it; any other is a shell script."""
