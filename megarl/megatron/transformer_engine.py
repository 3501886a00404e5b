"""Whether this process can use NVIDIA's Transformer Engine. Asked before Megatron is imported.

Megatron asks in a dozen places whether `import transformer_engine` works, and each looks at another part of
it. A build for another PyTorch or CUDA passes in some places and fails in others, so a Transformer Engine
that cannot be used is hidden from all of them."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys

import torch

logger = logging.getLogger(__name__)


@functools.cache
def transformer_engine_problem() -> str | None:
    """Why this process cannot use Transformer Engine; None if it can.

    The PyTorch part is imported: a build for another PyTorch is there and does not import."""
    if not torch.cuda.is_available():
        return "no GPU"
    if importlib.util.find_spec("transformer_engine") is None:
        return "not installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # noqa: BLE001 (ImportError, OSError, AssertionError: by what does not fit)
        reason = (str(error).splitlines() or [""])[0]
        return f"does not import: {type(error).__name__}: {reason}"
    return None


def uses_transformer_engine() -> bool:
    """Whether models are built from Transformer Engine's layers. Megatron's local ones are the alternative,
    with our norm and attention.

    All ranks must answer alike: names of parameters differ, and rounding does (`join_world` compares)."""
    return transformer_engine_problem() is None


def transformer_engine_version() -> str | None:
    """None where it cannot be used."""
    return importlib.metadata.version("transformer-engine") if uses_transformer_engine() else None


def hide_unusable() -> None:
    """Make `import transformer_engine` fail if Transformer Engine cannot be used; log once per node if it is
    broken."""
    problem = transformer_engine_problem()
    if problem is None or problem == "not installed":
        return
    if problem.startswith("does not import") and os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(
            "Transformer Engine %s. Megatron's own layers are used instead, which are slower. "
            "Reinstall it for "
            "this PyTorch (pip install --no-build-isolation --force-reinstall 'megarl[te]'), or "
            "uninstall it.",
            problem,
        )
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]  # what a failed import has left
    sys.modules["transformer_engine"] = None
