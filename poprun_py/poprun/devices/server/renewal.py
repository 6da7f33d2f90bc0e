"""The process that renews a job's lease at a server of virtual IPUs: ``python -I -S renewal.py``.

The process is not a child of poprun, so that the lease is renewed even if poprun is stopped or killed while
programs run. Poprun and its agents write to the standard input of the process. The first line describes the lease,
and a second line means that the job is over. End of file without this line means that all writers were killed.
"""

import json
import os
import select
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from poprun.devices.server.server_connection import ServerAddress, call_server
from poprun.errors import LeaseEndedError, PoprunError
from poprun.text.screen import log

_INPUT = 0
_READ_BYTES = 4096
_RENEWALS = 6  # renewals in the duration of a lease, so that some may fail
_PATIENCE = 4  # the server may take this part of a lease's duration to answer: a quarter


class LeaseRenewal:
    """The repeated renewal of a lease at a server until a job is over; ``job`` has the lease's key and server."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._lease_seconds = float(job["lease_seconds"])
        self._linger_seconds = float(job["linger_seconds"])
        self._pause_seconds = self._lease_seconds / _RENEWALS
        self._key = {"key": job["key"]}
        server = ServerAddress(**job["server"])
        patience_seconds = min(server.timeout_seconds, self._lease_seconds / _PATIENCE)
        self._server = replace(server, timeout_seconds=patience_seconds)
        self._renewed_at = time.monotonic()
        self._is_lost = False

    def keep(self) -> None:
        """Renew the lease at the server until the job is over, and then end the lease."""
        poll = select.poll()
        poll.register(_INPUT, select.POLLIN)
        while not poll.poll(self._pause_seconds * 1000):
            if not self._renew():
                return
        is_over = bool(os.read(_INPUT, _READ_BYTES))
        deadline = time.monotonic() + (0 if is_over else self._linger_seconds)
        while (left := deadline - time.monotonic()) > 0:
            if not self._renew():
                return
            time.sleep(min(left, self._pause_seconds))
        with suppress(PoprunError):
            call_server(self._server, "end-lease", self._key)

    def _renew(self) -> bool:
        """Renew the lease at the server once. Return False if the lease has ended there."""
        try:
            call_server(self._server, "renew-lease", self._key)
        except LeaseEndedError as error:
            log(f"warning: {error}. The job goes on without its lease: others may be given its virtual IPUs")
            return False
        except PoprunError as error:
            if not self._is_lost:
                left = max(0.0, self._lease_seconds - (time.monotonic() - self._renewed_at))
                log(
                    f"warning: {error}. The job goes on. If only the link is cut, its virtual IPUs are free for "
                    f"others in {left:.0f} s; a server that is started again knows that the job has them"
                )
            self._is_lost = True
        else:
            if self._is_lost:
                log(f"the server of virtual IPUs at {self._server} answers again, and the lease has been renewed")
            self._is_lost = False
            self._renewed_at = time.monotonic()
        return True


def main() -> None:
    """Fork, so that poprun is not the parent, and renew the lease that the first line of input describes."""
    if os.fork():
        os._exit(0)
    with open(_INPUT, "rb", buffering=0, closefd=False) as stream:  # unbuffered, so that later lines stay unread
        line = stream.readline()
    if line.endswith(b"\n"):
        LeaseRenewal(json.loads(line)).keep()


if __name__ == "__main__":
    main()
