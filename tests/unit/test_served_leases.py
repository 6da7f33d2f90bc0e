"""A lease lasts while it is renewed; time in which the server did not run counts for nobody."""

from poprun.devices.server.served_leases import Renewals


class Clock:
    """Time that a test moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:  # noqa: D102 - the class says what it is
        return self.now


def looked(renewals: Renewals, clock: Clock, seconds: int) -> list[str]:
    """What is found expired when the server looks every second for so long."""
    found = []
    for _ in range(seconds):
        clock.now += 1
        found += renewals.expired()
    return found


def test_a_lease_expires_when_it_is_not_renewed_in_time() -> None:
    """At the end of its time and not before; renewing begins it anew."""
    clock = Clock()
    renewals = Renewals(10, 1, clock)
    renewals.renew("a")
    renewals.renew("b")

    assert looked(renewals, clock, 9) == []
    renewals.renew("b")
    assert looked(renewals, clock, 1) == ["a"]
    renewals.remove("a")
    assert looked(renewals, clock, 8) == []
    assert looked(renewals, clock, 1) == ["b"]
    assert "a" not in renewals
    assert "b" in renewals


def test_time_in_which_the_server_was_stopped_is_given_back() -> None:
    """A minute of standstill ends no lease: nobody could have renewed one."""
    clock = Clock()
    renewals = Renewals(10, 1, clock)
    renewals.renew("a")
    assert looked(renewals, clock, 6) == []
    clock.now += 60

    assert renewals.expired() == []
    assert looked(renewals, clock, 2) == []
    assert looked(renewals, clock, 1) == ["a"]


def test_leases_that_somebody_else_has_ended_are_forgotten() -> None:
    """What does not stand in the pool any more can neither be renewed nor expire."""
    renewals = Renewals(10, 1, Clock())
    renewals.renew("a")
    renewals.renew("b")

    renewals.keep_only({"b", "c"})

    assert [key for key in "abc" if key in renewals] == ["b"]
