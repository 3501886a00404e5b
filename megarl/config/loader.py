"""argv -> TrainConfig. Precedence: defaults < args files < command line. Every error is collected and all are reported at once.

Example: load_config(["--algorithm", "grpo", "@configs/sums.args", "--lr", "1e-5"], REGISTRY)"""

from __future__ import annotations

import itertools
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields

from megarl.config.argsfile import Occurrence, Reader
from megarl.config.errors import FieldErrors, did_you_mean, raise_findings
from megarl.config.flags import OF_ROLES, ROLES, SECTIONS, Flag, algorithm_flags, build_flags
from megarl.config.passthrough import find_engine_flag, find_transformer_flag, passthrough_names
from megarl.config.roles import absent_roles
from megarl.config.schema import TrainConfig
from megarl.config.write import algorithm_name, write_args

__all__ = ["load_config", "write_args"]

Target = tuple[str, str]


class Setting(typing.NamedTuple):
    """A flag's value and where it was written. `valid` is False if the words had no value of the flag's type."""

    value: object
    occurrence: Occurrence
    valid: bool = True


def load_config(argv: Sequence[str], algorithms: Mapping[str, type], prog: str = "megarl train") -> TrainConfig:
    """Parse flags and args files.

    Args:
        argv: flags and @files, without the program's name.
        algorithms: name -> frozen dataclass; --algorithm chooses one, its fields are flags.
        prog: for the usage line of --help.
    Raises: ConfigError listing every error; SystemExit(0) after printing the help text, for --help or -h; TypeError if the registry
        calls an algorithm otherwise than it calls itself, as write_args could then not name it.
    """
    for name, cls in algorithms.items():
        if algorithm_name(cls) != name:
            raise TypeError(f"the registry calls {cls.__name__} {name!r}; give it the attribute name: ClassVar[str] = {name!r}")
    if not {"--help", "-h"}.isdisjoint(argv):
        from megarl.config.help import help_text  # only a reader needs it

        sys.stdout.write(help_text(algorithms, prog))
        raise SystemExit(0)
    return _Loader(argv, algorithms).config()


