"""The program that holds a job's lease on one host, ``python -I lease_holder.py FOLDER``; poprun starts it.

The process holds the lease for all attempts, and sends the lease's open file to the agents of its host. If poprun
cannot be reached, the process ends at once without releasing the lease: the lease then ends with the last agent.
"""

import json
import os
import queue
import socket
import sys
import threading
from typing import Any, NoReturn

_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
sys.path[:0] = [_ROOT, *sys.argv[1:]]

from poprun.devices.lease.claims import LeasedPlan
from poprun.devices.lease.host_leases import HOLDER_MARK
from poprun.devices.lease.local_lease import leased_here
from poprun.devices.pool.holders import boot_id
from poprun.devices.pool.place import opened_place, pool_folder
from poprun.errors import PoprunError
from poprun.launch.fetched_lease import FETCH, GIVE_UP, TALK_SECONDS
from poprun.launch.messages.control import abstract_address, peer_user
from poprun.plan.plan_file import read_plan


def main() -> None:
    """Acquire the lease of a plan when poprun orders it, and hold the lease until poprun orders its release."""
    orders = _Orders()
    request = orders.next()
    try:
        plan = read_plan(request["plan"], "the plan")
        os.chdir(plan.working_directory)
        _send({"machine": machine_of(pool_folder(plan.vipu.pool))})
        orders.next()
        job = LeasedPlan(plan=plan, given=plan.named_devices)
        with leased_here(job, None, is_fixed=request["is_fixed"], log=lambda text: _send({"log": text})) as job:
            address = _hand_out([lease.descriptor for lease in job.leases if lease.descriptor is not None])
            held = [[list(lease.names), lease.pool, lease.partition] for lease in job.leases]
            _send({"held": held, "devices": job.given.devices if plan.takes_lease else (), "address": address})
            while orders.next()["order"] != "release":
                _send({"here": True})
    except PoprunError as error:
        _send({"error": str(error), "kind": type(error).__name__})
    except OSError as error:
        _send({"error": f"{error.filename or 'the working directory'}: {error.strerror}", "kind": "HostsError"})


def machine_of(pool: str) -> str:
    """Return a text that identifies the folder ``pool``: the same text under every name of this machine."""
    with opened_place(pool, makes=True) as descriptor:
        folder = os.fstat(descriptor)
    return f"{boot_id()} {folder.st_dev} {folder.st_ino}"


class _Orders:
    """The orders of poprun on standard input, one per line. At end of file this whole process ends."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self) -> dict[str, Any]:
        """Wait for poprun's next order, and return the order."""
        order: dict[str, Any] = json.loads(self._lines.get())
        return order

    def _listen(self) -> None:
        is_over = False
        for line in sys.stdin:
            is_over = json.loads(line).get("order") == "release"
            self._lines.put(line)
        if not is_over:
            _end_at_once()


def _hand_out(descriptors: list[int]) -> str:
    """Start a thread that sends the lease's locked files to agents, which keep the lease; return its address."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = f"poprun-lease-{os.getpid()}-{os.urandom(16).hex()}"
    listener.bind(abstract_address(address))
    listener.listen(socket.SOMAXCONN)
    threading.Thread(target=_answer_agents, args=(listener, descriptors), daemon=True).start()
    return address


def _answer_agents(listener: socket.socket, descriptors: list[int]) -> NoReturn:
    while True:
        connection, _ = listener.accept()
        with connection:
            if peer_user(connection) != os.getuid():
                continue
            try:
                connection.settimeout(TALK_SECONDS)
                order = connection.recv(1)
                if order == FETCH:
                    socket.send_fds(connection, [FETCH], descriptors)
            except OSError:
                continue
            if order == GIVE_UP:
                _end_at_once()


def _end_at_once() -> NoReturn:
    """End this process but not the lease: running agents have the lease's locked file open, which keeps it."""
    os._exit(0)


def _send(message: dict[str, object]) -> None:
    sys.stdout.write(f"{HOLDER_MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
