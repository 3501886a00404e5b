"""A role's mesh as a Megatron ProcessGroupCollection, without the global parallel_state.

HyperCommGrid takes a contiguous block of ranks only; roles may sit on any. torch names a group by how many
groups the process has, so every rank of the world makes every group of every mesh, in the same order
(`create_groups`); groups with equal members are made once and shared."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megarl.config.mesh import MeshSpec
from megarl.megatron.cpu_shim import cpu_megatron

with cpu_megatron():
    from megatron.core.process_groups_config import ProcessGroupCollection

# Megatron's names -> the coordinates that vary inside the group.
_GROUPS = {
    "tp": ("tp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "dp_cp": ("cp", "dp"),
    "intra_dp_cp": ("cp", "dp"),
    "tp_dp_cp": ("tp", "cp", "dp"),
    "ep": ("ep",),
    "expt_tp": ("etp",),
    "expt_dp": ("edp",),
    "intra_expt_dp": ("edp",),
    "tp_ep": ("etp", "ep"),
    "tp_ep_pp": ("etp", "ep", "pp"),
    "intra_dist_opt": ("tp", "cp", "dp", "pp"),
}

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
_second_channels: dict[tuple[int, ...], dist.ProcessGroup] = {}


def create_groups(mesh: MeshSpec, timeout: timedelta | None = None) -> None:
    """Make the mesh's process groups. Collective over the world, members or not.

    Later calls with the same mesh do nothing.

    timeout: how long their collectives may wait. Default: PyTorch's, which is not the world's: 30 minutes on
        gloo, 10 on NCCL."""
    wanted = [mesh.peers(rank, *varied) for varied in _GROUPS.values() for rank in mesh.ranks]
    for rank in mesh.ranks:
        pipeline = mesh.peers(rank, "pp")
        wanted += [_ends(pipeline), pipeline[:1]]
    for ranks in dict.fromkeys(wanted):
        if ranks not in _groups:
            _groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
    if mesh.vpp > 1 and mesh.pp == 2:
        for pipeline in dict.fromkeys(mesh.peers(rank, "pp") for rank in mesh.ranks):
            if pipeline not in _second_channels:
                _second_channels[pipeline] = dist.new_group(list(pipeline), timeout=timeout)


def second_channel(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second group of the two ranks of an interleaved pipeline, for the messages that go the other way; of
    other groups themselves."""
    return _second_channels.get(tuple(dist.get_process_group_ranks(group)), group)


def groups_of(mesh: MeshSpec) -> ProcessGroupCollection:
    """All groups that Megatron asks a role for, as seen by this rank, a member. After `create_groups`."""
    rank, groups = dist.get_rank(), ProcessGroupCollection()
    for name, varied in _GROUPS.items():
        setattr(groups, name, _groups[mesh.peers(rank, *varied)])
    pipeline = mesh.peers(rank, "pp")
    ends = _ends(pipeline)
    groups.embd = (
        _groups[ends] if rank in ends else None
    )  # tied word embeddings live on the first and the last stage
    groups.pos_embd = _groups[pipeline[:1]] if rank == pipeline[0] else None
    groups.hcp = groups.inter_dist_opt = None
    return groups


def _ends(pipeline: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((pipeline[0], pipeline[-1])))
