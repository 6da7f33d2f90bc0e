"""A program for PopTorch runs as it is under poprun, and under plain python.

Holds popdist.startup.stub_finder, poptorch.stubs.horovod_torch, popdist.poptorch and
poptorch.executor.compiled_model.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import popdist
from tests.process import poptorch_program
from tests.running import Poprun


def test_the_usual_start_up(
    poprun: Poprun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two instances of two replicas join their losses, save their sharded state once, and have the bits of one."""
    program = str(poptorch_program.__file__)
    words = ["--replicas", "4", "--checkpoint"]
    monkeypatch.setattr(sys, "argv", [program, *words, str(tmp_path / "alone.pt")])
    with torch.random.fork_rng():
        runpy.run_path(program, run_name="__main__")
    popdist.finalize()
    alone = json.loads(capsys.readouterr().out)

    words.append(str(tmp_path / "joint.pt"))
    finished = poprun(
        "-n", "2", "--num-replicas", "4", "--tag-output=no", sys.executable, program, *words
    ).succeeded()
    found = sorted(map(json.loads, finished.out.splitlines()), key=lambda it: int(it["instance"]))

    assert [it["place"] for it in found] == [[2 * rank, rank, 2] for rank in range(2)]
    assert {it["weights"] for it in [*found, alone]} == {alone["weights"]}
    assert all(it["outputs"] == alone["outputs"] for it in found)
    assert [it["losses"] for it in found] == [pytest.approx(alone["losses"])] * 2
    assert alone["losses"][-1] < alone["losses"][0] / 2
    one, other = (torch.load(tmp_path / name, weights_only=True) for name in ("alone.pt", "joint.pt"))
    assert popdist.checksum(one["model"]) == popdist.checksum(other["model"]) == alone["weights"]
    states = [saved["optimizer"]["ipu_state"] for saved in (one, other)]
    assert popdist.checksum(states[0]) == popdist.checksum(states[1])
    assert any(name.startswith("Accl1___") for name in states[1])
    assert "overridden" not in finished.err
