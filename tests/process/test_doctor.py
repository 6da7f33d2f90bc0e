"""The doctor looks at the machine that it runs on."""

import json
from pathlib import Path

import pytest

from tests.running import Poprun


def test_this_machine_is_fit(poprun: Poprun) -> None:
    """The machine that runs these tests can run jobs."""
    report = json.loads(poprun("--doctor", "--format", "json").succeeded().out)
    states = {finding["subject"]: finding["state"] for finding in report["findings"]}

    assert report["can_run"] is True
    assert {states[subject] for subject in ("Python", "torch", "popdist", "cores")} == {"ok"}
    assert set(states) >= {"MPI", "GPUs", "/dev/shm", "ssh", "Slurm"}


def test_a_torch_that_cannot_be_imported(poprun: Poprun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 1, and the reason stands there."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12 is missing')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    finished = poprun("--doctor")

    assert finished.code == 1
    assert "ImportError: libcudart.so.12 is missing" in finished.out
    assert finished.out.endswith("no job can run before that is mended\n")


def test_a_format_alone(poprun: Poprun) -> None:
    """``--format`` is the doctor's, and is easily taken for that of a plan."""
    finished = poprun("--format", "json", "--dry-run")

    assert finished.code == 2
    assert "for that of a plan, use --topology-format" in finished.err
