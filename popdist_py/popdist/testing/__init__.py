"""Tests of programs that use popdist: functions run in small, real jobs.

>>> from popdist.testing import run_world
"""

from popdist.testing.world import run_world

__all__ = ["run_world"]