class _Loader:
    def __init__(self, argv: Sequence[str], algorithms: Mapping[str, type]) -> None:
        reader = Reader()
        reader.read(argv)
        self.algorithms, self.errors = algorithms, reader.errors
        self.algorithm = self._choose_algorithm(reader.occurrences)
        self.flags = build_flags(self.algorithm)
        self.owners = algorithm_flags(algorithms)
        self.settings: dict[Target, Setting] = {}
        self.given: dict[str, Occurrence] = {}
        self._set_all([occurrence for occurrence in reader.occurrences if occurrence.name != "algorithm"])

    def config(self) -> TrainConfig:
        sections = {"algorithm": self._build("algorithm", self.algorithm)} if self.algorithm else {}
        sections |= {name: self._build(name, cls) for name, cls in SECTIONS.items()}
        self._leave_out_absent_roles(sections)
        raise_findings(list(dict.fromkeys(self.errors)))
        return TrainConfig(**sections, transformer=self._extra("transformer"))

    def _leave_out_absent_roles(self, sections: dict[str, object | None]) -> None:
        """None for the sections of roles that the job has not; a flag of such a role is an error."""
        if sections.get("algorithm") is None or sections.get("reward_models") is None:
            return  # what is wrong with them is reported
        for role, reason in absent_roles(sections["algorithm"], sections["reward_models"].reward_model).items():
            own = [section_of[role] for section_of in OF_ROLES.values() if role in section_of]
            sections |= dict.fromkeys(own)
            for name, occurrence in self.given.items():
                flag = self.flags.get(name)
                says_something = flag is not None and self.settings[flag.targets[0]].value != flag.default
                if says_something and name.startswith(f"{role}-") and flag.targets[0][0] in (*own, "placement", "model"):
                    self.errors.append(f"{occurrence}: {reason}, so there is no {role} role. Leave it out. [{occurrence.place}]")

    def _choose_algorithm(self, occurrences: list[Occurrence]) -> type | None:
        names = ", ".join(self.algorithms)
        chosen = [occurrence for occurrence in occurrences if occurrence.name == "algorithm"]
        for first, second in itertools.pairwise(chosen):
            if first.level == second.level:
                self.errors.append(_given_twice(first, second))
        if not chosen:
            self.errors.append(f"--algorithm is required: one of {names}.")
            return None
        last = max(chosen, key=lambda occurrence: occurrence.level)
        name = last.words[0].text if len(last.words) == 1 else ""
        if name not in self.algorithms:
            self.errors.append(f"{last}: must be one of {names}.{did_you_mean(name, self.algorithms, prefix='')} [{last.place}]")
        return self.algorithms.get(name)

    def _set_all(self, occurrences: list[Occurrence]) -> None:
        """Lower levels first; within a level, flags of more roles before flags of fewer. So the last value holds."""
        found = [(*pair, occurrence) for occurrence in occurrences if (pair := self._find(occurrence)) is not None]
        found.sort(key=lambda item: (item[2].level, -len(item[0].targets)))
        seen: dict[tuple[int, str], tuple[bool, Occurrence]] = {}
        for flag, negated, occurrence in found:
            if (occurrence.level, flag.name) in seen:
                before_negated, before = seen[occurrence.level, flag.name]
                self.errors.append(_given_twice(before, occurrence) if negated == before_negated else _contradiction(before, occurrence))
                continue
            seen[occurrence.level, flag.name] = negated, occurrence
            setting = self._parse(flag, negated, occurrence)
            self.given[flag.name] = occurrence
            self.settings |= {target: setting for target in flag.targets}

    def _find(self, occurrence: Occurrence) -> tuple[Flag, bool] | None:
        """The flag and whether it was negated (--no-flag). None: unknown or refused, and reported."""
        found = self._lookup(occurrence.name)
        if not isinstance(found, Flag) and occurrence.name.startswith("no-"):
            positive = self._lookup(occurrence.name.removeprefix("no-"))
            if isinstance(positive, Flag) and positive.kind.is_bool:
                return positive, True
            found = found or (positive if isinstance(positive, str) else None)
        if isinstance(found, Flag):
            return found, False
        if self.algorithm is None and occurrence.name.removeprefix("no-") in self.owners:
            return None  # --algorithm is missing or wrong, which is reported: this flag may well be right
        self.errors.append(f"{occurrence}: {found or self._unknown(occurrence.name)} [{occurrence.place}]")
        return None

    def _lookup(self, name: str) -> Flag | str | None:
        if name in self.flags:
            return self.flags[name]
        if name in self.owners:
            owners = " and ".join(self.owners[name])
            return f"is a flag of {owners}, which --algorithm does not choose."
        if name.startswith("rollout-"):
            return find_engine_flag(name)
        return find_transformer_flag(name)

    def _unknown(self, name: str) -> str:
        role = next((role for role in ROLES if name.startswith(f"{role}-")), None)
        if role and self._lookup(name.removeprefix(f"{role}-")) is not None:
            return f"has no {role}- form. Set --{name.removeprefix(f'{role}-')}."
        if name.startswith("rollout-no-"):
            return f"no such flag.{did_you_mean('no-rollout-' + name.removeprefix('rollout-no-'), self._names())}"
        return f"no such flag.{did_you_mean(name, self._names())}"

    def _names(self) -> list[str]:
        """Every flag that could be meant; the schema's come first, as the nearest of equals is the first."""
        names = [*self.flags, "algorithm", *self.owners, *passthrough_names()]
        return names + [f"no-{name}" for name, flag in self.flags.items() if flag.kind.is_bool]

    def _parse(self, flag: Flag, negated: bool, occurrence: Occurrence) -> Setting:
        try:
            if flag.kind.is_bool and not occurrence.words:
                return Setting(not negated, occurrence)
            if flag.kind.is_bool and not (flag.kind.optional and not negated and occurrence.words[0].text == "none"):
                raise ValueError(f"takes no value. Write --{flag.name} or --no-{flag.name}.")
            value = flag.kind.parse(occurrence.words)
        except ValueError as error:
            self.errors.append(f"{occurrence}: {error} [{occurrence.place}]")
            return Setting(None, occurrence, valid=False)
        return Setting(value, occurrence)

    def _build(self, section: str, cls: type) -> object | None:
        """One node of the tree. With a missing or invalid field it gets None there, so that its other rules still report."""
        values, complete = {}, True
        for field in fields(cls):
            setting = self.settings.get((section, field.name))
            required = field.default is MISSING and field.default_factory is MISSING
            if setting is None and required:
                self.errors.append(f"--{self._flag_of(section, field.name)} is required: {self._help_of(section, field.name)}")
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
        return {field: setting.value for (owner, field), setting in self.settings.items() if owner == section and setting.valid}

    def _rule_error(self, section: str, field: str, value: object, rule: str) -> str:
        setting = self.settings.get((section, field))
        if setting is None:
            return f"--{self._flag_of(section, field)} ({value}): {rule}"
        return f"{setting.occurrence}: {rule} [{setting.occurrence.place}]"

    def _flag_of(self, section: str, field: str) -> str:
        return next((flag.name for flag in self.flags.values() if (section, field) in flag.targets), field)

    def _help_of(self, section: str, field: str) -> str:
        return self.flags[self._flag_of(section, field)].help


def _given_twice(first: Occurrence, second: Occurrence) -> str:
    values = " and ".join(" ".join(word.text for word in occurrence.words) or "no value" for occurrence in (first, second))
    return f"--{first.name} ({values}): is given twice. Keep one [{first.place}; {second.place}]"


def _contradiction(first: Occurrence, second: Occurrence) -> str:
    return f"--{first.name} contradicts --{second.name}. Keep one [{first.place}; {second.place}]"
