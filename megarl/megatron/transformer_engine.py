"""Detect whether this process can use NVIDIA's Transformer Engine, before Megatron is imported.

Megatron tries `import transformer_engine` in a dozen places, and each place tests another part of the
library. A build for another PyTorch or CUDA passes in some places and fails in others. A Transformer Engine
that cannot be used is therefore hidden from all of them."""

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
    """Return why this process cannot use Transformer Engine, or None if it can.

    The check imports the PyTorch part, because a build for another PyTorch is present but fails to import."""
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
    """Return whether models are built from Transformer Engine's layers.

    The alternative is Megatron's local layers with our norm and attention. All ranks must return the same
    answer, because parameter names and rounding differ (`join_world` compares)."""
    return transformer_engine_problem() is None


def transformer_engine_version() -> str | None:
    """Return the version of Transformer Engine, or None if it cannot be used."""
    return importlib.metadata.version("transformer-engine") if uses_transformer_engine() else None


def hide_unusable() -> None:
    """Make `import transformer_engine` fail if Transformer Engine cannot be used.

    A broken installation is logged once per node."""
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
        del sys.modules[name]  # remains of a failed import
    sys.modules["transformer_engine"] = None
