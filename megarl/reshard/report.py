"""`megarl reshard-plan`: report what a weight sync from the trainer to the engines moves, and how long the
sync takes if only bandwidth limits it. Arithmetic on shapes: no torch, no device, no weights.

    megarl reshard-plan @configs/job.args [--flag value ...] [--world-size 16] [--ranks-per-node 8]

A copy within a rank reads and writes that rank's memory; one between two ranks of a node uses their link; one
between nodes the network. Each rank does its share of each kind at the stated bandwidth, the kinds one after
the other, and the slowest rank counts. Parameters that lie alike on both sides of a rank in one dtype are one
storage (aliased) where the engine is in the trainer's process: they cost nothing."""

from __future__ import annotations

import argparse
import time
from collections import Counter

from megarl.config.errors import ConfigError
from megarl.config.hf_config import ModelShape
from megarl.config.mesh import MeshSpec
from megarl.config.schema import TrainConfig
from megarl.reshard.alias import find_aliases
from megarl.reshard.atlas import Atlas
from megarl.reshard.engine_atlas import engine_atlases
from megarl.reshard.megatron_atlas import megatron_atlases
from megarl.reshard.plan import ReshardPlan, make_plan

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_BACKENDS = {"vllm": "vLLM", "transformers": "transformers"}
"""--rollout-backend -> its name in sentences."""
KINDS = ("same rank", "same node", "between nodes")
_MOST_PAIRS = 64
_MOST_RANKS = 65_536


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `megarl reshard-plan`, and the other words, which are args files and flags of the
    job.

    Prints the help text and exits for --help or -h."""
    parser = argparse.ArgumentParser(
        "megarl reshard-plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--world-size", type=_positive(int, _MOST_RANKS), help="ranks of the job; default: --nproc-per-node"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=_positive(int, _MOST_RANKS),
        default=8,
        help="consecutive ranks share a node; default: 8",
    )
    bandwidths = (
        (
            "local",
            2000,
            "copies within a rank: an H200 reads and writes 4.8 TB/s, so copies at most half of that",
        ),
        (
            "link",
            360,
            "of one rank's link to the others of its node: NVLink 4 has 450 GB/s each way, four "
            "fifths assumed",
        ),
        ("network", 45, "of one rank to other nodes: 400 Gbit/s, nine tenths assumed"),
    )
    for name, default, of in bandwidths:
        parser.add_argument(
            f"--{name}-bandwidth",
            type=_positive(float),
            default=float(default),
            help=f"GB/s {of}; default: {default}",
        )
    return parser.parse_known_args(argv)


def _positive(kind: type, at_most: float = 1e9):
    def convert(text: str):
        value = kind(text)
        if not 0 < value <= at_most:  # NaN fails too
            raise argparse.ArgumentTypeError(f"{text}: must be above 0 and at most {at_most:g}")
        return value

    return convert


def report(
    config: TrainConfig,
    shape: ModelShape,
    train: MeshSpec,
    rollout: MeshSpec,
    mode: str,
    options: argparse.Namespace,
) -> str:
    """Return the text that `megarl reshard-plan` prints about one actor.

    Args:
        train, rollout: meshes of the actor and of its engines.
        mode: of its engines, 'in-process' or 'out-of-process'.
    Raises: ConfigError if only a started engine knows its layout of this model."""
    start, backend = time.perf_counter(), config.rollout.backend
    sources = megatron_atlases(shape, train, qkv_layout=config.actor.qkv_layout)
    destinations = engine_atlases(backend, shape, rollout.ranks, rollout.tp)
    if destinations is None:
        raise ConfigError(
            [
                f"--model ({config.model.model}): there is no table of {_BACKENDS[backend]}'s layout of "
                f"{shape.model_type}. A job asks its engines when they have started, and no plan can be made "
                "before. Try --rollout-backend transformers, or a model of another family."
            ]
        )
    plan = make_plan(sources, destinations, options.ranks_per_node)
    seconds, itemsize = time.perf_counter() - start, ITEMSIZE[config.engine_dtype]
    moved = plan.num_bytes(itemsize)
    obstacle = _obstacle_to_aliases(config, mode)
    aliased = _aliased_bytes(plan, sources, destinations, itemsize) if obstacle is None else Counter()
    total, copies = sum(moved.values()), sum(map(len, plan.copies.values()))
    held = {dst: sum(n for pair, n in moved.items() if pair[1] == dst) for dst in destinations}
    lines = [
        f"{shape.model_type}, {shape.num_layers} "
        f"layers{f', {shape.num_moe_experts} experts' if shape.is_moe else ''}: "
        f"Megatron {_sizes(train, shape.is_moe)} ({config.model.dtype}) -> {rollout.dp} "
        f"{_BACKENDS[backend]} engines of tp {rollout.tp} ({config.engine_dtype})",
        f"planned in {seconds:.2f} s: {copies} copies between {len(moved)} pairs of ranks, each "
        "destination element written once",
        f"written: {_gb(total)}, at most {_gb(max(held.values()))} on one rank; padding that is not written: "
        f"{_gb(_padding(destinations) * itemsize)}",
        f"aliased: {_gb(sum(aliased.values()))}, {100 * sum(aliased.values()) / total:.1f} % of "
        "what is written" + ("" if obstacle is None else f": {obstacle}"),
        *_by_kind(plan, moved, aliased, options),
        *_pairs(moved),
    ]
    return "\n".join(lines) + "\n"


def _obstacle_to_aliases(config: TrainConfig, mode: str) -> str | None:
    """Return why the engines of a job copy all weights, or None if they can share the trainer's memory."""
    if mode == "out-of-process":
        return "the engines are in other processes"
    if not config.reshard.reshard_alias:
        return "--no-reshard-alias"
    if config.streaming.staleness > 0 and config.streaming.weight_update == "wait":
        return "--weight-update wait"
    return None if config.model.dtype == config.engine_dtype else "the dtypes differ"


