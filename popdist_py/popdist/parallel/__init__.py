"""Models that several instances share; and what a planner needs to know of a module and of a machine, measured.

>>> popdist.parallel.describe(module, sample).save("m.json")
"""

from popdist.data.shard_randomness import sharded_randomness
from popdist.parallel.describe import Description, describe
from popdist.parallel.recompute import recompute

__all__ = ["Description", "describe", "recompute", "sharded_randomness"]
