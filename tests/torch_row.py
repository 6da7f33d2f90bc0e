"""What holds with the torch of this Python, as a row of docs/torch.md.

Run ``python -m tests.torch_row tests/unit tests/contract/test_backend.py`` with the Python that is to be seen. It
runs these tests, and the main job of README at 1, 2 and 4 instances. Without tests it runs the job only.
"""

import platform
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch

_JOB: Final = ("--launcher", "local", "--num-replicas", "4")
_PROGRAM: Final = "examples/train_digits.py"
_DEADLINE_SECONDS: Final = 900.0


class Outcomes:
    """How tests ended: a plugin of pytest."""

    def __init__(self) -> None:
        self.counts = Counter[str]()  # of "passed", "failed" and "skipped"
        self.reasons = Counter[str]()  # why tests were skipped

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: where it fails or is skipped, or where its body has passed."""
        if report.failed or report.skipped or report.when == "call":
            self.counts[report.outcome] += 1
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1


def digest_in(printed: str) -> str:
    """The checksum of the weights that the job prints last; empty where it prints none."""
    found = re.findall(r"weights ([0-9a-f]{32})$", printed, re.MULTILINE)
    return found[-1] if found else ""


def row(tests: list[str], outcomes: Outcomes, digests: list[str]) -> str:
    """The row: versions, which tests, their outcomes, and whether all splits gave the same bits."""
    counts = [str(outcomes.counts[name]) if tests else "-" for name in ("passed", "failed", "skipped")]
    reasons = "; ".join(f"{count} x {reason}" for reason, count in outcomes.reasons.most_common())
    are_equal = len(set(digests)) == 1 and "" not in digests
    bits = f"equal: {digests[0][:8]}" if are_equal else f"NOT EQUAL: {', '.join(digests)}"
    versions = (torch.__version__, platform.python_version(), np.__version__)
    return f"| {' | '.join((*versions, ' '.join(tests) or 'none', *counts, reasons or '-', bits))} |"


def _digest(num_instances: int) -> str:
    command = [sys.executable, "-m", "poprun", *_JOB, "-n", str(num_instances), sys.executable, _PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False)
    return digest_in(done.stdout)


if __name__ == "__main__":
    outcomes = Outcomes()
    tests = [word for word in sys.argv[1:] if Path(word.partition("::")[0]).exists()]
    if tests:
        pytest.main(["-q", "-n0", *sys.argv[1:]], plugins=[outcomes])
    sys.stdout.write(row(tests, outcomes, [_digest(number) for number in (1, 2, 4)]) + "\n")
