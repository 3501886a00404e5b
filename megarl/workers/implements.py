"""Bind the classes of this package to the roles that they implement (megarl/flow/job_roles.py)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TypeVar, get_type_hints

from megarl.flow.role import Role, methods_of

C = TypeVar("C", bound=type)

IMPLEMENTATIONS: dict[type, type[Role]] = {}
"""Implementation -> the role class that declares its methods."""


def implements(role: type[Role]) -> Callable[[C], C]:
    """Compare the decorated class with the role class that declares its methods. Raises TypeError, when the
    class is defined, if they differ.

    Example:
        @implements(Critic)
        class CriticRole: ...
    Raises: TypeError, when the class is defined, for a method that is missing or has another signature than
    its declaration.
    """

    def bind(cls: C) -> C:
        if errors := list(_errors(cls, role)):
            raise TypeError(
                f"{cls.__qualname__} does not implement {role.__qualname__}: {'; '.join(errors)}."
            )
        IMPLEMENTATIONS[cls] = role
        return cls

    return bind


def _errors(cls: type, role: type[Role]) -> Iterator[str]:
    for name, declared in methods_of(role).items():
        implementation = inspect.getattr_static(cls, name, None)
        if implementation is None:
            if not declared.optional:
                yield f"method {name} is missing"
            continue
        found = [*inspect.signature(implementation).parameters.values()][1:]
        wanted = [*declared.signature.parameters.values()]
        if [(p.name, p.kind, p.default) for p in found] != [(p.name, p.kind, p.default) for p in wanted]:
            shown = inspect.Signature(found), inspect.Signature(wanted)
            yield f"{name} takes {shown[0]}, declared is {shown[1]}"
            continue
        hints, declared_hints = get_type_hints(implementation), get_type_hints(declared.function)
        for parameter in [p.name for p in wanted] + ["return"]:
            if hints.get(parameter) != declared_hints.get(parameter):
                yield (
                    f"{name} has {parameter}: {hints.get(parameter)}, "
                    f"declared is {declared_hints.get(parameter)}"
                )
