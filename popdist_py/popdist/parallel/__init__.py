"""What a planner needs to know of a module and of a machine, measured: ``poprun-size`` reads both.

>>> popdist.parallel.describe(module, sample).save("m.json")
"""

from popdist.parallel.describe import Description, describe

__all__ = ["Description", "describe"]
