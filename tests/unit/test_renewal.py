"""The process that renews a lease waits for no answer longer than the lease can bear.

Holds poprun.devices.server.server_connection.
"""

from collections.abc import Mapping

import pytest

from poprun.devices.server import renewal
from poprun.devices.server.renewal import LeaseRenewal
from poprun.devices.server.server_connection import ServerAddress
from poprun.errors import LeaseEndedError, ServerLostError

LEASE_SECONDS = 40.0


def told(timeout_seconds: float) -> dict[str, object]:
    """What poprun says to the process, for a server that may take so long to answer."""
    server = {"host": "127.0.0.1", "port": 1, "token": "t", "timeout_seconds": timeout_seconds}
    return {"lease_seconds": LEASE_SECONDS, "linger_seconds": 0, "key": "k", "server": server}


@pytest.mark.parametrize(("timeout_seconds", "patience_seconds"), [(600.0, 10.0), (3.0, 3.0)])
def test_an_answer_is_waited_for_in_a_part_of_the_leases_time(
    monkeypatch: pytest.MonkeyPatch, timeout_seconds: float, patience_seconds: float
) -> None:
    """So a server that hangs once costs one renewal, and not the lease."""
    asked = []

    def call_server(server: ServerAddress, command: str, values: Mapping[str, object]) -> None:
        asked.append((server.timeout_seconds, command, values))

    monkeypatch.setattr(renewal, "call_server", call_server)

    assert LeaseRenewal(told(timeout_seconds))._renew()
    assert asked == [(patience_seconds, "renew-lease", {"key": "k"})]


def test_a_lost_server_is_told_once_and_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until it answers, or says that the lease has ended."""
    lost = ServerLostError("gone")
    answers: list[Exception | None] = [lost, lost, None, LeaseEndedError("over")]

    def call_server(*_: object) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    monkeypatch.setattr(renewal, "call_server", call_server)
    lease = LeaseRenewal(told(1.0))

    assert [lease._renew() for _ in range(4)] == [True, True, True, False]
    err = capsys.readouterr().err
    assert [err.count(words) for words in ("gone", "answers again", "over")] == [1, 1, 1]
