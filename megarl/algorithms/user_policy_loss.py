"""Load the user's own policy loss: --policy-loss path/to/file.py:function."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import replace

from megarl.algorithms.ratio_transforms import OPTIONS, TRANSFORMS, Loss, Tokens, Transform, TransformFlags
from megarl.config.user_algorithm import is_in_file
from megarl.files.user_code import run_file

_WANTED = (
    "Wanted path/to/file.py:function, with def function(tokens, flags) that returns the loss of each token and "
    "a mask or None, or path/to/file.py:name of a megarl.algorithms.ratio_transforms.Transform."
)


def transform_of(name: str) -> Transform | None:
    """Return the ratio transform that a value of --policy-loss names; None if there is none of this name.

    Raises: ValueError as `load_user_policy_loss`."""
    return load_user_policy_loss(name) if is_in_file(name) else TRANSFORMS.get(name)


@functools.cache
def load_user_policy_loss(name: str) -> Transform:
    """Run the user's file and return the ratio transform that it defines. A later call returns the same one.

    A plain function may read every flag of the transforms, each None unless it is given, and is called with
    the tokens of whole responses. A `Transform` says itself what it reads.
    Raises: ValueError if there is no such file or name, the file fails, or the function cannot be called with
        tokens and flags."""
    path, _, own_name = name.rpartition(":")
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}. {_WANTED}")
    found = vars(run_file(path, f"--policy-loss ({name})", "megarl_policy_loss_")).get(own_name)
    if found is None:
        raise ValueError(f"{path} defines no {own_name}. {_WANTED}")
    if isinstance(found, Transform):
        transform = found
    elif callable(found):
        transform = Transform(
            paper="", summary="", loss=found, optional=tuple(sorted(OPTIONS)), token_level=False
        )
    else:
        raise ValueError(f"{own_name} is {type(found).__name__}, not a function. {_WANTED}")
    if transform.loss is None:
        raise ValueError(f"{own_name} has no loss. {_WANTED}")
    if unknown := sorted(transform.fields - OPTIONS):
        raise ValueError(f"{own_name} reads {unknown[0]}, which must be one of {', '.join(sorted(OPTIONS))}.")
    _check_signature(transform.loss, own_name)
    return replace(transform, loss=_checked(transform.loss, name))


def _check_signature(function: Callable[..., object], name: str) -> None:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{name}{inspect.signature(function)}: {error}. {_WANTED}") from None


def _checked(loss: Callable[[Tokens, TransformFlags], Loss], name: str) -> Callable[..., Loss]:
    """Return the function wrapped in a check of its results, because a loss of another shape would be
    broadcast."""

    def checked(tokens: Tokens, flags: TransformFlags) -> Loss:
        returned = loss(tokens, flags)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                f"--policy-loss ({name}) returned {type(returned).__name__}; must return the loss of each token "
                "and a mask. Try `return losses, None`."
            )
        wanted = tuple(tokens.log_probs.shape)
        for what, tensor in zip(("losses", "the mask"), returned, strict=True):
            shape = tuple(getattr(tensor, "shape", ()))
            if shape != wanted and not (what == "the mask" and tensor is None):
                raise TypeError(
                    f"--policy-loss ({name}) returned {what} of shape {shape}; must be {wanted}, a number for each "
                    "token. Leave out the sum or mean."
                )
        return returned

    return checked
