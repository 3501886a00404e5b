"""Change a module of megarl in a process that somebody else starts, after the process has imported it.

A sitecustomize.py on the PYTHONPATH of the process calls `after_import`:
tools/benchmarks/async_plants/sitecustomize.py measures, tests/faults/planted/sitecustomize.py plants faults."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


def after_import(module: str, plant: Callable[[ModuleType], object]) -> None:
    """Call `plant` with a module when it has been imported: now, if it is there already."""
    if module in sys.modules:  # in a process that was forked
        plant(sys.modules[module])
    else:
        sys.meta_path.insert(0, _AfterImport(module, plant))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and calls `plant` when it has run."""

    def __init__(self, module: str, plant: Callable[[ModuleType], object]) -> None:
        self.module, self.plant = module, plant

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_plant(module):
            execute(module)
            self.plant(module)

        spec.loader.exec_module = execute_and_plant
        return spec
