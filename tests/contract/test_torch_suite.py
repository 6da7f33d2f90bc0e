"""torch's own tests of process groups pass on the backend ``popdist``, as they do on gloo.

Holds popdist.exchange.process_group.torch_process_group.
"""

import sys

import pytest

from tests.running import run as run_command


@pytest.mark.parametrize("num_ranks", [3])
def test_those_of_each_change(num_ranks: int) -> None:
    """Some of each kind; `python -m tests.torch_suite` runs all of them."""
    command = [sys.executable, "-m", "tests.torch_suite", "--each-change", "--world-size", str(num_ranks)]
    ended = run_command(command).succeeded()
    assert [line.split(":")[0] for line in ended.lines] == [f"popdist, {num_ranks} ranks"]
