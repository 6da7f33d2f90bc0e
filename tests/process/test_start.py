"""What a job loads and starts before its programs run: counted, not timed."""

import sys

from tests.running import run

UNUSED = frozenset({"rich", "psutil", "yaml", "torch", "numpy", "mpi4py", "subprocess", "asyncio", "ssl", "click"})
"""Packages that a job of one machine does without."""

MOST_MODULES = 180
"""A new dependency that every job would load breaks this; a module or two of poprun's own does not."""


def test_a_job_loads_little() -> None:
    """Each module that poprun loads takes part of a millisecond before the first program begins."""
    words = ("-X", "importtime", "-m", "poprun", "-n", "2", "--launcher", "local", "true")
    finished = run([sys.executable, *words]).succeeded()
    rows = [
        line.rpartition("|")[2].strip() for line in finished.err.splitlines() if line.startswith("import time:")
    ]
    loaded = set(rows[1:])

    assert "poprun.job.loop" in loaded
    assert {name for name in loaded if name.partition(".")[0] in UNUSED} == set()
    assert len(loaded) <= MOST_MODULES
