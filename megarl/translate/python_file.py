"""Read the arguments of TRL's GRPOConfig, GRPOTrainer and LoraConfig from a Python file, which is not run."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Mapping

from megarl.config.errors import ConfigError
from megarl.translate.framework import TRL, Source, choice_remarks, not_rl, nothing_found


def read_python(text: str, path: str, environment: Mapping[str, str]) -> Source:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError([f"FILE ({path}): is no Python: {error}. Correct it, or name another."]) from error
    constants = _constants(tree)
    source = Source(TRL, {})
    calls: dict[str, list[ast.Call]] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        calls.setdefault(name, []).append(call)
    if "GRPOConfig" not in calls:
        others = calls.keys() & {"SFTConfig", "DPOConfig"}
        if others:
            raise not_rl(path, f"calls {min(others)}(...) and not GRPOConfig(...)")
        raise nothing_found(path, "GRPOConfig(...)")
    for name in PYTHON_CALLS:
        if name not in calls:
            continue
        found = sorted(calls[name], key=lambda call: call.lineno)
        call = max(found, key=lambda call: len(call.args) + len(call.keywords))
        source.remarks += choice_remarks(f"{name}(...)", [call.lineno for call in found], call.lineno)
        _read_call(source, name, call, constants)
    return source


def _read_call(source: Source, name: str, call: ast.Call, constants: Mapping[str, ast.expr]) -> None:
    """Add the arguments of a call to the settings, and those whose value is not known to `unknown`."""
    rename = PYTHON_CALLS[name]
    if name == "LoraConfig":
        source.settings["use_peft"] = True
    positional = zip(POSITIONAL.get(name, ()), call.args, strict=False)
    for key, value in (*positional, *((keyword.arg or "**", keyword.value) for keyword in call.keywords)):
        key = rename(key)
        try:
            source.settings[key] = _literal(value, constants)
        except ValueError:
            source.unknown[key] = f"{ast.unparse(value)} is no constant"


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
