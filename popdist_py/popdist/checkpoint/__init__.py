"""Checkpoints: a killed run resumes with any number of instances, bitwise equal to an uninterrupted run.

>>> from popdist.checkpoint import save, load_latest
"""

from popdist.ground.installation import needs_torch

# isort: split
from popdist.checkpoint.loading import Loaded, load_latest
from popdist.checkpoint.saving import save

__all__ = ["Loaded", "load_latest", "save"]

del needs_torch  # the import raises an error without torch, and has no other use
