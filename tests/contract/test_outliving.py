"""Workers of a loader outlive the signals by which a program is asked to leave, and end with their program."""

import sys
from pathlib import Path

import pytest

from tests.running import run

PROGRAM = Path(__file__).with_name("signalled_loader.py")


@pytest.mark.parametrize(
    ("method", "part", "place"), [("fork", "part", "main"), ("fork", "part", "child"), ("spawn", "whole", "main")]
)
def test_workers_outlive_a_signal_to_every_process(method: str, part: str, place: str) -> None:
    """The program reads on; its end, which signals workers once and waits for them, does not wait for long."""
    finished = run([sys.executable, str(PROGRAM), method, part, place]).succeeded()
    assert finished.out == {"part": "2\n", "whole": "8\n"}[part]
