"""Describe a training step as a graph of calls on roles (actor, critic, rollout, ...) and of the columns they
read and write.

The package holds the roles and their methods, the columns, and the flow: how it is written, checked and
drawn, and which calls may be issued next. `trainer/scheduler.py` runs the flow. Importing the package needs
no torch."""

from megarl.flow.flow import Flow, SymbolicRole, background, dataflow, symbolic_roles
from megarl.flow.handles import Roles
from megarl.flow.job_roles import (
    Actor,
    CheckpointedRole,
    Critic,
    Data,
    Metrics,
    ModelRole,
    PlacedRole,
    RandomState,
    Reference,
    Reward,
    RewardModel,
    Rollout,
    RunFolderReader,
    ServiceRole,
    TrainedRole,
)
from megarl.flow.node import DRIVER, Node, columns
from megarl.flow.role import Caller, Role, declaration, method, role_class
from megarl.flow.validate import FlowError
from megarl.futures import Future

__all__ = [
    "DRIVER",
    "Actor",
    "CheckpointedRole",
    "Caller",
    "Critic",
    "Data",
    "Flow",
    "FlowError",
    "Future",
    "Metrics",
    "ModelRole",
    "Node",
    "PlacedRole",
    "RandomState",
    "Reference",
    "Reward",
    "RewardModel",
    "Role",
    "Roles",
    "Rollout",
    "RunFolderReader",
    "ServiceRole",
    "SymbolicRole",
    "TrainedRole",
    "background",
    "columns",
    "dataflow",
    "declaration",
    "method",
    "role_class",
    "symbolic_roles",
]
