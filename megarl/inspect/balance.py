"""Find the --staleness and the number of rollout ranks that balance sampling and training, from the times of
a synchronous run.

    megarl balance runs/a                  the run may be a few steps long, and may still be going
    megarl balance runs/a --world-size 16   for a run whose ranks torchrun has started

The seconds per phase in metrics.jsonl are the measurement; docs/asynchronous.md states the model. It leaves
out new prefills, canaries and larger batches of the engine, so expect less than it says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from megarl.config.check import job_errors
from megarl.config.errors import ConfigError
from megarl.config.flags import algorithm_name
from megarl.config.loader import load_config
from megarl.config.mesh import MeshSpec, role_meshes
from megarl.config.rules_streaming import ARGUMENTS
from megarl.config.schema import TrainConfig
from megarl.inspect.arguments import Parser, whole
from megarl.inspect.runs import metrics_of, run_folder

STALENESS = (0, 1, 2, 4)
METRICS = (
    "time/step_s",
    "time/rollout_s",
    "time/reshard_s",
    "response/length_mean",
    "response/length_max",
)
"""Metrics that a row must have to count."""
SKIPPED_STEPS = 1
"""First steps that are left out: the engine and the trainer warm up."""
EQUAL = 0.03
"""Two predictions count as equal if they differ by this fraction: then the smaller staleness is proposed."""


@dataclass(frozen=True)
class Measured:
    """Medians over the steps of a synchronous run, in seconds, and the layout that they belong to."""

    num_steps: int
    step_s: float
    rollout_s: float
    sync_s: float
    """Seconds of the weight sync."""
    reward_s: float
    """Seconds of the rule, whose processes score while the ranks do other work if the run is asynchronous."""
    training_s: float
    """All other seconds: log-probs, values, updates, the driver."""
    length_mean: float
    length_max: float
    """Longest response of a step."""
    num_trainers: int
    num_samplers: int
    """Ranks of the actor and of the engines; the same ranks if `is_colocated`."""
    is_colocated: bool


@dataclass(frozen=True)
class Layout:
    """A possible placement of the engines, and the staleness of their samples."""

    staleness: int
    num_trainers: int
    num_samplers: int
    is_colocated: bool
    ranks: tuple[str, str] | None = None
    """Lists for --actor-ranks and --rollout-ranks. None: those of the run."""


def main(argv: Sequence[str]) -> int:
    from megarl.algorithms import REGISTRY

    parser = Parser("balance", __doc__)
    parser.add_argument("run", metavar="RUN", help="the folder of a run with --staleness 0")
    parser.add_argument(
        "--world-size",
        metavar="N",
        type=whole(1, 16),
        help="ranks of the run; default: its --nnodes times --nproc-per-node",
    )
    arguments = parser.parse(argv)
    folder = run_folder(arguments.run)
    if not (folder / ARGUMENTS).is_file():
        raise ConfigError([f"RUN ({folder}): holds no {ARGUMENTS}. Give the folder of a whole run."])

    def load(flags: Sequence[str] = ()) -> TrainConfig:
        return load_config([f"@{folder / ARGUMENTS}", *flags], REGISTRY, "megarl balance", download=False)

    config = load()
    world_size = arguments.world_size or config.placement.world_size
    check_run(folder, config)
    try:
        meshes = role_meshes(config, world_size)
    except ValueError as error:
        reason = str(error).partition(" Try ")[0]
        rule = f"must be the number of ranks of the run, whose layout it does not fit: {reason}"
        raise ConfigError(
            [f"--world-size ({world_size}): {rule} Give the number that was started."]
        ) from error
    measured = measure(folder, metrics_of(folder), meshes["actor"], meshes["rollout"])
    of_run = {*job_errors(config, world_size, new_run=True)}  # such as: its --save holds a run

    def is_accepted(layout: Layout) -> bool:
        try:
            return of_run.issuperset(job_errors(load(_flags(layout)), world_size, new_run=True))
        except ConfigError:
            return False

    layouts = possible_layouts(measured, world_size, meshes["actor"], meshes["rollout"], is_accepted)
    sys.stdout.write("".join(f"{line}\n" for line in report(folder, measured, layouts)))
    return 0


def check_run(folder: Path, config: TrainConfig) -> None:
    """Raise ConfigError for a run whose seconds do not say how long sampling takes."""
    advice = "Give a run with --staleness 0; a few steps are enough."
    if not config.algorithm.needs_rollout:
        name = algorithm_name(type(config.algorithm))
        raise ConfigError([f"RUN ({folder}): has --algorithm {name}, which samples nothing. {advice}"])
    if config.streaming.staleness:
        raise ConfigError(
            [
                f"RUN ({folder}): has --staleness {config.streaming.staleness}, so its time/rollout_s is the "
                f"time that steps waited, not that of the sampling. {advice}"
            ]
        )
    if config.others:
        raise ConfigError(
            [f"RUN ({folder}): has several actors, whose phases overlap. Give a run with --num-actors 1."]
        )


def measure(folder: Path, rows: Sequence[dict], actor: MeshSpec, rollout: MeshSpec) -> Measured:
    """Return the medians over the rows that have all metrics, without the first steps.

    Raises: ConfigError if there are too few."""
    whole_rows = [row for row in rows if all(row.get(name) is not None for name in METRICS)]
    if len(whole_rows) <= SKIPPED_STEPS:
        found = {name for row in rows for name in row}
        missing = [name for name in METRICS if name not in found]
        reason = f"no {missing[0]}" if missing else f"{len(whole_rows)} steps"
        raise ConfigError(
            [
                f"RUN ({folder}): metrics.jsonl has {reason}, and {SKIPPED_STEPS + 1} steps with "
                f"{', '.join(METRICS)} are needed. Try a run with --train-iters 10."
            ]
        )
    used = whole_rows[SKIPPED_STEPS:]

    def middle(name: str) -> float:
        return median(row.get(name, 0.0) for row in used)

    sampled = ("time/rollout_s", "time/reshard_s", "time/reward_s")
    rest = [row["time/step_s"] - sum(row.get(name, 0.0) for name in sampled) for row in used]
    return Measured(
        num_steps=len(used),
        step_s=middle("time/step_s"),
        rollout_s=middle("time/rollout_s"),
        sync_s=middle("time/reshard_s"),
        reward_s=middle("time/reward_s"),
        training_s=max(0.0, median(rest)),
        length_mean=mean(row["response/length_mean"] for row in used),
        length_max=mean(row["response/length_max"] for row in used),
        num_trainers=len(actor.ranks),
        num_samplers=len(rollout.ranks),
        is_colocated=bool({*actor.ranks} & {*rollout.ranks}),
    )


def predict(measured: Measured, layout: Layout) -> float:
    """Return the predicted seconds of a step, for another placement of the engines or another staleness than
    the measured run had.

    A synchronous step makes as many engine steps as its longest response has tokens, and an engine step costs
    the same with fewer sequences. With staleness S later prompts run beside that response, so sampling takes
    rollout_s * mean / longest, but at least rollout_s / (S + 1), in which the longest response ends. Fewer
    engines than before have more sequences each, and take longer in proportion."""
    sampling = sampling_seconds(measured, layout)
    training = measured.training_s * measured.num_trainers / layout.num_trainers
    if not layout.staleness:
        return sampling + training + measured.reward_s + measured.sync_s
    busy = sampling + training if layout.is_colocated else max(sampling, training)
    return max(busy + measured.sync_s, measured.reward_s)


def sampling_seconds(measured: Measured, layout: Layout) -> float:
    """Return the predicted seconds that a step's sampling takes in a layout; see `predict`."""
    fewer = max(1.0, measured.num_samplers / layout.num_samplers)
    if not layout.staleness:
        return measured.rollout_s * fewer
    even = measured.length_mean / measured.length_max * fewer
    return measured.rollout_s * max(even, 1 / (layout.staleness + 1))


