"""Several hosts, as the contract tells of them, on this one: without poprun, which would see through it."""

import os
import socket
import subprocess
import sys

from popdist.contract import Contract, Endpoint
from tests.docs.markdown import ROOT

DEADLINE_SECONDS = 240.0


def run_on_hosts(*words: str, num_hosts: int, num_local: int, num_replicas: int) -> list[str]:
    """What the instances of a job print, of which every host has ``num_local``: ``python WORDS`` on each."""
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
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, **it.to_env()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for it in contracts
    ]
    try:
        texts = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * len(processes)
    return texts
