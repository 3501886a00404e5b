"""Define the rows of the tables that map settings of other frameworks to megarl's flags.

A table has one row per setting. `megarl translate` translates a whole configuration with it, and the
configuration's loader answers a single foreign flag with it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import NamedTuple

_FLAG = re.compile(r"--([\w-]+)(?: (?!--)(\S+))?")
TRUTH = dict.fromkeys(("1", "yes", "on"), "true") | dict.fromkeys(("0", "no", "off"), "false")
"""Other ways to write true and false -> key in `Row.values`."""
TIMES = " x --"
"""Stands between a number and a flag whose value is not known yet."""


class Line(NamedTuple):
    """One flag of an args file, its value (True: a flag without a value), and what to know about it.

    A line without a flag is a comment."""

    flag: str
    value: object = True
    note: str = ""


def format_line(line: Line) -> str:
    """Return a line as one would type it, e.g. --kl-coef 0.001."""
    if line.value is False:
        return f"--no-{line.flag}"
    words = [] if line.value is True else line.value if isinstance(line.value, list) else [line.value]
    return " ".join([f"--{line.flag}", *map(str, words)])


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of another framework, and the flags of megarl that take its place.

    Args:
        names: its names there, separated by spaces; * stands for anything.
        flags: our flags, {} for the value. Empty if there is none: then `instead` says what to do.
        values: value there -> value here, None if it has no counterpart. Other values are kept.
        convert: makes the value here of the value there, in place of `values`.
        times: our flag by whose value the value is multiplied.
        default: the value there if it is not given.
        note: what is only approximately the same.
        instead: what to do where no flag has this meaning.
        lines: makes the lines where several settings decide together. Rows that share it are translated
            once, where the first of them stands; their `flags` serve the loader's answers.
    """

    names: str
    flags: str = ""
    values: Mapping[str, object] = field(default_factory=dict)
    convert: Callable[[object], object] | None = None
    times: str = ""
    default: object = None
    note: str = ""
    instead: str = ""
    lines: Callable[[Settings], Iterator[Line]] | None = None

    def has(self, name: str) -> bool:
        """Return whether this row is about the setting of this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.names.split())

    def value_here(self, value: object, ours: Mapping[str, object]) -> object:
        """Return the value of megarl's flag that corresponds to a value of the setting.

        Args:
            ours: our flags whose values are known, without dashes."""
        value = self.values.get(self._key(value), value) if self.convert is None else self.convert(value)
        if not self.times or value is None or value is True:  # True: no value was given
            return value
        factor = ours.get(self.times)
        number = as_number(value)
        if not isinstance(factor, int | float) or number is None:
            return f"{value}{TIMES}{self.times}"
        product = float(f"{number * factor:.9g}")
        return int(product) if product.is_integer() else product

    def _key(self, value: object) -> str:
        key = key_of(value)
        return key if key in self.values else TRUTH.get(key, key)

    def has_counterpart(self, value: object) -> bool:
        """Return whether a value corresponds to one here, or may do so, because other values are kept."""
        if self.convert is not None:
            return self.convert(value) is not None
        return self.flags != "{}" or self._key(value) in self.values

    def flags_here(self) -> set[str]:
        """Return the names of megarl's flags that take the value of this setting."""
        texts = [self.flags] if self.flags != "{}" else [str(value) for value in self.values.values()]
        found = [(flag.removeprefix("no-"), word) for text in texts for flag, word in _FLAG.findall(text)]
        return {flag for flag, word in found if "{}" in word} or {flag for flag, _ in found}

    def lines_here(self, value: object, ours: Mapping[str, object]) -> list[Line]:
        """Return megarl's flags with the value; none if no flag has this meaning."""
        here = self.value_here(value, ours)
        is_switched_off = "{}" not in self.flags and key_of(value) == "false"
        if here is None or is_switched_off:
            return []
        if self.flags == "{}":
            return [_switch(flag, word) for flag, word in _FLAG.findall(str(here))]
        found = []
        for flag, word in _FLAG.findall(self.flags):
            filled: object = word.replace("{}", str(here)) or True
            found.append(Line(flag, here if word == "{}" else filled, self.note))
        return found


@dataclass(frozen=True)
class Settings:
    """The settings of one configuration of another framework.

    Args:
        given: name there -> value.
        table: rows of the framework, which know its defaults.
        rows: number of rows of the training data, if it is known.
        ranks: number of processes, if the command line says so.
        ours: values of our flags, without dashes: those that are translated already, else their defaults.
    """

    given: Mapping[str, object]
    table: tuple[Row, ...]
    rows: int | None = None
    ranks: int | None = None
    ours: MutableMapping[str, object] = field(default_factory=dict)

    @cached_property
    def _defaults(self) -> dict[str, object]:
        return {name: row.default for row in self.table for name in row.names.split()}

    def __getitem__(self, name: str) -> object:
        """Return the value of a setting, or the default of the foreign framework if it is not given.

        None that is given, such as null in YAML, is a value: it turns a default off."""
        return self.given[name] if name in self.given else self._defaults.get(name)

    def number(self, name: str) -> int | float | None:
        """Return a setting as a number; None if it has no value or is no number."""
        return as_number(self[name])

    def is_on(self, name: str) -> bool:
        """Whether a setting is true."""
        return key_of(self[name]) in ("true", "1", "yes")


