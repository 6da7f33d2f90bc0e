"""The host shim hears the rank shims of its job, and nobody else."""

import os
import socket
from collections.abc import Iterator

import pytest

from poprun.launch.host_shim import HostShim

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

    def _tell_of_loss(self, index: int, number: int) -> None:
        self.told.append((index, number))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection between this process and itself, whose environment is none of a rank shim."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def meet(shim: Deaf, ends: tuple[socket.socket, socket.socket], words: bytes) -> None:
    """Have a shim read ``words``; whether it hangs up then or not, the descriptor is closed here."""
    ours, theirs = ends
    theirs.send(words)
    shim._heed(ours.fileno(), lambda: None)
    shim._meet(ours)


@pytest.mark.parametrize("words", [b"", PARENT, b"nonsense", b"-1", PARENT + b" PMI_FD", b"1" * 60])
def test_who_is_no_rank_shim_is_hung_up_on(
    ends: tuple[socket.socket, socket.socket], words: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it says: the variables of its process name no instance that is awaited."""
    shim = Deaf()
    meet(shim, ends, words)

    assert (shim.forked, shim.told, shim._awaited) == ([], [], {0, 1})
    assert ends[1].recv(1) == b""
    assert len(capsys.readouterr().err.splitlines()) == bool(words)


@pytest.mark.parametrize(("runtime", "forked", "told"), [(PARENT, [1], []), (b"4000001", [], [(1, 0)])])
def test_an_instance_begins_once(
    ends: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    runtime: bytes,
    forked: list[int],
    told: list[tuple[int, int]],
) -> None:
    """With the number that its launcher gave it; when the launcher is gone, poprun is told."""
    variables = {"POPRUN_RANK_VARIABLE": "RANK_HERE", "RANK_HERE": "1"}
    monkeypatch.setattr("poprun.launch.host_shim.environment_of", lambda _: dict(variables))
    shim = Deaf()
    meet(shim, ends, runtime)

    assert (shim.forked, shim.told) == (forked, told)
    again = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with again[0], again[1]:
        meet(shim, again, runtime)
    assert shim.forked == forked
