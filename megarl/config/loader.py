"""argv -> TrainConfig. Precedence: defaults < args files < command line. Every error is collected and all are
reported at once.

Example: load_config(["--algorithm", "grpo", "@configs/sums.args", "--lr", "1e-5"], REGISTRY)"""

from __future__ import annotations

import difflib
import itertools
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields

from megarl.config.argsfile import Occurrence, Reader
from megarl.config.check_paths import unreachable_paths
from megarl.config.errors import FieldErrors, did_you_mean, raise_findings
from megarl.config.flags import (
    OF_JOB,
    OF_ROLES,
    ROLES,
    SECTIONS,
    Flag,
    algorithm_flags,
    build_flags,
    number_and_name,
    numbered,
)
from megarl.config.passthrough import find_engine_flag, find_transformer_flag, passthrough_names
from megarl.config.roles import absent_roles
from megarl.config.schema import TrainConfig
from megarl.config.synonyms import FLAG_OF, REASON_OF, our_name
from megarl.config.write import algorithm_name, write_args

__all__ = ["load_config", "write_args"]

Target = tuple[str, str]


class Setting(typing.NamedTuple):
    """A flag's value and where it was written. `valid` is False if the words had no value of the flag's
    type."""

    value: object
    occurrence: Occurrence
    valid: bool = True


def load_config(
    argv: Sequence[str], algorithms: Mapping[str, type], prog: str = "megarl train"
) -> TrainConfig:
    """Parse flags and args files.

    Args:
        argv: flags and @files, without the program's name.
        algorithms: name -> frozen dataclass; --algorithm chooses one, its fields are flags.
        prog: for the usage line of --help.
    Raises: ConfigError listing every error, then every path that the system does not look at; SystemExit(0)
        after printing the help text, for --help or -h; TypeError if the registry calls an algorithm otherwise
        than it calls itself, as write_args could then not name it.
    """
    for name, cls in algorithms.items():
        if algorithm_name(cls) != name:
            raise TypeError(
                f"the registry calls {cls.__name__} {name!r}; give it the attribute name: "
                f"ClassVar[str] = {name!r}"
            )
    if not {"--help", "-h"}.isdisjoint(argv):
        from megarl.config.help import help_text  # only a reader needs it

        sys.stdout.write(help_text(algorithms, prog))
        raise SystemExit(0)
    reader = Reader()
    reader.read(argv)
    loaders = [_Loader(reader.occurrences, algorithms)]
    loaders += [
        _Loader(reader.occurrences, algorithms, number) for number in range(2, loaders[0].num_actors + 1)
    ]
    sections = [loader.sections() for loader in loaders]
    errors = [
        *reader.errors,
        *_without_actor(reader.occurrences, len(loaders)),
        *(error for loader in loaders for error in loader.errors),
    ]
    raise_findings(list(dict.fromkeys(errors)))
    first, *others = sections
    config = TrainConfig(**first, others=tuple(TrainConfig(**of_actor) for of_actor in others))
    raise_findings(list(unreachable_paths(config)))
    return config


def _without_actor(occurrences: Sequence[Occurrence], num_actors: int) -> Iterator[str]:
    for occurrence in occurrences:
        if (number := number_and_name(occurrence.name)[0]) > num_actors:
            yield (
                f"{occurrence}: there is no actor {number}, as --num-actors is {num_actors}. Try "
                f"--num-actors {number}. [{occurrence.place}]"
            )


