"""Declare the methods of a role once, in a class that the flow, the trainer and the workers share.

    class Critic(Role, kind="critic"):
        @method(reads=("tokens", "weights:critic"), writes=("values",), phase="values")
        def values(self) -> None:
            "Compute the value of every token."

The body is empty: an instance of the class is the trainer's handle. `critic.values()` calls the method on all
ranks of the role and returns a future of one value per rank. A class of megarl/workers implements the method.
`megarl.workers.implements` compares the two signatures."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    overload,
)

from megarl.futures import Future
from megarl.role_names import kind_and_suffix

P = ParamSpec("P")
R = TypeVar("R")


class Caller(Protocol):
    """The methods of an executor that a role's handle uses."""

    def call(self, role: str, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method on all ranks of a role. Returns a future of one value per rank."""

    def call_on(
        self, ranks: Sequence[int], role: str, method: str, /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Call a method on these ranks of a role. Returns a future of one value per rank, in the order of
        `ranks`."""


@dataclass(eq=False)
class RoleMethod(Generic[P, R]):
    """The declaration of a role's method that the decorator `@method` records: the columns it reads and
    writes, and whether it returns metrics.

    Access on the class returns this object (`Actor.update.commits`). Access on a handle returns the call
    (`actor.update()`)."""

    function: Callable[Concatenate[Any, P], R]
    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | None
    reports: bool
    phase: str
    commits: bool
    of_algorithm: bool
    optional: bool
    name = ""

    def __post_init__(self) -> None:
        # like a decorated function, so that `inspect.unwrap` finds the annotations
        self.__wrapped__ = self.function
        self.__doc__ = self.function.__doc__
        parameters = [*inspect.signature(self.function).parameters.values()][1:]
        self.signature = inspect.Signature(parameters)
        """Parameters without `self`. The names of the annotations are resolved by `typing.get_type_hints`."""

    def __set_name__(self, owner: type[Role], name: str) -> None:
        self.name = name

    @property
    def columns(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Columns that a node of the method reads and writes, or None if the flow must name them."""
        if self.reads is None or self.writes is None or self.of_algorithm:
            return None
        return self.reads, self.writes

    @overload
    def __get__(self, handle: None, owner: type[Role]) -> RoleMethod[P, R]: ...
    @overload
    def __get__(self, handle: Role, owner: type[Role]) -> RoleCall[P, R]: ...
    def __get__(self, handle: Role | None, owner: type[Role]) -> RoleMethod[P, R] | RoleCall[P, R]:
        return self if handle is None else RoleCall(handle, self)

    def __repr__(self) -> str:
        return f"RoleMethod({self.function.__qualname__})"


class RoleCall(Generic[P, R]):
    """A role's method that can be called: `critic.values()` runs on all ranks of the handle's role."""

    def __init__(self, handle: Role, method: RoleMethod[P, R]) -> None:
        self._handle, self._method = handle, method
        self.__doc__, self.__signature__ = method.__doc__, method.signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call the method on the role's ranks, and return a future at once, of one value per rank.

        Raises: TypeError for arguments that the method does not accept, before any rank is called."""
        try:
            self._method.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._handle.name}.{self._method.name}(): {error}") from None
        return self._handle.call(self._method.name, *args, **kwargs)


def method(
    *,
    reads: Iterable[str] | None = None,
    writes: Iterable[str] | None = None,
    reports: bool = False,
    phase: str = "other",
    commits: bool = False,
    of_algorithm: bool = False,
    optional: bool = False,
) -> Callable[[Callable[Concatenate[Any, P], R]], RoleMethod[P, R]]:
    """Declare a method of a role: which columns it reads and writes, and how its results are used. Use as a
    decorator.

    Args:
        reads, writes: columns (see megarl/flow/columns.py). If the driver holds a written column, it needs
            the returned value. Without either, a flow must name the method's columns to use it as a node.
        reports: whether the returned values are metrics of the step.
        phase: the seconds of the call count in the metric time/<phase>_s.
        commits: whether the call changes the content of checkpoints, so that the step must be completed after
            it.
        of_algorithm: `reads` and `writes` are the columns that an algorithm may choose from; the node names
            the chosen ones.
        optional: whether an implementation of the role may lack the method."""
    has_columns = reads is not None or writes is not None

    def declare(function: Callable[Concatenate[Any, P], R]) -> RoleMethod[P, R]:
        return RoleMethod(
            function,
            tuple(reads or ()) if has_columns else None,
            tuple(writes or ()) if has_columns else None,
            reports,
            phase,
            commits,
            of_algorithm,
            optional,
        )

    return declare


class Role:
    """A handle on a role of the job: its methods call the role's ranks. Subclasses declare the methods of a
    kind of role.

    A subclass with a kind declares this kind: roles named `judge`, `judge_2`, ... belong to `class
    Judge(Role, kind="judge")`. A subclass without a kind is a base of several kinds.

    Args:
        caller: usually the job's executor.
        name: name of the role in the job: "actor", "critic_2".
        ranks: the ranks to call, or None for all ranks of the role."""

    kind: ClassVar[str] = ""

    def __init__(self, caller: Caller, name: str, ranks: Sequence[int] | None = None) -> None:
        self._caller, self._name, self._ranks = caller, name, ranks

    def __init_subclass__(cls, kind: str | None = None) -> None:
        super().__init_subclass__()
        if taken := [
            name for name in vars(cls) if name in ("name", "on", "call") and name in methods_of(cls)
        ]:
            raise TypeError(
                f"{cls.__name__}.{taken[0]}: every handle has a member of this name. Rename the method."
            )
        if kind is None:
            return
        other = ROLE_CLASSES.get(kind)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"kind ({kind}) of {cls.__qualname__} is taken by {other.__module__}.{other.__qualname__}."
            )
        if kind_and_suffix(kind) != (kind, ""):
            raise TypeError(
                f"kind ({kind}) must not end in a number: {kind} is the name of one role of a kind."
            )
        cls.kind = kind
        ROLE_CLASSES[kind] = cls

    @property
    def name(self) -> str:
        """Name of the role in the job."""
        return self._name

    def on(self, ranks: Sequence[int]) -> Self:
        """Return a handle on the same role whose calls go only to these ranks."""
        return type(self)(self._caller, self._name, ranks)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the role's implementation by name, declared or not. Returns a future of one value
        per rank."""
        if self._ranks is None:
            return self._caller.call(self._name, method, *args, **kwargs)
        return self._caller.call_on(self._ranks, self._name, method, *args, **kwargs)

    def __repr__(self) -> str:
        some = "" if self._ranks is None else f", ranks={list(self._ranks)}"
        return f"{type(self).__name__}({self._name}{some})"

    if not TYPE_CHECKING:  # a type checker would treat every name as a method

        def __getattr__(self, name: str) -> object:
            if name.startswith("_"):
                raise AttributeError(name)
            known = methods_of(type(self))
            near = difflib.get_close_matches(name, known, n=1)
            raise AttributeError(
                f"{self._name}.{name} is not declared in class {type(self).__name__}."
                f"{f' Did you mean {near[0]}?' if near else ''} "
                f"Declared: {', '.join(sorted(known)) or 'nothing'}. "
                f'{self._name}.call("{name}", ...) calls a method that is not.'
            )


ROLE_CLASSES: dict[str, type[Role]] = {}
"""Maps each kind to the class that declares it, in the order of declaration."""


def role_class(name: str) -> type[Role]:
    """Return the class that declares the role of this name: Critic for critic_2, Role for an unknown kind."""
    return ROLE_CLASSES.get(kind_and_suffix(name)[0], Role)


def methods_of(cls: type[Role]) -> dict[str, RoleMethod[..., Any]]:
    """Return name -> declaration of the methods of a role class, including those it inherits. Its own
    override inherited ones."""
    found: dict[str, RoleMethod[..., Any]] = {}
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if isinstance(value, RoleMethod):
                found.setdefault(name, value)
    return found


def declaration(role: str, method: str) -> RoleMethod[..., Any] | None:
    """Return what `@method` recorded of a role's method (reads, writes, reports), or None if the method is
    not declared."""
    return methods_of(role_class(role)).get(method)


def time_metric(role: str, method: str) -> str:
    """Return the metric that the seconds of a call count in: "time/update_s" for actor.update, "time/other_s"
    for a method without a phase.

    The actor's number is not in the name."""
    declared = declaration(role, method)
    return f"time/{'other' if declared is None else declared.phase}_s"


def writer_of(column: str, index: str = "") -> str | None:
    """Return the call that writes a column, e.g. "reference_2.log_probs", or None if no declared method does.

    Args:
        index: actor index of the writing role."""
    for kind, cls in ROLE_CLASSES.items():
        for name, declared in methods_of(cls).items():
            if column in (declared.writes or ()):
                return f"{kind}{index}.{name}"
    return None
