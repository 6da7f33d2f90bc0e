"""Optimizers for large batches and for low precision, which give the same bits for every split.

>>> from popdist.optim import LAMB, LARS
"""

from popdist.optim.lamb import LAMB
from popdist.optim.lars import LARS

__all__ = ["LAMB", "LARS"]
