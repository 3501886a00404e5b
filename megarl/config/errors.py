"""Configuration errors: everything that is wrong is collected first and reported at once."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence


class ConfigError(ValueError):
    """What is wrong with a configuration. `findings` holds one line per error: flag (value): rule [place]."""

    def __init__(self, findings: Sequence[str]) -> None:
        self.findings = tuple(findings)
        head = [] if len(findings) == 1 else [f"{len(findings)} configuration errors:"]
        super().__init__("\n".join(head + [line if not head else f"  - {line}" for line in findings]))


class FieldErrors(ValueError):
    """Fields of one dataclass that break their own rule. `findings` holds (field, value, rule)."""

    def __init__(self, findings: Sequence[tuple[str, object, str]]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(f"{name} ({value}): {rule}" for name, value, rule in findings))


def require(
    node: object,
    at_least: Mapping[str, float] = {},
    above: Mapping[str, float] = {},
    at_most: Mapping[str, float] = {},
    below: Mapping[str, float] = {},
    rules: Iterable[tuple[bool, str, str]] = (),
) -> None:
    """One-field checks of a dataclass, all reported together.

    Args:
        node: the dataclass instance; fields that are None are not checked.
        at_least, above, at_most, below: bound by field name.
        rules: (holds, field, rule) for what is not a bound.
    Raises: FieldErrors, a ValueError.
    """
    findings, default = (
        [],
        {f.name: f.default for f in dataclasses.fields(node)} if dataclasses.is_dataclass(node) else {},
    )
    bounds = [
        (at_least, "at least", lambda value, bound: value >= bound),
        (above, "above", lambda value, bound: value > bound),
        (at_most, "at most", lambda value, bound: value <= bound),
        (below, "below", lambda value, bound: value < bound),
    ]
    for fields, words, holds in bounds:
        for name, bound in fields.items():
            value = getattr(node, name)
            if value is not None and not holds(value, bound):  # written so that NaN breaks every bound
                findings.append(
                    (name, value, f"must be {words} {bound:g}.{_try(default.get(name), bound, words, holds)}")
                )
    findings += [(name, getattr(node, name), rule) for holds, name, rule in rules if not holds]
    if findings:
        raise FieldErrors(findings)


def _try(default: object, bound: float, words: str, holds: Callable[[float, float], bool]) -> str:
    """' Try 0.95.': the default, or the bound itself where it is allowed."""
    if isinstance(default, (int, float)) and not isinstance(default, bool) and holds(default, bound):
        return f" Try {default:g}."
    return f" Try {bound:g}." if words.startswith("at") else " Leave it out."


def raise_findings(findings: Sequence[str]) -> None:
    """Raises: ConfigError that lists the findings, if there are any."""
    if findings:
        raise ConfigError(findings)


def did_you_mean(name: str, names: Iterable[str], prefix: str = "--", cutoff: float = 0.6) -> str:
    """' Did you mean --lr?', or '' when nothing comes near. `cutoff`: how alike the names must be, from 0 to
    1."""
    near = difflib.get_close_matches(name.replace("_", "-"), list(names), n=1, cutoff=cutoff)
    return f" Did you mean {prefix}{near[0]}?" if near else ""
