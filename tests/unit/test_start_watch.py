"""Shims that are lost before they report."""

from poprun.launch.launchers import StartWatch


def test_a_shim_that_reports_is_not_lost() -> None:
    """Its process id is known from its agent, and its end is then the agent's to tell."""
    watch = StartWatch(0.0)
    watch.note({10, 11}, set(), 1.0)
    watch.note({10, 11, 12}, {10, 12}, 2.0)
    watch.note({11}, {10, 12}, 3.0)
    watch.note(set(), {10, 11, 12}, 4.0)

    assert not watch.has_lost_one


def test_a_shim_that_vanishes_is_lost() -> None:
    """Whoever was seen, has not reported, and is gone will never report."""
    watch = StartWatch(0.0)
    watch.note({10, 11}, set(), 1.0)
    watch.note({10}, {10}, 2.0)

    assert watch.has_lost_one


def test_a_launcher_that_starts_nothing_is_idle() -> None:
    """The time runs while there is no shim that may still report."""
    watch = StartWatch(0.0)
    watch.note(set(), set(), 5.0)
    watch.note(set(), set(), 7.0)
    assert watch.idle_seconds == 2.0
    watch.note({10}, set(), 8.0)
    assert watch.idle_seconds == 0.0
    watch.note({10}, {10}, 9.0)
    watch.note({10}, {10}, 9.5)
    assert watch.idle_seconds == 0.5
