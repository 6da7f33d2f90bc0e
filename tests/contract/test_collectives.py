"""Collectives obey the same laws in jobs of every size, the job of one included.

Holds popdist.exchange.transport.serial_backend, popdist.exchange.transport.connections,
popdist.exchange.transport.torch_backend and popdist.exchange.groups.
"""

import time
from pathlib import Path

import pytest

import popdist
from popdist.job.context import current_group
from tests.contract import collective_laws, horovod_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.contract.laws import laws_of
from tests.running import DEADLINE_SECONDS


@pytest.mark.parametrize("num_instances", [1, 2, 3, 4])
def test_laws(forked_world: ForkedWorlds, num_instances: int) -> None:
    """Every law of collective_laws.py, on every instance."""
    forked_world.keep_laws(collective_laws, num_instances=num_instances)


@pytest.mark.parametrize("num_instances", [1, 3])
def test_laws_of_horovod_s_names(forked_world: ForkedWorlds, num_instances: int) -> None:
    """Every law of horovod_laws.py, on every instance."""
    counts = forked_world(horovod_laws.run_all, num_instances=num_instances, timeout_seconds=DEADLINE_SECONDS)
    assert counts == [len(laws_of(horovod_laws))] * num_instances


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_sums_between_hosts(forked_world: ForkedWorlds, num_hosts: int) -> None:
    """The laws of sums hold where not all instances, or none, share the memory of a host."""
    forked_world(collective_laws.run_sums, num_instances=4, num_hosts=num_hosts, timeout_seconds=DEADLINE_SECONDS)


def meet_late(signal: Path) -> list[list[int]]:
    """Instance 1 comes only when instance 0 has given up waiting once; what each gets in the end."""
    popdist.init(timeout_seconds=DEADLINE_SECONDS)
    if popdist.is_main():
        handle = current_group().start("exchange", [7])
        with collective_laws.refused(
            popdist.BackendError, r"in exchange: instance 1 did not come within 0\.2 seconds"
        ):
            handle.wait(timeout_seconds=0.2)
        signal.touch()
        return handle.wait()
    while not signal.exists():
        time.sleep(0.01)
    return current_group().start("exchange", [8]).wait()


def test_a_late_instance_is_named_and_can_still_come(tmp_path: Path) -> None:
    """A wait that was too short says for whom it waited, and can be taken up again."""
    received = popdist.launch(meet_late, (tmp_path / "signal",), num_instances=2, timeout=DEADLINE_SECONDS)
    assert received == [[[7], [8]], [[7], [8]]]
