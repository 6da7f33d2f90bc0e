"""The programs that measure run, so that the figures in the documents can be taken again."""

import json
import sys

from tests.docs.markdown import ROOT
from tests.running import run


def test_the_overhead_can_be_measured_again() -> None:
    """Two rounds of ``benchmarks/overhead.py`` show both models and the command that repeats it."""
    script = str(ROOT / "benchmarks" / "overhead.py")
    finished = run([sys.executable, script, "--rounds", "2", "--steps", "1"]).succeeded()

    for word in ("digits CNN", "MLP, 25 M parameters", "ratio", "--rounds 2"):
        assert word in finished.out


def test_the_launchers_can_be_measured_again() -> None:
    """One round of ``benchmarks/launch.py`` shows every launcher and the command that repeats it."""
    finished = run([sys.executable, str(ROOT / "benchmarks" / "launch.py"), "--rounds", "1"]).succeeded()

    for word in ("poprun (MPI)", "poprun (local)", "torchrun", "mpiexec", "--rounds 1"):
        assert word in finished.out


def test_the_output_can_be_measured_again() -> None:
    """One small round of ``benchmarks/output.py`` finds every byte, and shows every launcher."""
    words = ["--rounds", "1", "--megabytes", "4"]
    finished = run([sys.executable, str(ROOT / "benchmarks" / "output.py"), *words]).succeeded()

    for word in ("every byte arrived", "poprun, tags and --log-dir", "mpiexec -outfile-pattern", "--megabytes 4"):
        assert word in finished.out


def test_the_loader_can_be_measured_again() -> None:
    """One small round of ``benchmarks/loader.py`` shows every dataset, and ends with all figures in JSON."""
    words = ["--rounds", "1", "--size", "128", "--workers", "0", "1", "--list-length", "1000"]
    finished = run([sys.executable, str(ROOT / "benchmarks" / "loader.py"), *words]).succeeded()

    found = json.loads(finished.lines[-1])
    assert {(row["dataset"], row["num_workers"]) for row in found["loaders"]} == {
        (name, num_workers)
        for name in ("TensorDataset", "rows of a tensor", "images, resized", "images, augmented")
        for num_workers in (0, 1)
    }
    assert set(found["epoch_start_seconds"]) == {"popdist", "DistributedSampler"}


def test_the_placements_can_be_measured_again() -> None:
    """One short round of ``benchmarks/placement.py`` shows every placement, the machine and the command."""
    words = ["--rounds", "1", "--steps", "1", "--instances", "1"]
    finished = run([sys.executable, str(ROOT / "benchmarks" / "placement.py"), *words]).succeeded()

    for word in (
        "NUMA node",
        "disabled",
        "spreadnuma",
        "compact",
        "mpiexec -bind-to core",
        "--rounds 1 --steps 1",
    ):
        assert word in finished.out
