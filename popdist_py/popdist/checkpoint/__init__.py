"""Checkpoints: a run that was killed goes on, at any number of instances, to the bits of one that was not.

>>> from popdist.checkpoint import save, load_latest
"""

from popdist.ground.installation import needs_torch

# isort: split
from popdist.checkpoint.loading import Loaded, load_latest
from popdist.checkpoint.saving import save

__all__ = ["Loaded", "load_latest", "save"]

del needs_torch  # which raises without torch, and has no other use