def _switch(flag: str, word: str) -> Line:
    if flag.startswith("no-"):
        return Line(flag.removeprefix("no-"), False)
    return Line(flag, word or True)


def key_of(value: object) -> str:
    """Return a value as text in lower case, to look it up in `Row.values`."""
    return str(value).lower()


def as_number(value: object) -> int | float | None:
    """Return a value as an int if it is whole, else as a float; None if it is no number."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return int(str(value))
    except ValueError:
        pass
    try:
        number = float(str(value))
    except ValueError:
        return None
    return int(number) if number.is_integer() else number


def as_list(value: object) -> list[str]:
    """Return the items of a list, or of its text: ['a', 'b'], [a,b], a."""
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    if value is None:
        return []
    text = str(value).strip()
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [item for part in inner.split(",") if (item := part.strip().strip("'\""))]


ASYNC_PROGRAMS = ("train_async", "one_step_off_policy", "fully_async_policy")
"""Parts of the names of programs of slime and verl that sample while they train; the tables have a row for
each, as if it were a setting."""


def is_asynchronous(settings: Settings) -> bool:
    """Return whether the program samples while it trains."""
    return any(program in settings.given for program in ASYNC_PROGRAMS)


def engine_log_probs(settings: Settings, name: str) -> Line:
    """Return the flag --old-log-probs engine, or a comment for asynchronous training, which refuses the flag.

    Args:
        name: of the setting there."""
    if is_asynchronous(settings):
        why = "--old-log-probs trainer, the default, is needed with --staleness; --tis-clip corrects"
        return Line("", note=f"{name}: {why}")
    return Line("old-log-probs", "engine")


def train_iters(epochs: float, rows: int | None, per_step: object, source: str) -> Line:
    """Return --train-iters for passes over the data; a comment with the formula if rows are unknown.

    Args:
        per_step: prompts of one step.
        source: what the passes are called there."""
    prompts = as_number(per_step)
    if rows is None or not prompts:
        size = per_step if prompts else "--num-prompts"
        advice = ". Name the number of rows: megarl translate --rows N" if rows is None else ""
        return Line(
            "", note=f"--train-iters = {source} {epochs:g} x (rows of --train-data // {size}){advice}"
        )
    steps, note = int(epochs * int(rows // prompts)), f"{source} {epochs:g} x ({rows} rows // {per_step})"
    return Line("train-iters", steps, note) if steps else Line("", note=f"--train-iters N: {note} is 0")


def schedule(
    prefix: str, lr: object, style: object, warmup: int | None, min_ratio: object = None
) -> Iterator[Line]:
    """Yield the flags of a learning rate and its schedule.

    Args:
        prefix: critic- or nothing.
        style: name of the schedule there.
        warmup: steps of the warm-up."""
    yield Line(f"{prefix}lr", lr)
    name = key_of(style)
    if name in STYLES:
        yield Line(f"{prefix}lr-decay-style", STYLES[name], NEAR_STYLES.get(name, ""))
    elif style is not None:
        yield Line(f"{prefix}lr-decay-style", "cosine", f"{style} is not known here; cosine is the nearest")
    if warmup is not None and warmup > 0:
        yield Line(f"{prefix}lr-warmup-iters", warmup)
    if as_number(min_ratio) and as_number(lr) is not None:
        yield Line(f"{prefix}min-lr", float(f"{as_number(min_ratio) * as_number(lr):.6g}"))


def decaying(prefix: str, lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the flags of a schedule, without the end of its decay if it is constant: megarl refuses one that
    has no effect.

    Args:
        prefix: of the flags, critic- or nothing."""
    found = list(lines)
    styles = [line.value for line in found if line.flag == f"{prefix}lr-decay-style"]
    is_constant = not styles or styles[-1] == "constant"
    ends = {f"{prefix}min-lr", f"{prefix}lr-decay-iters"} if is_constant else set()
    yield from (line for line in found if line.flag not in ends)


