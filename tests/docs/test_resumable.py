"""The example that may be killed is killed, by its reader's means."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.docs.markdown import ROOT
from tests.running import Poprun

PROGRAM = ROOT / "examples" / "train_digits_resumable.py"


def job(folder: Path, num_instances: int) -> list[str]:
    """The words after ``poprun``."""
    counts = ["-n", str(num_instances), "--num-replicas", "4", "--launcher", "local", "--tag-output=no"]
    return [*counts, sys.executable, str(PROGRAM), "--folder", str(folder), "--epochs", "2"]


def test_a_killed_example_goes_on(poprun: Poprun, tmp_path: Path) -> None:
    """Poprun is killed while it trains with 2 instances; with 1 it ends as a run that was never killed."""
    command = [sys.executable, "-m", "poprun", *job(tmp_path / "killed", 2)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        lines = [next(running.stdout) for _ in range(4)]
        os.kill(running.pid, signal.SIGKILL)
    resumed = poprun(*job(tmp_path / "killed", 1)).succeeded().out.splitlines()
    whole = poprun(*job(tmp_path / "whole", 1)).succeeded().out.splitlines()

    assert lines[0] == "start in epoch 1, after 0 steps\n"
    assert lines[3] == "saved step-000000000030\n"
    assert resumed[0] != whole[0] == "start in epoch 1, after 0 steps"
    assert resumed[-1] == whole[-1]
    assert "weights" in whole[-1]