class _Loader:
    """The configuration of one actor: from the flags that are about all of them, and those with its number,
    which count more.

    Of the second actor and so on nothing is said about a flag without a number: the first's loader has."""

    def __init__(
        self, occurrences: Sequence[Occurrence], algorithms: Mapping[str, type], number: int = 1
    ) -> None:
        self.algorithms, self.number, self.errors = algorithms, number, []
        of_all_or_mine = [
            occurrence for occurrence in occurrences if number_and_name(occurrence.name)[0] in (1, number)
        ]
        self.algorithm = self._choose_algorithm(of_all_or_mine)
        self.flags = build_flags(self.algorithm)
        self.owners = algorithm_flags(algorithms)
        self.settings: dict[Target, Setting] = {}
        self.given: dict[str, Occurrence] = {}
        self._set_all(
            [occurrence for occurrence in of_all_or_mine if not self._chooses_algorithm(occurrence)]
        )

    @property
    def num_actors(self) -> int:
        setting = self.settings.get(("placement", "num_actors"))
        return min(max(setting.value, 1), 64) if setting is not None and setting.valid else 1

    def sections(self) -> dict[str, object | None]:
        """The fields of TrainConfig. What is wrong with them is in `errors`."""
        sections = {"algorithm": self._build("algorithm", self.algorithm)} if self.algorithm else {}
        sections |= {name: self._build(name, cls) for name, cls in SECTIONS.items()}
        self._leave_out_absent_roles(sections)
        return sections | {"transformer": self._extra("transformer")}

    def _is_mine(self, occurrence: Occurrence) -> bool:
        return number_and_name(occurrence.name)[0] == self.number

    def _leave_out_absent_roles(self, sections: dict[str, object | None]) -> None:
        """None for the sections of roles that the actor has not; a flag of such a role is an error."""
        if sections.get("algorithm") is None or sections.get("reward_models") is None:
            return  # what is wrong with them is reported
        for role, reason in absent_roles(
            sections["algorithm"], sections["reward_models"].reward_model
        ).items():
            own = [section_of[role] for section_of in OF_ROLES.values() if role in section_of]
            sections |= dict.fromkeys(own)
            if role == "rollout":  # one args file may serve several algorithms
                continue
            for name, occurrence in self.given.items():
                flag = self.flags.get(name)
                says_something = (
                    flag is not None
                    and self._is_mine(occurrence)
                    and self.settings[flag.targets[0]].value != flag.default
                )
                if (
                    says_something
                    and name.startswith(f"{role}-")
                    and flag.targets[0][0] in (*own, "placement", "model")
                ):
                    self.errors.append(
                        f"{occurrence}: {reason}, so there is no {role} role. Leave it out. "
                        f"[{occurrence.place}]"
                    )

    def _chooses_algorithm(self, occurrence: Occurrence) -> bool:
        return number_and_name(occurrence.name)[1] in ("algorithm", "actor-algorithm")

    def _choose_algorithm(self, occurrences: list[Occurrence]) -> type | None:
        names = ", ".join(self.algorithms)
        chosen = [occurrence for occurrence in occurrences if self._chooses_algorithm(occurrence)]
        for first, second in itertools.pairwise(chosen):
            if (first.level, first.name) == (second.level, second.name):
                self.errors.append(_given_twice(first, second))
        if not chosen:
            self.errors.append(f"--algorithm is required: one of {names}.")
            return None
        last = max(chosen, key=lambda occurrence: (occurrence.level, number_and_name(occurrence.name)))
        name = last.words[0].text if len(last.words) == 1 else ""
        if name not in self.algorithms:
            self.errors.append(
                f"{last}: must be one of {names}.{did_you_mean(name, self.algorithms, prefix='')} "
                f"[{last.place}]"
            )
        return self.algorithms.get(name)

    def _set_all(self, occurrences: list[Occurrence]) -> None:
        """Lower levels first; within a level, flags of all actors before this one's, and flags of more roles
        before flags of fewer. So the last value holds."""
        found = [
            (*pair, occurrence) for occurrence in occurrences if (pair := self._find(occurrence)) is not None
        ]
        found.sort(key=lambda item: (item[2].level, number_and_name(item[2].name)[0], -len(item[0].targets)))
        seen: dict[tuple[int, int, str], tuple[bool, Occurrence]] = {}
        for flag, negated, occurrence in found:
            key = (occurrence.level, number_and_name(occurrence.name)[0], flag.name)
            if key in seen:
                before_negated, before = seen[key]
                self.errors.append(
                    _given_twice(before, occurrence)
                    if negated == before_negated
                    else _contradiction(before, occurrence)
                )
                continue
            seen[key] = negated, occurrence
            setting = self._parse(flag, negated, occurrence)
            self.given[flag.name] = occurrence
            self.settings |= {target: setting for target in flag.targets}

    def _find(self, occurrence: Occurrence) -> tuple[Flag, bool] | None:
        """The flag and whether it was negated (--no-flag). None: unknown or refused, and reported."""
        number, name = number_and_name(occurrence.name)
        found, is_negated = self._resolve(name)
        if (
            number > 1 and not isinstance(found, Flag) and name.removeprefix("no-").startswith("actor-")
        ):  # has no form per role
            found, is_negated = self._resolve(name.replace("actor-", "", 1))
        if isinstance(found, Flag) and number > 1 and OF_JOB.issuperset(found.targets):
            found = f"is the whole job's. Leave it out, or try --{found.name}{_value(occurrence)} instead."
        if isinstance(found, Flag):
            return found, is_negated
        if (
            self.algorithm is None
            and name.removeprefix("no-") in self.owners
            or not self._is_mine(occurrence)
        ):
            # a missing --algorithm is reported, and this flag may well be right; or the first actor's loader
            # judges it
            return None
        refused = f"{found}{'' if 'eave' in found else f' Leave --{occurrence.name} out.'}" if found else ""
        self.errors.append(f"{occurrence}: {refused or self._unknown(name, occurrence)} [{occurrence.place}]")
        return None

    def _resolve(self, name: str) -> tuple[Flag | str | None, bool]:
        """The flag of this name, why it is refused, or None; and whether the name negates it."""
        found = self._lookup(name)
        if not isinstance(found, Flag) and name.startswith("no-"):
            positive = self._lookup(name.removeprefix("no-"))
            if isinstance(positive, Flag) and positive.kind.is_bool:
                return positive, True
            found = found or (positive if isinstance(positive, str) else None)
        return found, False

    def _lookup(self, name: str) -> Flag | str | None:
        if name in self.flags:
            return self.flags[name]
        if name in self.owners:
            owners = " and ".join(self.owners[name])
            return f"is a flag of {owners}, which --algorithm does not choose. Leave it out."
        if name.startswith("rollout-"):
            return find_engine_flag(name)
        return find_transformer_flag(name)

    def _unknown(self, name: str, occurrence: Occurrence) -> str:
        role = next((role for role in ROLES if name.startswith(f"{role}-")), None)
        if role and self._lookup(name.removeprefix(f"{role}-")) is not None:
            return (
                f"has no {role}- form. Try "
                f"--{numbered(name.removeprefix(f'{role}-'), self.number)}{_value(occurrence)} instead."
            )
        if found := self._elsewhere(name, occurrence):
            return found
        if name.startswith("rollout-no-"):
            return (
                "no such "
                f"flag.{did_you_mean('no-rollout-' + name.removeprefix('rollout-no-'), self._names())}"
            )
        return (
            "no such "
            f"flag.{did_you_mean(occurrence.name, self._names()) or ' Leave it out; --help lists all.'}"
        )

    def _elsewhere(self, name: str, occurrence: Occurrence) -> str | None:
        """What a flag of another framework is called here."""
        name = our_name(name)
        if name in REASON_OF:
            return f"no such flag: {REASON_OF[name]}. Leave it out."
        ours = FLAG_OF.get(name)
        if ours is None or any(
            flag not in self.flags and flag != "algorithm" for flag in re.findall(r"--([\w-]+)", ours)
        ):
            return None
        first, space, rest = ours.partition(" ")
        return (
            "no such flag. Try "
            f"--{numbered(first.removeprefix('--'), self.number)}{space}{rest.replace('{}', _value(occurrence).strip())} instead."
        )

    def _names(self) -> list[str]:
        """Every flag that could be meant; the schema's come first, as the nearest of equals is the first."""
        names = [
            numbered(name, self.number)
            for name in (*self.flags, "algorithm", *self.owners, *passthrough_names())
        ]
        return names + [
            f"no-{numbered(name, self.number)}" for name, flag in self.flags.items() if flag.kind.is_bool
        ]

    def _parse(self, flag: Flag, negated: bool, occurrence: Occurrence) -> Setting:
        try:
            if flag.kind.is_bool and not occurrence.words:
                return Setting(not negated, occurrence)
            if flag.kind.is_bool and not (
                flag.kind.optional and not negated and occurrence.words[0].text == "none"
            ):
                raise ValueError(f"takes no value. Write --{self._name(flag)} or --no-{self._name(flag)}.")
            value = flag.kind.parse(occurrence.words)
        except ValueError as error:
            self.errors.append(f"{occurrence}: {error}{_try(flag, occurrence)} [{occurrence.place}]")
            return Setting(None, occurrence, valid=False)
        return Setting(value, occurrence)

    def _build(self, section: str, cls: type) -> object | None:
        """One node of the tree. With a missing or invalid field it gets None there, so that its other rules
        still report."""
        values, complete = {}, True
        for field in fields(cls):
            setting = self.settings.get((section, field.name))
            required = field.default is MISSING and field.default_factory is MISSING
            if setting is None and required and self.number == 1:
                self.errors.append(
                    f"--{self._flag_of(section, field.name)} is required: "
                    f"{self._help_of(section, field.name)}"
                )
            if setting is None and required or setting is not None and not setting.valid:
                values[field.name], complete = None, False
            elif setting is not None:
                values[field.name] = setting.value
        if section == "rollout":
            values["engine_args"] = self._extra("engine_args")
        if section == "algorithm" and not complete:
            return None
        try:
            return cls(**values)
        except FieldErrors as error:
            self.errors += [self._rule_error(section, *finding) for finding in error.findings]
        except ValueError as error:
            self.errors.append(f"--{section}: {error}")
        return None

    def _extra(self, section: str) -> dict[str, object]:
        return {
            field: setting.value
            for (owner, field), setting in self.settings.items()
            if owner == section and setting.valid
        }

    def _rule_error(self, section: str, field: str, value: object, rule: str) -> str:
        setting = self.settings.get((section, field))
        if setting is None:
            return f"--{self._flag_of(section, field)} ({value}): {rule}"
        return f"{setting.occurrence}: {rule} [{setting.occurrence.place}]"

    def _flag_of(self, section: str, field: str) -> str:
        """With the actor's number if any flag of the section has it; else the first actor's loader says the
        same."""
        mine = any(
            of == section and self._is_mine(setting.occurrence) for (of, _), setting in self.settings.items()
        )
        return next(
            (
                self._name(flag) if mine else flag.name
                for flag in self.flags.values()
                if (section, field) in flag.targets
            ),
            field,
        )

    def _name(self, flag: Flag) -> str:
        """As this actor's flag is written."""
        return flag.name if OF_JOB.issuperset(flag.targets) else numbered(flag.name, self.number)

    def _help_of(self, section: str, field: str) -> str:
        return next(flag.help for flag in self.flags.values() if (section, field) in flag.targets)


