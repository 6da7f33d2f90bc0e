"""What a job loads and starts before its programs run: counted, not timed."""

import sys

import pytest

from tests.running import run

UNUSED = frozenset(
    {
        *("rich", "psutil", "yaml", "torch", "numpy", "mpi4py", "subprocess", "asyncio", "ssl", "click"),
        *("mmap", "poprun.launch.process.machine_evidence"),
    }
)
"""Packages and modules that a job of one machine does without."""

MOST_MODULES = 180
"""A new dependency that every job would load breaks this; a module or two of poprun's own does not."""

ONLY_FOR_SEVERAL = frozenset({"json", "poprun.job.output.relay"})
"""The same for a job of one instance."""


@pytest.mark.parametrize(("num_instances", "unused"), [("1", UNUSED | ONLY_FOR_SEVERAL), ("2", UNUSED)])
def test_a_job_loads_little(num_instances: str, unused: frozenset[str]) -> None:
    """Each module that poprun loads takes part of a millisecond before the first program begins."""
    words = ("-X", "importtime", "-m", "poprun", "-n", num_instances, "--launcher", "local", "true")
    finished = run([sys.executable, *words]).succeeded()
    rows = [
        line.rpartition("|")[2].strip() for line in finished.err.splitlines() if line.startswith("import time:")
    ]
    loaded = set(rows[1:])

    assert "poprun.job.loop" in loaded
    assert {name for name in loaded if unused & {name, name.partition(".")[0]}} == set()
    assert len(loaded) <= MOST_MODULES
