"""Make a TrainConfig from the command line, and report all errors at once.

Precedence: defaults < args files < command line.

Example: load_config(["--algorithm", "grpo", "@configs/sums.args", "--lr", "1e-5"], REGISTRY)"""

from __future__ import annotations

import difflib
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.config.args_file import Occurrence, Reader, numbered
from megarl.config.errors import FieldErrors, did_you_mean, raise_errors
from megarl.config.flags import (
    OF_ROLES,
    ROLES,
    SECTIONS,
    Flag,
    Kind,
    Word,
    algorithm_flags,
    algorithm_name,
    build_flags,
    section_flags,
)
from megarl.config.hub import localize
from megarl.config.other_flags import find_library_flag, passthrough_names
from megarl.config.roles import absent_roles
from megarl.config.rules_files import unreachable_paths
from megarl.config.rules_streaming import stale_defaults
from megarl.config.schema import TrainConfig
from megarl.config.user_algorithm import is_in_file, load_user_algorithm, with_user_algorithms
from megarl.frameworks.answers import find_row
from megarl.frameworks.rows import TIMES, Line, as_number, format_line


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of a field and the flag that set it. Not `valid` if the flag's words do not parse."""

    value: object
    given: Occurrence
    valid: bool = True


def load_config(
    argv: Sequence[str],
    algorithms: Mapping[str, type],
    prog: str = "megarl train",
    defaults: Sequence[str] = (),
    download: bool = True,
) -> TrainConfig:
    """Return the configuration that flags and args files give, or raise ConfigError with all errors.

    Args:
        argv: flags and @files, without the program's name.
        algorithms: name -> frozen dataclass. --algorithm chooses one, whose fields are flags, or a class in
            a file of the user's.
        prog: program in the usage line of --help.
        defaults: flags that args files and `argv` override.
        download: whether weights that flags name on the hub are downloaded.
    Raises: ConfigError with all errors, or else with all paths that cannot be looked at; if an args file
        cannot be read, only with the errors that do not depend on it. SystemExit(0) after --help or -h has
        printed the help text. TypeError if an algorithm has another name in the registry than in its class,
        because write_args could then not name it.
    """
    for name, cls in algorithms.items():
        if algorithm_name(cls) != name:
            raise TypeError(
                f"the registry calls {cls.__name__} {name!r}; give it the attribute name: "
                f"ClassVar[str] = {name!r}"
            )
    if not {"--help", "-h"}.isdisjoint(argv):
        from megarl.config.render import help_text  # imported for --help only

        try:
            algorithms = with_user_algorithms(algorithms, argv)
        except ValueError as error:
            raise_errors([f"--algorithm: {error}"])
        sys.stdout.write(help_text(algorithms, prog))
        raise SystemExit(0)
    reader = Reader()
    reader.read_defaults(defaults)
    reader.read(argv)
    given = reader.occurrences
    loaders = [_Loader(given, algorithms)]
    if reader.misses_flags:  # each flag in the file would be reported as missing too
        raise_errors([*reader.errors, *loaders[0].errors], is_complete=False)
    count = loaders[0].num_actors
    loaders += [_Loader(given, algorithms, number) for number in range(2, count + 1)]
    actors = [loader.sections() for loader in loaders]
    errors = list(reader.errors)
    for one in given:
        if one.number > count:
            advice = f"Try --num-actors {one.number}."
            errors.append(one.error(f"there is no actor {one.number}, as --num-actors is {count}. {advice}"))
    errors += [error for loader in loaders for error in loader.errors]
    raise_errors(list(dict.fromkeys(errors)), is_complete=False)
    for loader, sections in zip(loaders, actors, strict=True):
        errors += localize(loader.given, sections, download)
    raise_errors(errors, is_complete=False)
    first, *others = (_Loader(given, algorithms, number).sections() for number in range(1, count + 1))
    config = TrainConfig(**first, others=tuple(TrainConfig(**other) for other in others))
    raise_errors(list(unreachable_paths(config)), is_complete=False)
    return config


