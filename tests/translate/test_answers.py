"""What is proposed in place of another framework's flag is accepted, for each value that the tables know."""

import re
import shlex

import pytest

from megarl.algorithms import REGISTRY
from megarl.config.errors import ConfigError
from megarl.config.flags import build_flags
from megarl.config.loader import load_config
from megarl.config.other_flags import find_library_flag
from megarl.frameworks import others, slime, trl, verl
from megarl.frameworks.rows import LORA_MODULES

TABLES = {"verl": verl.TABLE, "TRL": trl.TABLE, "slime": slime.TABLE, "others": others.TABLE}
OURS = {name for cls in REGISTRY.values() for name in build_flags(cls)} | {"algorithm"}
CONVERTED = {"lora-target-modules": LORA_MODULES, "log-with": ("wandb", "all"), "algorithm": ("gae", "rloo")}
"""Our flag -> values of the settings that a function converts into it."""
REFUSAL = re.compile(r"no such flag|must be |takes |needs a value|has no \w+- form|is a flag of")
"""In an error about a flag: it does not exist, or its value does not parse."""


def errors(*argv):
    try:
        load_config(argv, REGISTRY)
    except ConfigError as error:
        return error.errors
    return ()


def known_values(row):
    converted = [CONVERTED[flag] for flag in row.flags_here() if flag in CONVERTED]
    return [*(row.values if row.convert is None else (converted or [["1"]])[0])]


def foreign(name):
    return "*" not in name and name not in OURS and find_library_flag(name) is None


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("table", TABLES)
def test_every_proposal_parses(table, algorithm):
    settings = {
        name: known_values(row) for row in TABLES[table] for name in row.names.split() if foreign(name)
    }
    proposals = set()
    for number in range(max(map(len, settings.values()))):
        values = {name: found[number] for name, found in settings.items() if number < len(found)}
        found = errors("--algorithm", algorithm, *(f"--{name}={value}" for name, value in values.items()))
        for name in values:
            [error] = [error for error in found if error.startswith(f"--{name} (")]
            assert "no such flag: ." not in error
            proposals |= {match[1] for match in re.finditer(r"Try (--.*?) instead\.", error)}
    assert len(proposals) >= {"others": 1}.get(table, 10)
    for proposal in proposals:
        words = shlex.split(proposal)
        given = [word for word in words if word.startswith("--")]
        chosen = () if "--algorithm" in given else ("--algorithm", algorithm)
        refused = [error for error in errors(*chosen, *words) if error.startswith(tuple(given))]
        assert not any(REFUSAL.search(error) for error in refused), (proposal, refused)