STYLES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine",
    "polynomial": "linear",
    "wsd": "linear",
}
"""Schedule of the learning rate elsewhere -> --lr-decay-style."""
NEAR_STYLES = {
    "cosine_with_restarts": "one cosine without restarts",
    "polynomial": "the power 1",
    "wsd": "decays from the first step after the warm-up; there it is constant for a while",
}
"""What is different about some of them here."""
KL_ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
"""Name of an estimate of the KL in verl and slime -> --kl-estimator."""
KL_FLAGS = {name: f"--kl-estimator {ours}" for name, ours in KL_ESTIMATORS.items()} | {
    f"{name}+": f"--kl-estimator {ours} --kl-straight-through" for name, ours in KL_ESTIMATORS.items()
}
"""The same names, in verl also with + for the gradient of k2 -> our flags."""
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
"""What gradient checkpointing of every layer is here."""
LORA_MODULES = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
}
"""Layer of a Hugging Face model -> Megatron's layer, for --lora-target-modules."""


START = "start it on every node by torchrun, or with --executor ray (docs/clusters.md)"
"""How a job on several nodes begins."""


def ranks_of_nodes(nodes: int, per_node: int, note: str = "") -> Iterator[Line]:
    """Yield --nproc-per-node and --nnodes.

    Args:
        note: what to know about the number of ranks."""
    yield Line("nproc-per-node", per_node, note)
    yield Line("nnodes", nodes, START if nodes > 1 else "")


def separate_ranks(actor: int, engines: int, engine: int, room: int) -> Iterator[Line]:
    """Yield the ranks of a trainer and of engines that share none, on nodes of the same size.

    If no number of nodes leaves each engine on one node, the nodes are a comment.

    Args:
        actor: ranks of the trainer.
        engines: ranks of all engines.
        engine: ranks of one engine.
        room: GPUs of a node."""
    ranks = actor + engines
    sizes = [ranks // nodes for nodes in range(-(-ranks // room), ranks + 1) if ranks % nodes == 0]
    firsts = range(actor, ranks - engine + 1, engine)
    size = next((n for n in sizes if all(one // n == (one + engine - 1) // n for one in firsts)), None)
    if size is None:
        why = f"no equal nodes of up to {room} ranks hold {actor} of the trainer and engines of {engine} each"
        yield Line("", note=f"--nnodes N --nproc-per-node M: {why}")
    else:
        yield from ranks_of_nodes(ranks // size, size)
    yield Line("actor-ranks", f"0-{actor - 1}")
    yield Line("rollout-ranks", f"{actor}-{ranks - 1}")


def lora_modules(modules: object) -> list[str] | None:
    """Return the --lora-target-modules for layers by Hugging Face's or Megatron's names, or for all-linear.
    None if no name is known."""
    layers = list(dict.fromkeys(LORA_MODULES.values()))
    names = [name for text in as_list(modules) for name in text.split()]
    if "all-linear" in names:
        return layers
    named = {LORA_MODULES.get(name, name) for name in names}
    return [layer for layer in layers if layer in named] or None


def lora(prefix: str, rank: object, alpha: object, modules: object) -> Iterator[Line]:
    """Yield the flags of adapters; nothing if the rank is 0.

    Args:
        prefix: actor-, critic-, or nothing for the adapters of all roles."""
    if not as_number(rank):
        return
    yield Line(f"{prefix}lora-rank", rank)
    yield Line(f"{prefix}lora-alpha", alpha)
    names = as_list(modules)
    found = lora_modules(names)
    if found and "all-linear" not in names:
        added = sorted(
            name for name, layer in LORA_MODULES.items() if layer in found and not {name, layer} & {*names}
        )
        note = f"has {' '.join(added)} too" if added else ""
        yield Line(f"{prefix}lora-target-modules", found, note)
    for name in names:
        if name not in (*LORA_MODULES, *LORA_MODULES.values(), "all-linear"):
            yield Line("", note=f"{name}: --{prefix}lora-target-modules has no such layer")


def known_trackers(logger: object) -> list[str]:
    """Return the trackers of a list that megarl has."""
    names = [name for text in as_list(logger) for name in text.split()]
    return [name for name in TRACKERS if name in names or "all" in names]


def trackers(logger: object) -> Iterator[Line]:
    """Yield --log-with for a list of trackers; those that megarl does not have are a comment."""
    yield Line("log-with", known_trackers(logger))
    for name in as_list(logger):
        if name not in (*TRACKERS, "console", "none", "null", "all"):
            yield Line("", note=f"tracker {name}: not here; metrics.jsonl has every metric")


TRACKERS = ("tensorboard", "wandb", "mlflow")
"""Values of --log-with."""


def model_folder(path: object) -> Line:
    """Return --model, with advice if the value is the name of a repository of the Hugging Face Hub."""
    if path is None:
        return Line("", note="--model FOLDER: the model is not named")
    is_hub = isinstance(path, str) and path.count("/") == 1 and path[0].isalnum()
    return Line("model", path, "a folder: download the model and name its folder" if is_hub else "")
