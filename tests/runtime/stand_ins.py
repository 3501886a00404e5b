"""Roles without a model: what the training loop calls, answered with numbers that follow from the ids
alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.config.mesh import hosting_ranks, role_meshes
from megarl.config.schema import TrainConfig
from megarl.packing import MiniBatch, Sample
from megarl.role_names import kind_and_suffix
from megarl.runtime.hosting import WorkerContext


class RankState:
    """What the roles of one rank share: the samples that it has made, and how often each was trained on."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.plans: dict[str, list[MiniBatch]] = {}
        self.updates: dict[str, list[int]] = {}


class Role:
    """What every stand-in has."""

    def __init__(self, name: str, ranks: Sequence[int], context: WorkerContext, state: RankState, group: int):
        self.name, self.ranks, self.context, self.state, self.group = name, ranks, context, state, group

    def setup(self): ...

    def shut_down(self): ...


class Data(Role):
    def distribute(
        self, shard: str, samples: list[Sample], mini_batches: list[MiniBatch], rollouts: str = "train"
    ):
        self.state.plans[shard] = mini_batches
        return {"batch/samples_moved": 0.0}

    def exchange(self, columns: Sequence[str], source: str, destination: str):
        return {}


class Rollout(Role):
    version = -1

    def sync(self, version: int):
        self.version = version
        return {"sync/bytes": 0.0}

    def generate(
        self,
        purpose: str,
        visits: Mapping[int, int],
        greedy: bool = False,
        engines: Sequence[int] | None = None,
        wait: bool = True,
    ):
        """Each rank answers its part of the prompts."""
        here = list(visits)[self.ranks.index(self.context.rank) :: len(self.ranks)]
        ids = [visit * self.group + i for visit in here for i in range(self.group)]
        rank = self.context.rank
        self.state.samples = [
            Sample(i, 12 + i % 5, 4 + i % 5, owners=(rank,), group=i // self.group) for i in ids
        ]
        self.context.emit("generated", len(ids))
        return self.state.samples


class Reward(Role):
    def score(self, purpose: str, sample_ids: Sequence[int], num_logged: int | None = None):
        return [{"sample_id": s.sample_id, "reward": float(s.sample_id % 2)} for s in self.state.samples]


class Trained(Role):
    """Actor, critic and reference."""

    def send_weights(self, version: int): ...

    def log_probs(self):
        names = ("tokens", "max_abs", "mean_abs", "clipped_abs", "outliers", "log_prob_abs")
        return {f"mismatch/{name}": 1.0 if name in ("tokens", "log_prob_abs") else 0.0 for name in names}

    def values(self): ...

    def advantages(
        self,
        sample_ids: list[int],
        group_ids: list[int],
        rewards: list[float | None],
        kl_coef: float,
        digests: list[int] | None = None,
    ):
        return {"advantages/mean": sum(rewards) / len(rewards)}

    def update(self, kl_coef: float = 0.0):
        batches = self.state.plans[self.name]
        trained = [
            s for batch in batches for rank in range(len(batch.micro_batches)) for s in batch.samples_of(rank)
        ]
        self.state.updates.setdefault(self.name, []).extend(trained)
        return {"policy/updates": float(len(batches))}

    def export_hf(self, folder: str): ...


KINDS = {"data": Data, "rollout": Rollout, "reward": Reward}


def build_stand_ins(config: TrainConfig, world_size: int, states: dict[int, RankState]):
    """Return the function that builds a rank's roles, and role -> its ranks. states: filled in, by rank."""
    ranks = hosting_ranks(config, world_size) | {
        role: list(mesh.ranks) for role, mesh in role_meshes(config, world_size).items()
    }
    group = config.batch.num_samples_per_prompt

    def build(context: WorkerContext) -> dict[str, object]:
        state = states.setdefault(context.rank, RankState())
        return {
            role: KINDS.get(kind_and_suffix(role)[0], Trained)(role, of_role, context, state, group)
            for role, of_role in ranks.items()
            if context.rank in of_role
        }

    return build, ranks
