"""How the processes of a group come to map each other's segments, and prove by it that they share a host.

Each tells the others through the group's store where its segment is: a descriptor of its own, which they open
through ``/proc``. Where that is another process's number, or not allowed, as between containers, they ask for the
descriptor over its abstract unix socket, which serves processes of the same user only. Names prove nothing: what
counts is to find in the memory the random token that its owner announced.
"""

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from torch.distributed.distributed_c10d import Store

from popdist.errors import BackendError
from popdist.host_memory.segments import PAGE_BYTES, Segment, map_window

TOKEN_BYTES: Final = 32
TOKEN_OFFSET: Final = PAGE_BYTES - TOKEN_BYTES
"""The token stands at the end of the first page."""

_CONNECTION_SECONDS: Final = 5.0
"""How long to wait for a call at the listener: those that are served have connected before."""

_WHERE_SEGMENTS_ARE: Final = "/memfd:popdist"

_CREDENTIALS: Final = struct.Struct("3i")
_RANK: Final = struct.Struct("=i")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The segment of a peer.

    Attributes:
        descriptor: It, opened by this process.
        pid: The peer's process, as this one numbers it.
    """

    descriptor: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hello:
    pid: int
    descriptor: int
    token: str

    @property
    def socket_name(self) -> str:
        return f"\0popdist-{self.token[:32]}"

    @property
    def told(self) -> dict[str, Any]:
        return {"pid": self.pid, "descriptor": self.descriptor, "token": self.token}


class SegmentExchange:
    """One exchange of segments; every rank makes one, and the steps happen on all of them.

    Args:
        store: Used by nobody else under its prefix.
        rank: This process.
        names: What to call each rank, for errors.
        timeout_seconds: How long a late rank is waited for.
    """

    def __init__(self, store: Store, rank: int, names: Sequence[str], timeout_seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._names = names
        self._deadline = time.monotonic() + timeout_seconds
        self._timeout_seconds = timeout_seconds

    def refuse(self) -> None:
        """Take part without a segment; no rank has any other's then.

        Raises:
            BackendError: If a rank did not come in time.
        """
        self._tell_all("hello", _Hello(pid=os.getpid(), descriptor=-1, token=secrets.token_hex(TOKEN_BYTES)).told)
        self._tell_all("calls", [])
        self._tell_all("found", mine=False)

    def hold(self, segment: Segment, page: memoryview) -> dict[int, Found] | None:
        """Every other rank's segment.

        Args:
            segment: This rank's.
            page: Its first page, as this rank has mapped it.

        Returns:
            None, on every rank, if some rank could not open some other's, or has none itself.

        Raises:
            BackendError: If a rank did not come in time.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        page[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES] = token
        mine = _Hello(pid=os.getpid(), descriptor=segment.descriptor, token=token.hex())
        with ExitStack() as stack:
            listener = stack.enter_context(_listen(mine))
            told = self._tell_all("hello", mine.told)
            hellos = [_Hello(**it) for it in told]
            found = {
                rank: opened
                for rank, hello in enumerate(hellos)
                if rank != self._rank and (opened := _open_through_proc(hello)) is not None
            }
            calls = {
                rank: call
                for rank, hello in enumerate(hellos)
                if rank != self._rank and rank not in found and (call := _connect(hello, self._rank)) is not None
            }
            for call in calls.values():
                stack.enter_context(call)
            asked = self._tell_all("calls", sorted(calls))
            self._serve(listener, segment, sum(self._rank in them for them in asked))
            for rank, call in calls.items():
                if (received := self._receive(call, hellos[rank])) is not None:
                    found[rank] = received
        has_all = len(found) == len(hellos) - 1
        if all(self._tell_all("found", has_all)):
            return found
        for it in found.values():
            os.close(it.descriptor)
        return None

    def _tell_all(self, what: str, mine: Any) -> list[Any]:  # noqa: ANN401 - anything that JSON holds
        """What every rank tells, in their order."""
        self._store.set(f"{what}/{self._rank}", json.dumps(mine))
        told = []
        for rank, name in enumerate(self._names):
            key = f"{what}/{rank}"
            try:
                self._store.wait([key], timedelta(seconds=self._seconds_left()))
            except RuntimeError as error:
                raise BackendError(f"{name} did not come within {self._timeout_seconds:g} seconds") from error
            told.append(json.loads(self._store.get(key)))
        return told

    def _seconds_left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def _serve(self, listener: socket.socket, segment: Segment, num_calls: int) -> None:
        """Hand the segment to as many ranks as have called; strangers are hung up on."""
        served: set[int] = set()
        with suppress(OSError):
            while len(served) < num_calls:
                listener.settimeout(_CONNECTION_SECONDS)
                call, _ = listener.accept()
                with call:
                    call.settimeout(_CONNECTION_SECONDS)
                    if _peer(call)[1] == os.geteuid() and len(said := call.recv(_RANK.size)) == _RANK.size:
                        socket.send_fds(call, [b"."], [segment.descriptor])
                        served.add(_RANK.unpack(said)[0])

    def _receive(self, call: socket.socket, hello: _Hello) -> Found | None:
        """The segment of the rank that was called, if it is that one's."""
        try:
            call.settimeout(self._seconds_left())
            _, descriptors, _, _ = socket.recv_fds(call, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return None
        return _checked(descriptors[0], _peer(call)[0], hello) if descriptors else None


def _listen(mine: _Hello) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(mine.socket_name)
    listener.listen(socket.SOMAXCONN)
    return listener


def _open_through_proc(hello: _Hello) -> Found | None:
    path = f"/proc/{hello.pid}/fd/{hello.descriptor}"
    try:
        if not str(Path(path).readlink()).startswith(_WHERE_SEGMENTS_ARE):
            return None  # in another namespace this may be any file of any process: it is not opened
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    return _checked(descriptor, hello.pid, hello)


def _connect(hello: _Hello, rank: int) -> socket.socket | None:
    call = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        call.connect(hello.socket_name)
        if _peer(call)[1] == os.geteuid():
            call.sendall(_RANK.pack(rank))
            return call
    except OSError:
        pass
    call.close()
    return None


def _peer(call: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    pid, uid, _ = _CREDENTIALS.unpack(call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def _checked(descriptor: int, pid: int, hello: _Hello) -> Found | None:
    """The segment behind ``descriptor``, if it holds the token."""
    try:
        with map_window(descriptor, 0, PAGE_BYTES) as page:
            if page[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES].hex() == hello.token:
                return Found(descriptor=descriptor, pid=pid)
    except (OSError, ValueError):
        pass
    os.close(descriptor)
    return None
