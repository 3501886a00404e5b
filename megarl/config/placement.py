"""Which ranks each role sits on: the rank lists of the placement flags, 0-3,6, and the names of pools that
stand for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from megarl.config.roles import KINDS, present_roles
from megarl.config.schema import PlacementConfig, TrainConfig
from megarl.role_names import kind_and_suffix, suffix_of


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Ranks in ascending order. Example: parse_ranks("0-2,6", 8) == (0, 1, 2, 6).

    Raises: ValueError for what is no such list, for a rank that is named twice or out of order, and for one
    outside the world.
    """
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", part)
        if match is None:
            raise ValueError(
                f"ranks ({text}): must be ranks and ranges of ranks, like 0-3 or 0,2. Try {_all(world_size)}."
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or ranks and first <= ranks[-1]:
            raise ValueError(f"ranks ({text}): must ascend, each rank once. Try {_all(world_size)}.")
        if last >= world_size:
            raise ValueError(
                f"ranks ({text}): must be below the number of ranks ({world_size}). Try {_all(world_size)}."
            )
        ranks += range(first, last + 1)
    return tuple(ranks)


def _all(world_size: int) -> str:
    return f"0-{world_size - 1}" if world_size > 1 else "0"


def parse_pools(pools: tuple[str, ...]) -> dict[str, str]:
    """("train=0-3", "serve=4") -> name -> its list of ranks, not looked at yet.

    Raises: ValueError for what is not name=ranks, and for a name that is given twice or could be a list of
    ranks."""
    named: dict[str, str] = {}
    for pool in pools:
        name, equals, text = pool.partition("=")
        if not equals or not name.isidentifier() or name in named:
            raise ValueError(f"pools ({pool}): must be name=ranks, each name once. Try train=0-3.")
        named[name] = text
    return named


class DeviceMap:
    """Placement in Python: DeviceMap(actor=[0, 1], critic=[2], reward=[3]). A role that is left out goes
    where its flag's default puts it.

    Roles: actor, critic, reference, reward, rollout, and those of further actors: DeviceMap(actor=[0],
    actor_2=[1], rollout=[0], rollout_2=[1]). `reward` may hold a list of ranks per reward model: reward=[[2],
    [3]].

    Raises: TypeError for another role."""

    def __init__(self, **ranks: Sequence[int] | Sequence[Sequence[int]] | None) -> None:
        for role in ranks:
            if kind_and_suffix(role)[0] not in KINDS:
                raise TypeError(
                    f"DeviceMap has no role ({role}): {', '.join(KINDS)}, or one of these with a "
                    "number, like actor_2."
                )
        self.ranks = {role: of_role for role, of_role in ranks.items() if of_role is not None}

    def flags(self) -> list[str]:
        """The same as command-line flags."""
        flags = []
        for role, ranks in self.ranks.items():
            lists = ranks if ranks and not isinstance(ranks[0], int) else [ranks]
            flags += [f"--{role.replace('_', '-')}-ranks", *(",".join(map(str, one)) for one in lists)]
        return flags


def place(config: TrainConfig, world_size: int) -> tuple[dict[str, tuple[int, ...] | None], list[str]]:
    """Of one actor: role -> its ranks, in the order in which roles are set up, None where its flag is wrong;
    and what is wrong.

    Roles: actor, reference, critic, reward models, rollout; only those that the job has. Rule rewards live
    where the rollouts are."""
    findings: list[str] = []
    try:
        pools = parse_pools(config.placement.pools)
    except ValueError as error:
        pools = None
        findings.append(f"--{error}")

    def ranks_of(role: str, text: str | None) -> tuple[int, ...] | None:
        if text is None or pools is None:
            return tuple(range(world_size))
        try:
            return parse_ranks(pools.get(text, text), world_size)
        except ValueError as error:
            known = (
                f" Pools: {', '.join(pools)}." if pools and text not in pools and text.isidentifier() else ""
            )
            pool = f"{role}-ranks is pool {text}, whose " if text in pools else f"{role}-"
            findings.append(f"--{pool}{error}{known}")
            return None

    placed = {role: ranks_of(role.partition("_model")[0], text) for role, text in _texts(config)}
    if "reference" in placed and config.placement.reference_ranks is None:
        placed["reference"] = placed["actor"]
    if pools is None:
        placed = dict.fromkeys(placed)
    return placed, [
        *findings,
        *_uneven_reward_ranks(config.placement, len(config.reward_models.reward_model)),
    ]


def _texts(config: TrainConfig) -> Iterator[tuple[str, str | None]]:
    """(role, what its flag says) of every role."""
    placement = config.placement
    for kind in present_roles(config):
        if kind == "reward":
            names = [
                f"reward_model{suffix_of(index)}" for index in range(len(config.reward_models.reward_model))
            ]
            per_model = (
                placement.reward_ranks
                if len(placement.reward_ranks) > 1
                else (*placement.reward_ranks, None)[:1] * len(names)
            )
            yield from zip(names, per_model)
        else:
            yield kind, getattr(placement, f"{kind}_ranks")


def _uneven_reward_ranks(placement: PlacementConfig, num_models: int) -> Iterator[str]:
    given = placement.reward_ranks
    if num_models and len(given) > 1 and len(given) != num_models:
        yield (
            f"--reward-ranks ({' '.join(given)}): must be one list for all reward models, or one "
            f"for each of the {num_models}."
            f" Try --reward-ranks {given[0]}."
        )


def role_ranks(config: TrainConfig, world_size: int) -> Mapping[str, tuple[int, ...]]:
    """`place` of one actor's configuration that has been checked. Raises: ValueError with all that is
    wrong."""
    placed, findings = place(config, world_size)
    if findings:
        raise ValueError("\n".join(findings))
    return placed
