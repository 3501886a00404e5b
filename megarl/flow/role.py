"""A role is a class whose methods are declared once: for the flow, for the trainer and for the workers.

    class Critic(Role, kind="critic"):
        @method(reads=("tokens", "weights:critic"), writes=("values",), phase="values")
        def values(self) -> None:
            "Compute the value of every token."

The body is empty: an instance of the class is the trainer's handle. `critic.values()` calls the method on all
ranks of the role and returns a future of one value per rank. A class of megarl/workers implements the method;
`megarl.workers.implements` compares the two signatures.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
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

from megarl.role_names import kind_and_suffix

P = ParamSpec("P")
R = TypeVar("R")


class Future(Protocol[R]):
    """The values that a call will return, one per rank."""

    @property
    def role(self) -> str:
        """Name of the called role."""

    @property
    def seconds(self) -> float:
        """Seconds on the rank where the call took longest; 0 until done."""

    @property
    def ended(self) -> float:
        """`time.time()` when the last rank was through; 0 until done."""

    def result(self) -> list[R]:
        """Return the values in the order of the role's ranks. Blocks; raises the first error of the job."""

    def first(self) -> R:
        """Return the value of the role's first rank. Waits for all of them."""

    def done(self) -> bool:
        """Whether `result` would return at once. Raises like `result`."""


class Caller(Protocol):
    """The part of an executor that a handle uses."""

    def call(self, role: str, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method on all ranks of a role."""

    def call_on(
        self, ranks: Sequence[int], role: str, method: str, /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Call a method on these ranks of a role. Values come in the order of `ranks`."""


class RoleMethod(Generic[P, R]):
    """The declaration of a role's method: what the call reads, writes and reports. Made by `method`.

    On the class it is this object (`Actor.update.commits`), on a handle the call (`actor.update()`).
    """

    name = ""

    def __init__(
        self,
        function: Callable[Concatenate[Any, P], R],
        reads: tuple[str, ...] | None,
        writes: tuple[str, ...] | None,
        reports: bool,
        phase: str,
        commits: bool,
        of_algorithm: bool,
        optional: bool,
    ) -> None:
        self.function, self.reads, self.writes = function, reads, writes
        self.__wrapped__ = function  # as of a decorated function: `inspect.unwrap` finds the annotations
        self.__doc__ = function.__doc__
        self.reports, self.phase, self.commits = reports, phase, commits
        self.of_algorithm, self.optional = of_algorithm, optional
        parameters = [*inspect.signature(function).parameters.values()][1:]
        self.signature = inspect.Signature(parameters)
        """Parameters without `self`. The names of the annotations are resolved by `typing.get_type_hints`."""

    def __set_name__(self, owner: type[Role], name: str) -> None:
        self.name = name

    @property
    def columns(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Columns that a node of the method reads and writes. None: the flow has to say them."""
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
    """A declared method of one handle: calling it calls the method on the role's ranks."""

    def __init__(self, handle: Role, method: RoleMethod[P, R]) -> None:
        self._handle, self._method = handle, method
        self.__doc__, self.__signature__ = method.__doc__, method.signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call the method and return a future at once.

        Raises: TypeError for arguments that the method does not take, before any rank is called."""
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
    """Declare a method of a role.

    Args:
        reads, writes: columns (see megarl/flow/columns.py). A written column that the driver holds means that
            the driver needs the returned value. Without either the method is no node of a flow, unless the
            flow says its columns.
        reports: the returned values are metrics of the step.
        phase: the call's seconds are counted in the metric time/<phase>_s.
        commits: the call changes what a checkpoint holds, so that the step has to be completed from here on.
        of_algorithm: `reads` and `writes` are what an algorithm may choose from; the node names its choice.
        optional: not every implementation of the role has the method.
    """
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
    """A handle on a role of the job, and the base of the classes that declare roles.

    A subclass with a kind is known by it: roles named `judge`, `judge_2`, ... are of `class Judge(Role,
    kind="judge")`. A subclass without a kind is a base of several kinds.

    Args:
        caller: usually the job's executor.
        name: name of the role in the job: "actor", "critic_2".
        ranks: None: all ranks of the role.
    """

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
        other = _CLASSES.get(kind)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"kind ({kind}) of {cls.__qualname__} is taken by {other.__module__}.{other.__qualname__}."
            )
        if kind_and_suffix(kind) != (kind, ""):
            raise TypeError(
                f"kind ({kind}) must not end in a number: {kind} is the name of one role of a kind."
            )
        cls.kind = kind
        _CLASSES[kind] = cls

    @property
    def name(self) -> str:
        """Name of the role in the job."""
        return self._name

    def on(self, ranks: Sequence[int]) -> Self:
        """Return a handle whose calls go to these ranks of the role only."""
        return type(self)(self._caller, self._name, ranks)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call any method of the implementation by name, declared or not."""
        if self._ranks is None:
            return self._caller.call(self._name, method, *args, **kwargs)
        return self._caller.call_on(self._ranks, self._name, method, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}{'' if self._ranks is None else f', ranks={list(self._ranks)}'})"

    if not TYPE_CHECKING:  # a type checker would take every name for a method

        def __getattr__(self, name: str) -> object:
            known = methods_of(type(self))
            near = difflib.get_close_matches(name, known, n=1)
            raise AttributeError(
                f"{self._name}.{name} is not declared in class {type(self).__name__}."
                f"{f' Did you mean {near[0]}?' if near else ''} Declared: {', '.join(sorted(known)) or 'nothing'}. "
                f'{self._name}.call("{name}", ...) calls a method that is not.'
            )


_CLASSES: dict[str, type[Role]] = {}
"""Kind -> the class that declares it."""


def role_classes() -> Mapping[str, type[Role]]:
    """Return the classes of all declared kinds by kind, in the order of their declaration."""
    return MappingProxyType(_CLASSES)


def role_class(name: str) -> type[Role]:
    """Return the class that declares the role of this name: Critic for critic_2, Role for an unknown kind."""
    return _CLASSES.get(kind_and_suffix(name)[0], Role)


def methods_of(cls: type[Role]) -> dict[str, RoleMethod[..., Any]]:
    """Return the declared methods of a role class by name, its own before those of its bases."""
    found: dict[str, RoleMethod[..., Any]] = {}
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if isinstance(value, RoleMethod):
                found.setdefault(name, value)
    return found


def declaration(role: str, method: str) -> RoleMethod[..., Any] | None:
    """Return what is declared of a method of the role of this name, or None."""
    return methods_of(role_class(role)).get(method)


def writer_of(column: str, suffix: str = "") -> str | None:
    """Return the call that writes a column, by the role with this actor index: "reference_2.log_probs". None: no
    declared method writes the column."""
    for kind, cls in _CLASSES.items():
        for name, declared in methods_of(cls).items():
            if column in (declared.writes or ()):
                return f"{kind}{suffix}.{name}"
    return None
