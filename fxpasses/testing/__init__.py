"""Tools for testing passes without a training run.

`check_pass` is the way in; the rest are its parts. Those that draw examples need hypothesis, which is loaded
when one of them is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Not on first use: these bear the names of their modules, which would hide them.
from fxpasses.exported import exported as exported
from fxpasses.testing.capture import Captured as Captured
from fxpasses.testing.capture import capture as capture

_HOME = {
    "GradientGraph": "fxpasses.testing.synthetic",
    "Launch": "fxpasses.testing.world",
    "Layer": "fxpasses.testing.program",
    "Leaf": "fxpasses.testing.synthetic",
    "OracleFailure": "fxpasses.testing.oracles",
    "Program": "fxpasses.testing.program",
    "Run": "fxpasses.testing.oracles",
    "Step": "fxpasses.testing.synthetic",
    "World": "fxpasses.testing.world",
    "WorldError": "fxpasses.testing.world",
    "check_pass": "fxpasses.testing.check",
    "check_run": "fxpasses.testing.check",
    "environments": "fxpasses.testing.strategies",
    "exported_programs": "fxpasses.testing.strategies",
    "gradient_graphs": "fxpasses.testing.strategies",
    "joint_graphs": "fxpasses.testing.strategies",
    "orders_agree": "fxpasses.testing.oracles",
    "programs": "fxpasses.testing.strategies",
    "property_test": "fxpasses.testing.check",
    "random_inputs": "fxpasses.testing.values",
    "run_world": "fxpasses.testing.world",
    "task_graphs": "fxpasses.testing.strategies",
    "whole_steps": "fxpasses.testing.strategies",
}
__all__ = sorted([*_HOME, "Captured", "capture", "exported"])

if TYPE_CHECKING:
    from fxpasses.testing.check import check_pass as check_pass
    from fxpasses.testing.check import check_run as check_run
    from fxpasses.testing.check import property_test as property_test
    from fxpasses.testing.oracles import OracleFailure as OracleFailure
    from fxpasses.testing.oracles import Run as Run
    from fxpasses.testing.oracles import orders_agree as orders_agree
    from fxpasses.testing.program import Layer as Layer
    from fxpasses.testing.program import Program as Program
    from fxpasses.testing.strategies import environments as environments
    from fxpasses.testing.strategies import exported_programs as exported_programs
    from fxpasses.testing.strategies import gradient_graphs as gradient_graphs
    from fxpasses.testing.strategies import joint_graphs as joint_graphs
    from fxpasses.testing.strategies import programs as programs
    from fxpasses.testing.strategies import task_graphs as task_graphs
    from fxpasses.testing.strategies import whole_steps as whole_steps
    from fxpasses.testing.synthetic import GradientGraph as GradientGraph
    from fxpasses.testing.synthetic import Leaf as Leaf
    from fxpasses.testing.synthetic import Step as Step
    from fxpasses.testing.values import random_inputs as random_inputs
    from fxpasses.testing.world import Launch as Launch
    from fxpasses.testing.world import World as World
    from fxpasses.testing.world import WorldError as WorldError
    from fxpasses.testing.world import run_world as run_world


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fxpasses.testing' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ModuleNotFoundError(
            f"fxpasses.testing.{name} draws examples: pip install hypothesis", name=error.name
        ) from error
