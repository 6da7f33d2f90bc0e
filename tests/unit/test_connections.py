"""Connections with a short way hold little of what they send; all others stay as they are."""

import os
import socket
import struct
from contextlib import ExitStack

import pytest

from popdist.transport import connections
from popdist.transport.connections import SEND_BYTES, is_near, short_buffers
from tests.running import DEADLINE_SECONDS


def _buffer_bytes(connection: socket.socket) -> int:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def _connect(stack: ExitStack) -> list[socket.socket]:
    """A listener on this host, and both ends of a connection to it."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    client = stack.enter_context(socket.create_connection(listener.getsockname()))
    server, _ = listener.accept()
    return [listener, client, stack.enter_context(server)]


def test_what_is_connected_in_the_block_gets_short_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends do; listeners, what was there before, what comes later, and pipes do not."""
    monkeypatch.setattr(connections, "NEAR_SECONDS", DEADLINE_SECONDS)
    with ExitStack() as stack:
        wanted = stack.enter_context(socket.socket())
        wanted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        before = _connect(stack)
        old = list(map(_buffer_bytes, before))
        with short_buffers():
            ends = os.pipe()
            listener, *connected = _connect(stack)
        later = _connect(stack)
        for descriptor in ends:
            os.close(descriptor)

        assert list(map(_buffer_bytes, connected)) == [_buffer_bytes(wanted)] * 2
        assert _buffer_bytes(listener) == old[0]
        assert list(map(_buffer_bytes, before)) == list(map(_buffer_bytes, later)) == old


@pytest.mark.parametrize(("microseconds", "expected"), [(0, False), (1, True), (199, True), (200, False)])
def test_near_is_what_the_kernel_has_measured(microseconds: int, *, expected: bool) -> None:
    """A kernel that has measured nothing, or says less, tells of no short way."""
    information = struct.pack("148x I", microseconds)

    assert is_near(information) is expected
    assert not is_near(information[:-4])
