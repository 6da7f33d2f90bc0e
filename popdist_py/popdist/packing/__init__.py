"""Several sequences in one row of the batch, so that no time goes into padding.

>>> from popdist.packing import lpfhp
"""

from popdist.packing.linear_programme import nnlshp, optimal
from popdist.packing.strategies import PackingStrategy, lpfhp, spfhp, unpacked

__all__ = ["PackingStrategy", "lpfhp", "nnlshp", "optimal", "spfhp", "unpacked"]
