"""The fields of vLLM's EngineArgs and Megatron's TransformerConfig, read from the installed source without
importing either: an import costs seconds and must not happen before the configuration is known to be
right."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megarl.config.values import SCALARS, Kind

SUPPORTED_MEGATRON = "0.16.1"
"""The only version whose lines megarl.megatron.fixes knows."""

_CONTAINERS = {
    "list": list,
    "List": list,
    "tuple": tuple,
    "Tuple": tuple,
    "set": set,
    "Set": set,
    "Sequence": list,
}
_UNPARSABLE = {
    "Callable",
    "type",
    "Type",
    "ContextManager",
    "torch.dtype",
    "PipelineParallelLayerLayout",
    "RecipeConfig",
    "AttnBackend",
}


@dataclass(frozen=True, slots=True)
class InstalledClass:
    """A dataclass of an installed library.

    Args:
        annotations: of its public fields.
        aliases: names that its source imports -> the file that defines them.
    """

    annotations: Mapping[str, ast.expr]
    aliases: Mapping[str, Path] = field(default_factory=dict)

    def kind(self, name: str) -> Kind | None:
        """What a field accepts; None if no flag can carry it."""
        return kind_of_annotation(self.annotations[name], self.aliases)


def megatron_finding() -> str | None:
    """Why the installed Megatron-Core cannot be used; None if it can."""
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    rule = (
        f"megarl replaces parts of {SUPPORTED_MEGATRON} by line and knows no other version. Run "
        f"pip install megatron-core=={SUPPORTED_MEGATRON}."
    )
    return None if version == SUPPORTED_MEGATRON else f"megatron-core ({version}): {rule}"


def apex_finding() -> str | None:
    """Why the installed package apex would break Megatron; None if it is NVIDIA's or there is none.

    The apex of PyPI is a web toolkit. Megatron takes whatever imports under that name for NVIDIA's."""
    spec = importlib.util.find_spec("apex")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if spec is None or any((folder / "optimizers").is_dir() for folder in folders):
        return None
    return (
        f"apex ({spec.origin or folders[0]}): is not NVIDIA's, as it has no apex.optimizers, and "
        "Megatron would take it for that. Run "
        "pip uninstall apex; NVIDIA's is built from github.com/NVIDIA/apex."
    )


def tracker_findings(names: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with --log-with: a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            package = "mlflow-skinny" if name == "mlflow" else name
            yield (
                f"--log-with ({name}): the package {package} is not installed, so nothing can be "
                "logged with it. "
                f"Run pip install {package}, or leave {name} out."
            )


@functools.cache
def engine_args() -> InstalledClass | None:
    """vLLM's EngineArgs; None if vLLM is not installed."""
    return _installed("vllm", ("engine/arg_utils.py", "EngineArgs"))


@functools.cache
def transformer_config() -> InstalledClass | None:
    """Megatron-Core's TransformerConfig with its base class; None if Megatron-Core is not installed."""
    return _installed(
        "megatron",
        ("core/model_parallel_config.py", "ModelParallelConfig"),
        ("core/transformer/transformer_config.py", "TransformerConfig"),
    )


@functools.cache
def cpu_head_sizes() -> tuple[int, ...] | None:
    """Sizes of attention heads that vLLM's CPU backend has kernels for; None if that is not known."""
    for path in _files("vllm", "v1/attention/backends/cpu_attn.py"):
        for node in ast.walk(_tree(path)):
            if (
                isinstance(node, ast.FunctionDef)
                and node.name == "get_supported_head_sizes"
                and isinstance(node.body[-1], ast.Return)
            ):
                return tuple(ast.literal_eval(node.body[-1].value))
    return None


def is_transformers_model(model_type: str) -> bool:
    """Whether the installed transformers has a model of this name, so that it is no typing error."""
    return model_type.isidentifier() and any(_files("transformers", f"models/{model_type}/__init__.py"))


def _files(package: str, file: str) -> Iterator[Path]:
    """A file of an installed package, from each of its folders that has it."""
    spec = importlib.util.find_spec(
        package
    )  # a top-level name: nothing is imported, and `megatron` may be a namespace
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    return (folder / file for folder in folders if (folder / file).is_file())


def _installed(package: str, *classes: tuple[str, str]) -> InstalledClass | None:
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
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def class_annotations(path: Path, name: str) -> dict[str, ast.expr]:
    """The public annotated fields of one class. Raises: LookupError if the file has no such class."""
    for node in _tree(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                item.target.id: item.annotation
                for item in node.body
                if isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and not item.target.id.startswith("_")
            }
    raise LookupError(f"{path} has no class {name}: megarl was not written for this version")


def _imported_names(path: Path, folder: Path) -> dict[str, Path]:
    """Names that a file imports from its own package -> the file of the module."""
    names = {}
    for node in _tree(path).body:
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and node.module
            and node.module.split(".")[0] == folder.name
        ):
            module = folder.joinpath(*node.module.split(".")[1:])
            file = (
                module.with_suffix(".py") if module.with_suffix(".py").is_file() else module / "__init__.py"
            )
            names |= {alias.name: file for alias in node.names if file.is_file()}
    return names