def possible_layouts(
    measured: Measured,
    world_size: int,
    actor: MeshSpec,
    rollout: MeshSpec,
    is_accepted: Callable[[Layout], bool],
) -> list[Layout]:
    """Return the accepted layouts of the run's ranks: engines on all of them, and on ranks of their own.

    If there is none, the run's own ranks remain. The number of ranks of a role is a multiple of its
    model-parallel size.

    Args:
        is_accepted: whether a job may have this layout."""
    model = actor.tp * actor.pp * actor.cp
    places = []
    if world_size % model == 0 == world_size % rollout.tp:
        own = len(actor.ranks) == len(rollout.ranks) == world_size
        ranks = None if own else (_ranks(0, world_size),) * 2
        places.append((world_size, world_size, True, ranks))
    for samplers in range(rollout.tp, world_size - model + 1, rollout.tp):
        if (trainers := world_size - samplers) % model == 0:
            ranks = _ranks(0, trainers), _ranks(trainers, world_size)
            places.append((trainers, samplers, False, ranks))
    # The run has staleness 0, so what is refused with it is the place, and other staleness does not help.
    places = [place for place in places if is_accepted(Layout(0, *place))]
    if not places:
        places = [(measured.num_trainers, measured.num_samplers, measured.is_colocated)]
    layouts = (Layout(staleness, *place) for place in places for staleness in STALENESS)
    return [layout for layout in layouts if not layout.staleness or is_accepted(layout)]


