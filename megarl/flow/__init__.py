"""A step of training as a graph of calls: how it is written, checked and drawn. `driver/scheduler.py` runs
it. Reading it needs no torch."""

from megarl.flow.graph import DRIVER, Flow, Node
from megarl.flow.methods import METHODS, columns
from megarl.flow.roles import SymbolicRole, background, dataflow, symbolic_roles
from megarl.flow.validate import FlowError

__all__ = [
    "DRIVER",
    "METHODS",
    "Flow",
    "FlowError",
    "Node",
    "SymbolicRole",
    "background",
    "columns",
    "dataflow",
    "symbolic_roles",
]
