"""Small worlds for the tests of this folder, forked from a process that is started once."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT

STOP_SECONDS = 300.0


@pytest.fixture(scope="session")
def _forking() -> Iterator["subprocess.Popen[bytes]"]:
    """The process that all instances are forked from."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.contract.forked_worlds"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()


@pytest.fixture
def forked_world(_forking: "subprocess.Popen[bytes]") -> ForkedWorlds:
    """Many small worlds, at the price of one import of torch."""
    return ForkedWorlds(_forking)
