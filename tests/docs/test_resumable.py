"""The example that may be killed is killed, by its reader's means."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT
from tests.running import Poprun

PROGRAM = ROOT / "examples" / "train_digits_resumable.py"


def test_a_killed_example_goes_on(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """Poprun is killed while it trains with 2 instances; with 1 it ends as a run that was never killed."""
    options = ("-n", "2", "--num-replicas", "4", "--launcher", "local", "--tag-output=no")
    words = {name: ["--folder", str(tmp_path / name), "--epochs", "2"] for name in ("killed", "whole")}
    command = Poprun(options=options).command(sys.executable, str(PROGRAM), *words["killed"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        lines = [next(running.stdout) for _ in range(4)]
        os.kill(running.pid, signal.SIGKILL)
    (resumed,), (whole,) = (
        forked_world.script(PROGRAM, *words[name], num_instances=1, num_replicas=4) for name in ("killed", "whole")
    )

    assert lines[0] == "start in epoch 1, after 0 steps\n"
    assert lines[3] == "saved step-000000000030\n"
    assert resumed[0] != whole[0] == "start in epoch 1, after 0 steps"
    assert resumed[-1] == whole[-1]
    assert "weights" in whole[-1]
