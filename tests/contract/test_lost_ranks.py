"""Who waits over the backend ``popdist`` for a rank that will not come is told which."""

import subprocess
import sys
from pathlib import Path

from tests.running import DEADLINE_SECONDS

PROGRAM = Path(__file__).with_name("lost_ranks_program.py")
SIZE = 3


def test_late_and_killed_ranks_are_named(tmp_path: Path) -> None:
    """A late one when the time is up, a killed one long before; who comes too late is told so; none hangs."""
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, tmp_path, str(rank), str(SIZE)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(SIZE)
    ]
    try:
        told = [rank.communicate(timeout=DEADLINE_SECONDS)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()

    assert [rank.returncode for rank in ranks] == [0, -9, 0]
    for lines in told[:2]:
        assert lines[:2] == [
            f"{when}: rank 2 did not come within the timeout of 2.5 seconds" for when in ("late", "later")
        ]
    assert told[2][1].startswith("later: rank")
    assert "had given up waiting" in told[2][1]
    for lines in (told[0], told[2]):
        assert lines[2:] == [
            f"{when}: the connection to rank 1 was closed: it ended or was lost"
            for when in ("lost", "lost for ever")
        ]
