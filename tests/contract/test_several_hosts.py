"""Several hosts, as the contract tells of them, on this one: the same bits, through the memory of each host."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from popdist.contract import Contract, Endpoint

PROGRAM = Path(__file__).parent / "distant.py"
DEADLINE_SECONDS = 120.0


def train(num_hosts: int, num_local: int, num_replicas: int) -> set[str]:
    """The lines of a training on hosts that have ``num_local`` instances each, without poprun."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        master = Endpoint(host="127.0.0.1", port=held.getsockname()[1])
    contracts = [
        Contract(
            num_instances=num_hosts * num_local,
            instance_index=host * num_local + local,
            num_local_instances=num_local,
            local_instance_index=local,
            host_index=host,
            num_replicas=num_replicas,
            num_threads=1,
            master=master,
        )
        for host in range(num_hosts)
        for local in range(num_local)
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM)], env={**os.environ, **it.to_env()}, stdout=subprocess.PIPE, text=True
        )
        for it in contracts
    ]
    try:
        lines = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * len(processes)
    return set(lines)


@pytest.mark.deadline(DEADLINE_SECONDS + 60)
@pytest.mark.parametrize(
    ("num_hosts", "num_local", "num_replicas", "num_neighbours"),
    [(2, 2, 8, 2), (2, 3, 6, 3)],
    ids=["whole nodes of the tree", "no whole nodes"],
)
def test_hosts_have_the_bits_of_one_process(
    num_hosts: int, num_local: int, num_replicas: int, num_neighbours: int
) -> None:
    """Instances of a host add in its memory where they make up a node of the tree, and else with all others."""
    ((_, alone),) = (line.split() for line in train(1, 1, num_replicas))

    assert train(num_hosts, num_local, num_replicas) == {f"{num_neighbours} {alone}\n"}