def _aliased_bytes(
    plan: ReshardPlan, sources: dict[int, Atlas], destinations: dict[int, Atlas], itemsize: int
) -> Counter[int]:
    """Return rank -> bytes of the engine's parameters that can share the trainer's memory, so that they need
    no copy."""
    aliases = {
        rank: find_aliases(sources[rank], destinations[rank]) for rank in sources.keys() & destinations.keys()
    }
    return Counter(
        {
            rank: itemsize
            * sum(c.num_elements for c in plan.copies.get((rank, rank), ()) if c.dst_name in names)
            for rank, names in aliases.items()
        }
    )


def _sizes(mesh: MeshSpec, is_moe: bool) -> str:
    """Return a text such as 'tp 2 pp 1 dp 4', with cp and vpp only above 1."""
    sizes = {"tp": mesh.tp, "cp": mesh.cp, "pp": mesh.pp, "vpp": mesh.vpp, "dp": mesh.dp} | (
        {"ep": mesh.ep, "etp": mesh.expert_tp} if is_moe else {}
    )
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name not in ("cp", "vpp"))


def _padding(destinations: dict[int, Atlas]) -> int:
    return sum(param.padding_rows * param.cols for atlas in destinations.values() for param in atlas.values())


def _by_kind(
    plan: ReshardPlan, moved: dict[tuple[int, int], int], aliased: Counter[int], options: argparse.Namespace
) -> list[str]:
    """Return lines with the bytes and slowest rank's time of each kind of copy, then the time of a sync."""
    bandwidth = dict(
        zip(KINDS, (options.local_bandwidth, options.link_bandwidth, options.network_bandwidth), strict=True)
    )
    totals, sent, received = Counter(dict.fromkeys(KINDS, 0)), Counter(), Counter()
    for (src, dst), size in moved.items():
        if src == dst:
            size -= aliased[src]
            kind = KINDS[0]
        else:
            kind = KINDS[1] if src // options.ranks_per_node == dst // options.ranks_per_node else KINDS[2]
        totals[kind] += size
        sent[kind, src] += size
        received[kind, dst] += size

    def milliseconds(rank: int, *kinds: str) -> float:
        loads = [max(sent[kind, rank], received[kind, rank]) / (bandwidth[kind] * 1e9) for kind in kinds]
        return 1e3 * sum(loads)

    slowest = max(plan.ranks, key=lambda rank: milliseconds(rank, *KINDS))
    return [
        *(
            f"{kind}: {_gb(size)}, slowest rank {max(milliseconds(rank, kind) for rank in plan.ranks):.2f} ms "
            f"at {bandwidth[kind]:g} GB/s"
            for kind, size in totals.items()
        ),
        f"expected: {milliseconds(slowest, *KINDS):.2f} ms per sync (rank {slowest})",
    ]


def _pairs(moved: dict[tuple[int, int], int]) -> list[str]:
    """Return lines with the bytes that go from each rank to each other rank."""
    lines = [f"  {src:4d} -> {dst:4d}  {_gb(size)}" for (src, dst), size in list(moved.items())[:_MOST_PAIRS]]
    left = len(moved) - len(lines)
    return ["from -> to", *lines, *([f"  ... and {left} pairs more"] if left else [])]


def _gb(size: int) -> str:
    return f"{size / 1e9:.3f} GB" if size >= 1e6 else f"{size} B"
