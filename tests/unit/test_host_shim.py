"""The host shim hears the rank shims of its job, and nobody else."""

import os
import select
import socket
from collections.abc import Iterator

import pytest

from poprun.launch.host_shim import HostShim, end_of

PARENT = str(os.getppid()).encode()


class Deaf(HostShim):
    """One that forks nothing: it notes for which instances it would, and of what it would tell poprun."""

    def __init__(self) -> None:
        super().__init__("nowhere", "", "", os.getppid())
        self.forked: list[int] = []
        self.told: list[tuple[int, int]] = []
        self._awaited = {0, 1}

    def _fork_agent(self, index: int, *_: object) -> None:
        self.forked.append(index)

    def _report_loss(self, index: int, number: int, event: str = "agent_lost") -> None:
        del event
        self.told.append((index, number))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection between this process and itself."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def meet(shim: Deaf, ends: tuple[socket.socket, socket.socket], words: bytes) -> None:
    """Have a shim read ``words``; whether it hangs up then or not, the descriptor is closed here."""
    ours, theirs = ends
    theirs.send(words)
    shim._on_readable(ours.fileno(), lambda: None)
    shim._receive_handover(ours)


@pytest.mark.parametrize("words", [b"", b"0", b"2 1", b"-1 1", b"one 1", b"0 one", b"0 1 PMI_FD", b"1" * 60])
def test_who_is_no_rank_shim_is_hung_up_on(
    ends: tuple[socket.socket, socket.socket], words: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it says: it names no instance that is awaited, no parent, or a descriptor that did not come."""
    shim = Deaf()
    meet(shim, ends, words)

    assert (shim.forked, shim.told, shim._awaited) == ([], [], {0, 1})
    assert ends[1].recv(1) == b""
    assert len(capsys.readouterr().err.splitlines()) == bool(words)


def test_an_instance_begins_once(ends: tuple[socket.socket, socket.socket]) -> None:
    """With the rank that its launcher gave it."""
    shim = Deaf()
    meet(shim, ends, b"1 " + PARENT)
    again = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with again[0], again[1]:
        meet(shim, again, b"1 " + PARENT)

    assert (shim.forked, shim.told, shim._awaited) == ([1], [], {0})


@pytest.mark.parametrize(("process", "has_ended"), [(os.getppid(), False), (4_000_001, True)])
def test_an_end_is_heard_before_and_after_it(process: int, has_ended: bool) -> None:  # noqa: FBT001 - a parameter
    """An agent whose MPI runtime is gone before it begins hears of it as any other."""
    end = end_of(process)
    readable, _, _ = select.select((end,), (), (), 0)
    os.close(end)

    assert bool(readable) is has_ended
