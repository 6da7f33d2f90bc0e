"""Tools for models that several instances share or that exceed memory, and measurements for a planner.

>>> popdist.parallel.describe(module, sample).save("m.json")
"""

from importlib import import_module
from typing import TYPE_CHECKING

from popdist.ground.installation import needs_torch

# isort: split
from popdist.data.shard_randomness import sharded_randomness
from popdist.parallel.describe import Description, describe
from popdist.phases.phased_model import PhasedModel, phased
from popdist.phases.phased_optimizer import PhasedOptimizer
from popdist.phases.recompute import recompute

if TYPE_CHECKING:
    from popdist.parallel.apply_mapping import Roles as Roles
    from popdist.parallel.apply_mapping import parallelize as parallelize

__all__ = [
    "Description",
    "PhasedModel",
    "PhasedOptimizer",
    "Roles",
    "describe",
    "parallelize",
    "phased",
    "recompute",
    "sharded_randomness",
]

del needs_torch  # the import raises an error without torch, and has no other use


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'popdist.parallel' has no attribute {name!r}")
    return getattr(import_module("popdist.parallel.apply_mapping"), name)  # torch's DTensor is slow to import