def _literal_alias(name: str, path: Path) -> tuple[object, ...] | None:
    """The choices of `name = Literal[...]` in a file."""
    for node in _tree(path).body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets) and isinstance(
            node.value, ast.Subscript
        ):
            return _choices(node.value, path) if ast.unparse(node.value.value) == "Literal" else None
    return None


def _choices(node: ast.Subscript, path: Path | None) -> tuple[object, ...] | None:
    """The values of Literal[...], which may name further aliases of the same file. None if one of them is
    unknown."""
    choices: tuple[object, ...] = ()
    for element in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
        if isinstance(element, ast.Constant):
            choices += (element.value,)
        elif (
            isinstance(element, ast.Name)
            and path is not None
            and (nested := _literal_alias(element.id, path)) is not None
        ):
            choices += nested
        else:
            return None
    return choices


def kind_of_annotation(node: ast.expr, aliases: Mapping[str, Path] = {}) -> Kind | None:
    """The kind of an annotation. A name that is neither builtin nor typing nor a Literal alias is an
    enumeration (text) or, if it ends in Config, a dataclass (JSON). None: no flag can carry it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    members = _members(node)
    kinds = [
        kind
        for member in members
        if not _is_none(member) and (kind := _kind_of_member(member, aliases)) is not None
    ]
    if not kinds:
        return None
    return replace(functools.reduce(_either, kinds), optional=any(map(_is_none, members)))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _members(node: ast.expr) -> list[ast.expr]:
    """The alternatives of X | Y, Union[X, Y] and Optional[X]."""
    if isinstance(node, ast.BinOp):
        return _members(node.left) + _members(node.right)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Union":
        return [member for element in node.slice.elts for member in _members(element)]
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Optional":
        return [*_members(node.slice), ast.Constant(None)]
    return [node]


def _kind_of_member(node: ast.expr, aliases: Mapping[str, Path]) -> Kind | None:
    head = ast.unparse(node.value if isinstance(node, ast.Subscript) else node)
    if head == "Literal":
        return Kind(choices=_choices(node, None) or ())
    if head in aliases and (choices := _literal_alias(head, aliases[head])) is not None:
        return Kind(choices=choices)
    if head in _CONTAINERS:
        element = node.slice if isinstance(node, ast.Subscript) else ast.Name("str")
        inner = kind_of_annotation(element.elts[0] if isinstance(element, ast.Tuple) else element, aliases)
        return None if inner is None else replace(inner, many=_CONTAINERS[head])
    if head in _UNPARSABLE:
        return None
    if head in SCALARS or head == "bool":
        return Kind(bases=(head,))
    return (
        Kind(bases=("json",))
        if head in ("dict", "Dict") or head.endswith(("Config", "Overrides", "Args"))
        else Kind()
    )


def _either(left: Kind, right: Kind) -> Kind:
    """A value of either kind. Text comes last: it accepts everything."""
    bases = tuple(sorted({*left.bases, *right.bases}, key=("bool", "int", "float", "json", "str").index))
    choices = left.choices + right.choices if left.choices and right.choices else ()
    many = left.many or right.many
    return Kind(
        bases=bases,
        choices=choices,
        many=many,
        one_or_many=many is not None and (left.many is None or right.many is None),
    )