def _value(occurrence: Occurrence) -> str:
    """' 1 2' of --flag 1 2."""
    return "".join(f" {word.text}" for word in occurrence.words)


def _try(flag: Flag, occurrence: Occurrence) -> str:
    """' Try cosine.': the nearest of a few choices, else the default, else to leave the flag out."""
    choices = [str(choice) for choice in flag.kind.choices]
    near = [
        near[0] for word in occurrence.words if (near := difflib.get_close_matches(word.text, choices, n=1))
    ]
    if near and len(near) == len(occurrence.words):
        return f" Try {' '.join(dict.fromkeys(near))}."
    if flag.kind.is_bool:
        return ""  # the rule says how to write it
    if flag.required:
        return {("int",): " Try 100."}.get(flag.kind.bases, "")
    values = flag.default if isinstance(flag.default, tuple) else (flag.default,)
    return (
        " Leave it out."
        if None in values or not values or not flag.kind.bases
        else f" Try {' '.join(map(str, values))}."
    )


def _given_twice(first: Occurrence, second: Occurrence) -> str:
    values = " and ".join(
        " ".join(word.text for word in occurrence.words) or "no value" for occurrence in (first, second)
    )
    return f"--{first.name} ({values}): is given twice. Keep one [{first.place}; {second.place}]"


def _contradiction(first: Occurrence, second: Occurrence) -> str:
    return f"--{first.name} contradicts --{second.name}. Keep one [{first.place}; {second.place}]"
