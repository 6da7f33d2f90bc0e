"""The memory of another user is never taken for that of a peer, whatever was announced."""

import os
import signal

import pytest

from popdist.exchange.host_memory.segments import (
    PAGE_BYTES,
    TOKEN_BYTES,
    TOKEN_OFFSET,
    _checked,
    open_through_proc,
)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user, too")
@pytest.mark.parametrize("uid", [0, 54321])
def test_memory_of_another_user(uid: int) -> None:
    """Root may open every process's memory, and takes only its own for a peer's: torch's store has no password."""
    token, (ready, told) = os.urandom(TOKEN_BYTES), os.pipe()
    peer = os.fork()
    if not peer:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        memory = os.memfd_create("popdist")
        os.ftruncate(memory, PAGE_BYTES)
        os.pwrite(memory, token, TOKEN_OFFSET)
        os.write(told, bytes([memory]))
        signal.pause()
    try:
        (descriptor,) = os.read(ready, 1)
        found = _checked(open_through_proc(peer, descriptor), peer, token.hex())
    finally:
        os.kill(peer, signal.SIGKILL)
        os.waitpid(peer, 0)
        os.close(ready)
        os.close(told)

    assert (found is not None) == (uid == 0)
    if found is not None:
        os.close(found.descriptor)
