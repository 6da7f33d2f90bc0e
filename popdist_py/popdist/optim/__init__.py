"""Optimizers for large batches and for low precision, which give the same bits for every split.

>>> from popdist.optim import LAMB, LARS, LowPrecision
"""

from popdist.ground.installation import needs_torch
from popdist.optim.low_precision import LowPrecision
from popdist.optim.trust_ratio import LAMB, LARS

__all__ = ["LAMB", "LARS", "LowPrecision"]

del needs_torch  # which raises without torch, and has no other use
