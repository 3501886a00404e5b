"""Load the user's own policy loss: --policy-loss path/to/file.py:function."""

from __future__ import annotations

import functools
from dataclasses import replace

from megarl.algorithms.ratio_transforms import OPTIONS, TRANSFORMS, Formula, Loss
from megarl.algorithms.ratio_transforms import Tokens, Transform, TransformFlags
from megarl.config.errors import did_you_mean
from megarl.config.user_algorithm import is_in_file
from megarl.files.user_code import check_call, load_from_file

_WANTED = (
    "Wanted path/to/file.py:function, with def function(tokens, flags) that returns the loss of each token and "
    "a mask or None, or path/to/file.py:name of a megarl.algorithms.ratio_transforms.Transform."
)


def transform_of(name: str) -> Transform | None:
    """Return the ratio transform that a value of --policy-loss names; None if there is none of this name.

    Raises: ValueError as `load_user_policy_loss`."""
    return load_user_policy_loss(name) if is_in_file(name) else TRANSFORMS.get(name)


def transform_or_reason(name: str) -> tuple[Transform | None, str]:
    """Return the ratio transform that a value of --policy-loss names, or None and what is wrong with the value."""
    try:
        transform = transform_of(name)
    except ValueError as error:
        return None, str(error)
    near = did_you_mean(name, TRANSFORMS, prefix="")
    return transform, f"must be one of {', '.join(TRANSFORMS)}, or path/to/file.py:function.{near}"


@functools.cache
def load_user_policy_loss(name: str) -> Transform:
    """Run the user's file and return the ratio transform that it defines. A later call returns the same one.

    A plain function may read every flag of the transforms, each None unless it is given, and is called with
    the tokens of whole responses. A `Transform` says itself what it reads.
    Raises: ValueError if there is no such file or name, the file fails, or the function cannot be called with
        tokens and flags."""
    found = load_from_file(name, "--policy-loss", "megarl_policy_loss_", _WANTED)
    own_name = name.rpartition(":")[2]
    if not isinstance(found, Transform) and callable(found):
        options = tuple(sorted(OPTIONS))
        found = Transform(paper="", summary="", loss=found, optional=options, token_level=False)
    if not isinstance(found, Transform):
        raise ValueError(f"{own_name} is {type(found).__name__}, not a function. {_WANTED}")
    if found.loss is None:
        raise ValueError(f"{own_name} has no loss. {_WANTED}")
    if unknown := sorted(found.fields - OPTIONS):
        raise ValueError(f"{own_name} reads {unknown[0]}, which must be one of {', '.join(sorted(OPTIONS))}.")
    check_call(found.loss, own_name, 2, _WANTED)
    return replace(found, loss=_checked(found.loss, name))


def _checked(loss: Formula, name: str) -> Formula:
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
