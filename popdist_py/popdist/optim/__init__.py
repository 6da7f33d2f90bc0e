"""Optimizers for large batches and low precision, with bitwise equal results for any number of instances.

>>> from popdist.optim import LAMB, LARS, LowPrecision
"""

from popdist.ground.installation import needs_torch
from popdist.optim.low_precision import LowPrecision
from popdist.optim.trust_ratio import LAMB, LARS

__all__ = ["LAMB", "LARS", "LowPrecision"]

del needs_torch  # needs_torch raises an error if torch is missing, and has no other use