def best_layout(measured: Measured, layouts: Sequence[Layout]) -> Layout:
    """Return the layout with the shortest step; of equal ones that with the smallest staleness, colocated
    first."""
    least = min(predict(measured, layout) for layout in layouts)
    equal = [layout for layout in layouts if predict(measured, layout) <= least * (1 + EQUAL)]
    return min(equal, key=lambda layout: (layout.staleness, not layout.is_colocated))


def report(folder: Path, measured: Measured, layouts: Sequence[Layout]) -> Iterator[str]:
    """Yield the lines that `megarl balance` prints."""
    parts = {
        "rollout": measured.rollout_s,
        "reward": measured.reward_s,
        "weight sync": measured.sync_s,
        "training and the rest": measured.training_s,
    }
    yield (
        f"{folder}: median of {measured.num_steps} steps: {measured.step_s:.3g} s = "
        f"{' + '.join(f'{name} {seconds:.3g}' for name, seconds in parts.items())}"
    )
    place = "the same ranks" if measured.is_colocated else "ranks of their own"
    yield (
        f"{measured.num_trainers} ranks train, {measured.num_samplers} sample ({place}); responses: mean "
        f"{measured.length_mean:.0f} tokens, longest of a step {measured.length_max:.0f}"
    )
    yield "seconds per step, by the model of docs/asynchronous.md:"
    yield f"  {'layout':<32}" + "".join(f"{f'S = {staleness}':>9}" for staleness in STALENESS)
    best, before = best_layout(measured, layouts), measured.step_s
    for place, own in _by_place(layouts).items():
        times = {staleness: f"{predict(measured, layout):.3g}" for staleness, layout in own.items()}
        yield f"  {place:<32}" + "".join(f"{times.get(staleness, '-'):>9}" for staleness in STALENESS)
    if any(len(own) < len(STALENESS) for own in _by_place(layouts).values()):
        yield "-: the run's other flags do not allow it"
    seconds = predict(measured, best)
    faster = f"{before / seconds:.2f} times as fast" if seconds > 0 else "no time"
    yield f"balanced: {' '.join(_flags(best))}   {seconds:.3g} s per step, {faster} at most"
    if not best.is_colocated:
        sampling = sampling_seconds(measured, best)
        training = measured.training_s * measured.num_trainers / best.num_trainers
        yield f"  of that sampling {sampling:.3g} s beside training {training:.3g} s"


def _by_place(layouts: Sequence[Layout]) -> dict[str, dict[int, Layout]]:
    """Return name of the place -> staleness -> layout."""
    places: dict[str, dict[int, Layout]] = {}
    for layout in layouts:
        name = f"{layout.num_trainers} train, {layout.num_samplers} sample"
        if layout.is_colocated:
            name = f"colocated on {layout.num_trainers}"
        places.setdefault(name, {})[layout.staleness] = layout
    return places


def _flags(layout: Layout) -> list[str]:
    """Return the flags that place the actor and the engines as in a layout."""
    flags = ["--staleness", str(layout.staleness)]
    if layout.ranks is None:
        return flags
    return ["--actor-ranks", layout.ranks[0], "--rollout-ranks", layout.ranks[1], *flags]


def _ranks(first: int, end: int) -> str:
    return str(first) if end - first == 1 else f"{first}-{end - 1}"
