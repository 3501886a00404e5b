"""Make Triton's interpreter adapt `triton.language` once per launch.

A launch replaces a few hundred functions of the language by interpreted ones. Each call of a device function
within it, such as `tl.zeros_like` or the function that a scan combines with, looks at all of them again and
finds nothing to do. That is half the time of a test of kernels. Use it as `interpreter._patch_lang`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import triton.language as tl
from triton.runtime import interpreter

adapt_always = interpreter._patch_lang


def adapt_once(function: Callable) -> interpreter._LangPatchScope:
    """Adapt the modules of the language that a function sees, unless the launch in progress has done so."""
    if any(tl.core.is_builtin(module.load) for module in _languages(function)):
        return adapt_always(function)
    return interpreter._LangPatchScope()


@functools.cache
def _languages(function: Callable) -> list[ModuleType]:
    return [module for module in (tl, tl.core) if any(v is module for v in function.__globals__.values())]
