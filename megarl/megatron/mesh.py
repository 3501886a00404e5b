"""Build a Megatron ProcessGroupCollection for the ranks of one role (its mesh), without the global
parallel_state.

HyperCommGrid accepts only a contiguous block of ranks, and roles may use any ranks. torch names a group by
the number of groups that the process has. Every rank of the world therefore makes every group of every mesh
in the same order (`create_groups`). Groups with equal members are made once and shared."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megarl.config.mesh import MeshSpec
from megarl.megatron.cpu_shim import cpu_megatron

with cpu_megatron():
    from megatron.core.process_groups_config import ProcessGroupCollection

# Megatron's group names -> the coordinates that vary inside the group.
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
    """Make every process group that Megatron needs for a role on this mesh; `groups_of` returns them.

    Collective over the whole world, including ranks outside the mesh. Later calls with the same mesh do
    nothing.

    Args:
        timeout: limit of the groups' collectives. The default is PyTorch's, not the world's: 30 minutes on
            gloo and 10 on NCCL."""
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
    """Return the second process group of a two-stage interleaved pipeline, or `group` itself if it has none.

    Messages in the opposite direction use the second group."""
    return _second_channels.get(tuple(dist.get_process_group_ranks(group)), group)


def groups_of(mesh: MeshSpec) -> ProcessGroupCollection:
    """Return all groups of a role that Megatron needs, as this rank sees them.

    This rank must be a member, and `create_groups` must have run."""
    rank, groups = dist.get_rank(), ProcessGroupCollection()
    for name, varied in _GROUPS.items():
        setattr(groups, name, _groups[mesh.peers(rank, *varied)])
    pipeline = mesh.peers(rank, "pp")
    ends = _ends(pipeline)
    # Tied word embeddings are on the first and the last stage.
    groups.embd = _groups[ends] if rank in ends else None
    groups.pos_embd = _groups[pipeline[:1]] if rank == pipeline[0] else None
    groups.hcp = groups.inter_dist_opt = None
    return groups


def _ends(pipeline: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((pipeline[0], pipeline[-1])))