class _Loader:
    """Makes the configuration of one actor from the flags without an actor's number (--lr) and those with its
    number (--actor-2-lr).

    Only the first actor's loader reports errors of flags without a number."""

    def __init__(self, given: Sequence[Occurrence], algorithms: Mapping[str, type], number: int = 1) -> None:
        self.algorithms, self.number = algorithms, number
        self.errors: list[str] = []
        self.mine = mine = [one for one in given if one.number in (1, number)]
        self.choosing = choosing = [one for one in mine if one.base in ("algorithm", "actor-algorithm")]
        self.algorithm = self._choose_algorithm(choosing) if choosing else None
        self.flags = build_flags(self.algorithm)
        self.owners = algorithm_flags(algorithms)
        self.settings: dict[tuple[str, str], Setting] = {}
        self.given: dict[str, Occurrence] = {}
        self._set_all([one for one in mine if one not in choosing])

    @property
    def num_actors(self) -> int:
        setting = self.settings.get(("placement", "num_actors"))
        return min(max(setting.value, 1), 64) if setting is not None and setting.valid else 1

    @property
    def stale_defaults(self) -> dict[str, object]:
        """The defaults of the algorithm's fields that depend on --staleness.

        Empty with --old-log-probs engine: the rule that refuses it would otherwise name the flags of these
        fields, which nobody gave."""
        setting = self.settings.get(("streaming", "staleness"))
        old_log_probs = self.settings.get(("algorithm", "old_log_probs"))
        if old_log_probs is not None and old_log_probs.value == "engine":
            return {}
        return stale_defaults(setting.value) if setting is not None and setting.valid else {}

    def sections(self) -> dict[str, object | None]:
        """Return name -> value for the fields of TrainConfig: None for an absent role, and for a section with
        errors, which are added to `errors`."""
        if not self.choosing:
            self.errors.insert(0, f"--algorithm is required: one of {', '.join(self.algorithms)}.")
        sections = {"algorithm": self._build("algorithm", self.algorithm)} if self.algorithm else {}
        sections |= {name: self._build(name, cls) for name, cls in SECTIONS.items()}
        self._leave_out_absent_roles(sections)
        return sections | {"transformer": self._passed_through("transformer")}

    def _leave_out_absent_roles(self, sections: dict[str, object | None]) -> None:
        """Set the sections of roles that the actor does not have to None, and add an error to `errors` for a
        flag of such a role."""
        if sections.get("algorithm") is None or sections.get("reward_models") is None:
            return  # their errors are reported
        reward_models = sections["reward_models"].reward_model
        for role, reason in absent_roles(sections["algorithm"], reward_models).items():
            own = [section_of[role] for section_of in OF_ROLES.values() if role in section_of]
            sections |= dict.fromkeys(own)
            if role == "rollout":  # one args file may serve several algorithms
                continue
            for name, given in self.given.items():
                flag = self.flags.get(name)
                if flag is None or given.number != self.number or not name.startswith(f"{role}-"):
                    continue
                section = flag.targets[0][0]
                is_default = self.settings[flag.targets[0]].value == flag.default
                if section in (*own, "placement", "model") and not is_default:
                    self.errors.append(given.error(f"{reason}, so there is no {role} role. Leave it out."))

    def _choose_algorithm(self, chosen: list[Occurrence]) -> type | None:
        for first, second in itertools.pairwise(chosen):
            if (first.level, first.name) == (second.level, second.name):
                self.errors.append(_given_twice(first, second))
        names = ", ".join(self.algorithms)
        last = max(chosen, key=lambda one: (one.level, one.number, one.base))
        name = last.words[0].text if len(last.words) == 1 else ""
        if is_in_file(name):
            try:
                return load_user_algorithm(name)
            except ValueError as error:
                self.errors.append(last.error(str(error)))
                return None
        if name not in self.algorithms:
            advice = did_you_mean(name, self.algorithms, prefix="")
            self.errors.append(last.error(f"must be one of {names}.{advice}"))
        return self.algorithms.get(name)

    def _set_all(self, given: list[Occurrence]) -> None:
        """Parse the words of all flags and store the values in `settings`. A later value replaces an earlier
        one.

        Lower levels come first. Within a level, flags of all actors come before this actor's flags, and flags
        of several roles before flags of one."""
        found = [(*pair, one) for one in given if (pair := self._find(one)) is not None]
        found.sort(key=lambda item: (item[2].level, item[2].number, -len(item[0].targets)))
        seen: dict[tuple[int, int, str], tuple[bool, Occurrence]] = {}
        for flag, negated, one in found:
            key = (one.level, one.number, flag.name)
            if key in seen:
                before_negated, before = seen[key]
                report = _given_twice if negated == before_negated else _contradiction
                self.errors.append(report(before, one))
                continue
            seen[key] = negated, one
            setting = self._parse(flag, negated, one)
            self.given[flag.name] = one
            self.settings |= {target: setting for target in flag.targets}

    def _find(self, given: Occurrence) -> tuple[Flag, bool] | None:
        """Return the flag and whether it was negated (--no-flag); None if it is unknown or refused, which is
        added to `errors`."""
        number, name = given.number, given.base
        found, is_negated = self._resolve(name)
        if number > 1 and not isinstance(found, Flag) and name.removeprefix("no-").startswith("actor-"):
            found, is_negated = self._resolve(name.replace("actor-", "", 1))  # has no form per role
        if isinstance(found, Flag) and number > 1 and found.is_of_job:
            found = f"is the whole job's. Leave it out, or try --{found.name}{given.value} instead."
        if isinstance(found, Flag):
            return found, is_negated
        may_be_right = self.algorithm is None and name.removeprefix("no-") in self.owners
        if may_be_right or number != self.number:
            return None  # a missing --algorithm is reported, or another loader judges
        if found and "eave" not in found:
            found = f"{found} Leave --{given.name} out."
        self.errors.append(given.error(found or self._unknown(given)))
        return None

    def _resolve(self, name: str) -> tuple[Flag | str | None, bool]:
        """Return a name's flag (the reason if it is refused, None if it is unknown) and whether the name
        negates it."""
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
        return find_library_flag(name)

    def _unknown(self, given: Occurrence) -> str:
        """Return the text of the error for a flag that does not exist, and propose a similar one."""
        name, value = given.base, given.value
        role = next((role for role in ROLES if name.startswith(f"{role}-")), None)
        if role and self._lookup(name.removeprefix(f"{role}-")) is not None:
            flag = numbered(name.removeprefix(f"{role}-"), self.number)
            return f"has no {role}- form. Try --{flag}{value} instead."
        if found := self._elsewhere(name, value):
            return found
        if name.startswith("rollout-no-"):
            written = f"no-rollout-{name.removeprefix('rollout-no-')}"
            return f"no such flag.{did_you_mean(written, self._names())}"
        near = did_you_mean(given.name, self._names())
        return f"no such flag.{near or ' Leave it out; --help lists all.'}"

    def _elsewhere(self, name: str, value: str) -> str | None:
        """Return the text of the error for a flag of another framework, with the flag of the same meaning
        here; None for any other name."""
        row = find_row(name)
        if row is None:
            return None
        lines = row.lines_here(value.strip() or True, self._known_values(row.times))
        lines = [self._rounded_up(line) for line in lines] if row.times else lines
        if not lines:
            flags = " and ".join(f"--{flag}" for flag in sorted(row.flags_here()))
            is_known = row.has_counterpart(value.strip() or True)
            reason = row.instead if is_known else f"its value has no counterpart among those of {flags}"
            return f"no such flag{f': {reason}' if reason else ''}. Leave it out."
        if {line.flag for line in lines} - {*self.flags, "algorithm"}:
            return None
        why = f": {row.note}" if row.note else ""
        for line in lines:
            flag = self._name_of(line)
            if isinstance(line.value, str) and TIMES in line.value:
                return f"no such flag{why}. Set --{flag} to {line.value}."
            if rule := self._broken_rule(line):
                return f"no such flag{why}. Here it is --{flag}: {rule}"
        words = " ".join(format_line(line._replace(flag=self._name_of(line))) for line in lines)
        return f"no such flag{why}. Try {words} instead."

    def _rounded_up(self, line: Line) -> Line:
        """Return a line whose value is whole if its flag counts something, such as steps."""
        flag = self.flags.get(line.flag)
        is_whole = flag is None or flag.kind.bases != ("int",) or not isinstance(line.value, float)
        return line if is_whole else line._replace(value=math.ceil(line.value))

    def _name_of(self, line: Line) -> str:
        flag = self.flags.get(line.flag)
        return numbered(line.flag, self.number) if flag is None else self._name(flag)

    def _broken_rule(self, line: Line) -> str:
        """Return why a proposed flag's value does not parse; "" if it does."""
        flag = self.flags.get(line.flag)
        if flag is None:  # --algorithm
            is_known = line.value in self.algorithms
            return "" if is_known else f"must be one of {', '.join(self.algorithms)}."
        if flag.kind.is_bool:
            return ""
        values = line.value if isinstance(line.value, list) else [line.value]
        try:
            flag.kind.parse([Word(str(value)) for value in values if value is not True])
        except ValueError as error:
            return str(error)
        return ""

    def _known_values(self, name: str) -> dict[str, object]:
        """Return {name: value} of the flag by which another framework's value is multiplied: the given value
        or the default; {} for an unknown flag."""
        given = [one.words[0].text for one in self.mine if one.base == name and one.words]
        flag = self.flags.get(name)
        return {name: as_number(given[-1]) if given else flag.default} if flag is not None else {}

    def _names(self) -> list[str]:
        """Return all names that a misspelled flag could mean. The schema's come first, because the first of
        two equally similar names is proposed."""
        names = [*self.flags, "algorithm", *self.owners, *passthrough_names()]
        negated = [name for name, flag in self.flags.items() if flag.kind.is_bool]
        return [numbered(name, self.number) for name in names] + [
            f"no-{numbered(name, self.number)}" for name in negated
        ]

    def _parse(self, flag: Flag, negated: bool, given: Occurrence) -> Setting:
        words, name = given.words, self._name(flag)
        if flag.kind.is_bool and not words:
            return Setting(not negated, given)
        try:
            if flag.kind.is_bool and (negated or not flag.kind.optional or words[0].text != "none"):
                raise ValueError(f"takes no value. Write --{name} or --no-{name}.")
            if flag.default == () and words == [Word("none")]:
                return Setting((), given)
            return Setting(flag.kind.parse(words), given)
        except ValueError as error:
            self.errors.append(given.error(f"{error}{_try(flag, given)}"))
            return Setting(None, given, valid=False)

    def _build(self, section: str, cls: type) -> object | None:
        """Return one section of the configuration as a dataclass; None if a rule is broken, which is added to
        `errors`.

        A missing or invalid field is set to None, so that the rules of the other fields still report."""
        values, complete = {}, True
        is_corrected = section == "algorithm" and getattr(cls, "needs_correction", False)
        of_staleness = self.stale_defaults if is_corrected else {}
        for flag in section_flags(section, cls):
            setting = self.settings.get((section, flag.field))
            if setting is not None:
                values[flag.field] = setting.value
                complete &= setting.valid
            elif flag.default is None and flag.field in of_staleness:
                values[flag.field] = of_staleness[flag.field]
            elif flag.required:
                values[flag.field], complete = None, False
                if self.number == 1:
                    self.errors.append(f"--{flag.name} is required: {flag.help}")
        if section == "rollout":
            values["engine_args"] = self._passed_through("engine_args")
        if section == "algorithm" and not complete:
            return None
        try:
            return cls(**values)
        except FieldErrors as error:
            self.errors += [self._rule_error(section, *rule) for rule in error.errors]
        except ValueError as error:
            self.errors.append(f"--{section}: {error}")
        return None

    def _passed_through(self, section: str) -> dict[str, object]:
        """Return name -> value of the flags that are passed on as vLLM's engine arguments or as fields of
        Megatron's TransformerConfig."""
        settings = self.settings.items()
        return {name: found.value for (owner, name), found in settings if owner == section and found.valid}

    def _rule_error(self, section: str, field: str, value: object, rule: str) -> str:
        if (setting := self.settings.get((section, field))) is not None:
            return setting.given.error(rule)
        flag = self._flag_of(section, field)
        # without a flag of this actor in the section, the first actor's loader reports the same error
        mine = any(
            of == section and setting.given.number == self.number
            for (of, _), setting in self.settings.items()
        )
        return f"--{self._name(flag) if mine else flag.name} ({value}): {rule}"

    def _flag_of(self, section: str, field: str) -> Flag:
        found = (flag for flag in self.flags.values() if (section, field) in flag.targets)
        return next(found, Flag(name=field, targets=((section, field),), kind=Kind()))

    def _name(self, flag: Flag) -> str:
        """Return the flag's name for this loader's actor, e.g. critic-2-lr for the second."""
        return flag.name if flag.is_of_job else numbered(flag.name, self.number)


def _try(flag: Flag, occurrence: Occurrence) -> str:
    """Return ' Try cosine.' with the nearest choice, else with the default, else ' Leave it out.'"""
    choices = [str(choice) for choice in flag.kind.choices]
    near = [difflib.get_close_matches(word.text, choices, n=1) for word in occurrence.words]
    if near and all(near):
        return f" Try {' '.join(dict.fromkeys(match[0] for match in near))}."
    if flag.kind.is_bool:
        return ""  # the rule itself shows the right form
    if flag.required:
        return " Try 100." if flag.kind.bases == ("int",) else ""
    values = flag.default if isinstance(flag.default, tuple) else (flag.default,)
    if None in values or not values or not flag.kind.bases:
        return " Leave it out."
    return f" Try {' '.join(map(str, values))}."


def _given_twice(first: Occurrence, second: Occurrence) -> str:
    values = " and ".join(occurrence.value[1:] or "no value" for occurrence in (first, second))
    return f"--{first.name} ({values}): is given twice. Keep one [{first.place}; {second.place}]"


def _contradiction(first: Occurrence, second: Occurrence) -> str:
    return f"--{first.name} contradicts --{second.name}. Keep one [{first.place}; {second.place}]"
