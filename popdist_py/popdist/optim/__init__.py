"""Optimizers for large batches and for low precision, which give the same bits for every split.

>>> from popdist.optim import LAMB, LARS, LowPrecision
"""

from popdist.optim.lamb import LAMB
from popdist.optim.lars import LARS
from popdist.optim.low_precision import LowPrecision

__all__ = ["LAMB", "LARS", "LowPrecision"]
