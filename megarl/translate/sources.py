"""Read the configurations of other frameworks: verl's YAML and command lines, TRL's and slime's arguments."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import yaml

from megarl.config.errors import ConfigError
from megarl.frameworks import slime, trl, verl
from megarl.frameworks.answers import is_override
from megarl.frameworks.rows import Row, as_number
from megarl.translate.shell import Script


class Framework(NamedTuple):
    """A framework whose settings can be translated.

    Args:
        marks: settings of which at least one is in every configuration of this framework."""

    name: str
    table: tuple[Row, ...]
    marks: frozenset[str]


VERL = Framework("verl", verl.TABLE, frozenset())
TRL = Framework(
    "TRL",
    trl.TABLE,
    frozenset(
        "num_generations max_completion_length reward_funcs num_iterations steps_per_generation "
        "generation_batch_size epsilon epsilon_high scale_rewards importance_sampling_level use_vllm "
        "vllm_mode mask_truncated_completions".split()
    ),
)
TRL_TRAINING = frozenset(
    "per_device_train_batch_size gradient_accumulation_steps num_train_epochs learning_rate max_steps".split()
)
"""Settings of every trainer of TRL, SFT and DPO among them."""
NO_RL_SECTION = "has settings of verl, but none of actor_rollout_ref or algorithm"
NO_GRPO_SETTING = "has settings of a trainer of TRL, but none that only GRPO has, such as num_generations"
SLIME = Framework(
    "slime",
    slime.TABLE,
    frozenset("rollout-batch-size n-samples-per-prompt hf-checkpoint num-rollout".split()),
)
MEGATRON_OPTIONS = frozenset(
    "tensor-model-parallel-size pipeline-model-parallel-size max-tokens-per-gpu global-batch-size".split()
)
LAUNCHER = frozenset("num_processes config_file mixed_precision".split())
"""Options of `accelerate launch` that the table of TRL has."""
PER_NODE = ("nproc_per_node", "nproc-per-node", "num_gpus")
"""Options of torchrun and deepspeed: processes of a node."""
_SETTING = re.compile(r"[+~]*[A-Za-z_][\w.@/-]*=|~[A-Za-z_][\w.@/-]*$")
"""A word of a verl command that sets or removes a setting."""


@dataclass
class Source:
    """The settings that a file or a command line of another framework gives.

    Args:
        settings: name there -> value.
        unknown: name there -> why its value is not known.
        remarks: about the whole file."""

    framework: Framework
    settings: dict[str, object]
    unknown: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def read_words(words: Sequence[str]) -> Source:
    """Return the settings of a verl command line: key=value words.

    Raises: ConfigError for a word of another form."""
    bad = [word for word in words if "=" not in word and not word.startswith(("--", "~"))]
    if bad or not words:
        shown = bad[0] if bad else "nothing"
        raise ConfigError(
            [f"-- ({shown}): must be key=value, as verl takes it. Try -- data.train_batch_size=128."]
        )
    return Source(VERL, _overrides([word for word in words if not word.startswith("--")]))


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


def _nothing_found(path: str, what: str) -> ConfigError:
    return ConfigError(
        [
            f"FILE ({path}): has no {what}. Name a file with verl's settings, TRL's GRPOConfig or slime's "
            "arguments, or give the words: megarl translate -- data.train_batch_size=128"
        ]
    )


def _not_rl(path: str, reason: str) -> ConfigError:
    return ConfigError(
        [
            f"FILE ({path}): {reason}, so it is a configuration of SFT, DPO or the like. Only those of "
            "reinforcement learning are translated. Write its args file with --algorithm sft or "
            "--algorithm dpo (docs/algorithms.md)."
        ]
    )


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
        raise _nothing_found(path, "settings by name")
    flat = dict(_flatten(content, ""))
    if any(is_override(f"{key}=") for key in flat):
        if not _has_rl_settings(flat) and "ppo" not in str(content.get("defaults")):
            raise _not_rl(path, NO_RL_SECTION)
        source = Source(VERL, {key: value for key, value in flat.items() if not key.startswith("defaults")})
        if "defaults" in content:
            source.remarks.append(
                "`defaults:` names other files, which are not read; verl's defaults stand for them"
            )
        _resolve(source)
        return source
    for nested in (content, *(value for value in content.values() if isinstance(value, dict))):
        if TRL.marks & nested.keys():
            outer = {key: value for key, value in content.items() if not isinstance(value, dict)}
            return Source(TRL, {key: value for key, value in (outer | nested).items() if key != "_target_"})
    if TRL_TRAINING & content.keys():
        raise _not_rl(path, NO_GRPO_SETTING)
    raise _nothing_found(path, "settings of verl or TRL")


def _flatten(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        elif value != {} and value is not None:
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
        elif value in ("null", "None", "???"):
            del source.settings[key]


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
    overrides = [command for command in commands if sum(map(is_override, command.words)) > 1]
    if overrides:
        source = _verl_source(max(overrides, key=lambda command: len(command.words)), path)
    else:
        source = _source_of_options([command.options() for command in commands], path)
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

    def options(self) -> dict[str, object]:
        """Return the --name value pairs; of the launcher only those that a framework has a setting for."""
        found = _options(self.words)
        launched = _options(self.launcher)
        for name, value in launched.items():
            if name in LAUNCHER:
                found.setdefault(name, value[0] if isinstance(value, list) else value)
        given = next((launched[name] for name in PER_NODE if name in launched), None)
        per_node = as_number(given[0] if isinstance(given, list) else given)
        nodes = as_number(launched.get("nnodes", 1))
        if isinstance(per_node, int) and isinstance(nodes, int):
            found.setdefault("num_processes", str(per_node * nodes))
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
    script = command.launcher[-1] if command.launcher else ""
    if not _has_rl_settings(settings) and "main_ppo" not in script:
        raise _not_rl(path, NO_RL_SECTION)
    return Source(VERL, settings)


def _has_rl_settings(settings: Mapping[str, object]) -> bool:
    return any(key.startswith(("actor_rollout_ref.", "algorithm.")) for key in settings)


def _source_of_options(commands: Sequence[dict[str, object]], path: str) -> Source:
    """Return the settings of TRL's or slime's command, which is the one with the most options."""
    options = max(commands, key=len, default={})
    if TRL.marks & options.keys():
        return Source(TRL, options)
    if str(options.get("loss-type")) == "sft_loss":
        raise _not_rl(path, "has --loss-type sft_loss")
    if (SLIME.marks | MEGATRON_OPTIONS) & options.keys():
        return Source(SLIME, options)
    if TRL_TRAINING & options.keys():
        raise _not_rl(path, NO_GRPO_SETTING)
    raise _nothing_found(path, "command of verl, TRL or slime")


def _overrides(words: Sequence[str]) -> dict[str, object]:
    """Return the settings of key=value words. The last of equal keys counts, null is no value, and ~key takes
    a setting or a section away."""
    settings: dict[str, object] = {}
    for word in words:
        key, _, value = word.partition("=")
        is_removed = key.startswith("~")
        key = key.lstrip("+~")
        for name in [name for name in settings if name == key or (is_removed and name.startswith(f"{key}."))]:
            del settings[name]
        if not is_removed and value not in ("null", "None", ""):
            settings[key] = value.strip("'\"")
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


def _read_python(text: str, path: str, environment: Mapping[str, str]) -> Source:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError([f"FILE ({path}): is no Python: {error}. Correct it, or name another."]) from error
    constants = _constants(tree)
    source = Source(TRL, {})
    is_config, others = False, set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        others |= {name} & {"SFTConfig", "DPOConfig"}
        rename = PYTHON_CALLS.get(name)
        if rename is None:
            continue
        is_config |= name == "GRPOConfig"
        if name == "LoraConfig":
            source.settings["use_peft"] = True
        positional = zip(POSITIONAL.get(name, ()), call.args, strict=False)
        for key, value in (*positional, *((keyword.arg or "**", keyword.value) for keyword in call.keywords)):
            key = rename(key)
            try:
                source.settings[key] = _literal(value, constants)
            except ValueError:
                source.unknown[key] = f"{ast.unparse(value)} is no constant"
    if not is_config and others:
        raise _not_rl(path, f"calls {min(others)}(...) and not GRPOConfig(...)")
    if not is_config:
        raise _nothing_found(path, "GRPOConfig(...)")
    return source


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the names that are assigned exactly once in a file, with their values."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found.setdefault(name, []).append(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found.setdefault(name, []).append(value)
    set_names = Counter(
        node.id if isinstance(node, ast.Name) else node.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    )
    return {name: values[0] for name, values in found.items() if set_names[name] == 1}


def _literal(node: ast.expr, constants: Mapping[str, ast.expr], depth: int = 0) -> object:
    if isinstance(node, ast.Name) and node.id in constants and depth < 5:
        return _literal(constants[node.id], constants, depth + 1)
    return ast.literal_eval(node)


def _adapters(name: str) -> str:
    return {"r": "lora_r", "target_modules": "lora_target_modules"}.get(
        name, name if name.startswith("lora_") or name.startswith("use_") else f"lora_{name}"
    )


def _trainer(name: str) -> str:
    return {"model": "model_name_or_path"}.get(name, name)


PYTHON_CALLS: dict[str, Callable[[str], str]] = {
    "GRPOConfig": str,
    "LoraConfig": _adapters,
    "GRPOTrainer": _trainer,
}
"""Call in a Python file -> the name that an argument of it has in the table."""
POSITIONAL = {
    "GRPOConfig": ("output_dir",),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
}
"""Call in a Python file -> the names of its first arguments."""
READERS: dict[str, Callable[[str, str, Mapping[str, str]], Source]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".json": _read_yaml,
    ".py": _read_python,
}
"""Ending of a file's name -> what reads it; any other is a shell script."""
