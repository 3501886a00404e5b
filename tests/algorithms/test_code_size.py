"""An algorithm is a file that one reads beside its paper, and the policy loss that the algorithms share is one core.

Lines of code are counted without docstrings, comments, blank lines and the help under a field.

    pytest tests/algorithms/test_code_size.py"""

import ast
import inspect
import io
import sys
import tokenize
from pathlib import Path

import pytest

import megarl.algorithms
from megarl.algorithms import REGISTRY
from megarl.algorithms.ratio_transforms import TRANSFORMS

FOLDER = Path(megarl.algorithms.__file__).parent
LONGEST_ALGORITHM, LARGEST_CORE, LONGEST_TRANSFORM = 60, 600, 25
NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
FILES = {name: Path(sys.modules[cls.__module__].__file__) for name, cls in REGISTRY.items()}


def lines_of_code(source: str) -> int:
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = [token for token in tokens if token.type not in NOT_CODE]
    return len({line for token in code for line in range(token.start[0], token.end[0] + 1)} - texts)


def needed_by(name: str) -> set[str]:
    """Names of the files of the folder that one of them imports, directly or not, and its own."""
    found, to_read = {name}, [name]
    while to_read:
        for node in ast.walk(ast.parse((FOLDER / f"{to_read.pop()}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megarl.algorithms."):
                other = node.module.removeprefix("megarl.algorithms.")
                to_read += {other} - found
                found.add(other)
    return found


def core() -> set[str]:
    """Files of the policy loss, its ratio transforms and its corrections: policy_gradient.py and what it imports, but
    for base.py with what that imports, and the loader of a user's file."""
    return needed_by("policy_gradient") - needed_by("base") - {"user_policy_loss"}


def test_the_counter_counts_code():
    source = '''"""A module.

    Of two lines."""
# a comment

@decorated
class A:
    field: int = 3  # counts once
    """Help."""
    text: str = (
        "two " "lines"
    )
'''
    assert lines_of_code(source) == 6


@pytest.mark.parametrize("name", REGISTRY)
def test_an_algorithm_is_short(name):
    """What several algorithms need goes into a file of its own."""
    assert lines_of_code(FILES[name].read_text()) <= LONGEST_ALGORITHM, FILES[name]


def test_the_core_is_small():
    sizes = {name: lines_of_code((FOLDER / f"{name}.py").read_text()) for name in core()}
    assert {"policy_gradient", "cross_entropy", "ratio_transforms", "corrections"} <= sizes.keys()
    assert sizes.keys().isdisjoint(path.stem for path in FILES.values())
    assert sum(sizes.values()) <= LARGEST_CORE, sizes


@pytest.mark.parametrize("name", [name for name, transform in TRANSFORMS.items() if transform.loss])
def test_a_ratio_transform_is_short(name):
    assert lines_of_code(inspect.getsource(TRANSFORMS[name].loss)) <= LONGEST_TRANSFORM
