"""Starts the process that renews a job's lease at a server, and ends it with the job."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from poprun.errors import LaunchError
from poprun.lease.server_connection import ServerAddress

_KEEPER: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "renewal.py")
_END_SECONDS: Final = 10.0
"""How long to wait at most until the lease has been given back."""
_READ_BYTES: Final = 64


@contextmanager
def kept(server: ServerAddress, key: str, lease_seconds: float, linger_seconds: float) -> Iterator[int]:
    """Renew a lease as long as this block runs and, if this process is killed, as long as the job's agents live.

    Args:
        server: The server that gave it.
        key: The key of the lease.
        lease_seconds: How long it lasts without being renewed.
        linger_seconds: How long to renew it when this process and all agents here were killed: so long may
            programs of other hosts still run.

    Yields:
        The descriptor that the agents keep open.

    Raises:
        LaunchError: If the process cannot be started.
    """
    told = {
        "host": server.host,
        "port": server.port,
        "token": server.token,
        "timeout_seconds": server.timeout_seconds,
        "key": key,
        "lease_seconds": lease_seconds,
        "linger_seconds": linger_seconds,
    }
    life_reader, life_writer = os.pipe()
    end_reader, end_writer = os.pipe()
    try:
        started = subprocess.run(
            [sys.executable, "-I", "-S", _KEEPER],
            stdin=life_reader,
            stdout=end_writer,
            start_new_session=True,
            check=False,
        )
        if started.returncode:
            raise LaunchError("the process that renews the lease cannot be started: see above")
        os.close(life_reader)
        os.close(end_writer)
        os.write(life_writer, json.dumps(told).encode() + b"\n")
        yield life_writer
    finally:
        with suppress(OSError):
            os.write(life_writer, b"over\n")
        os.close(life_writer)
        _await_end(end_reader)


def _await_end(reader: int) -> None:
    if select.select([reader], [], [], _END_SECONDS)[0]:
        os.read(reader, _READ_BYTES)
    os.close(reader)
