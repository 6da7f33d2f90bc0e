"""How long a launcher takes from its start to its end when the program does nothing: 2 processes of `true`.

    python benchmarks/launch.py --rounds 9

Every round runs each launcher once, in turn, so that a slow moment of the machine meets all of them. Times differ
from machine to machine; the ratios of one run are what can be compared.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

NUM_PROCESSES = "2"

MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Open MPI's launcher refuses to run for root without these; poprun sees to it itself."""


def contenders() -> dict[str, list[str]]:
    """Name → command; all of this interpreter's environment."""
    scripts = Path(sys.executable).parent
    poprun = [str(scripts / "poprun"), "-n", NUM_PROCESSES]
    torchrun = [str(scripts / "torchrun"), "--nproc-per-node", NUM_PROCESSES, "--no-python"]
    return {
        "poprun (MPI)": [*poprun, "--launcher", "mpi", "true"],
        "poprun (local)": [*poprun, "--launcher", "local", "true"],
        "torchrun": [*torchrun, "true"],
        "mpiexec": [str(scripts / "mpiexec"), "-n", NUM_PROCESSES, "true"],
    }


def measure(command: list[str]) -> float:
    """Seconds from the start of ``command`` to its end; Python may keep its bytecode, as it does for users."""
    environment = os.environ | MPI_AS_ROOT
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure, then print a table and the command that made it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="how often each launcher runs (9)")
    rounds = parser.parse_args().rounds

    commands = contenders()
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            seconds[name].append(measure(command))

    torchrun = statistics.median(seconds["torchrun"])
    print(f"{'2 x true, from start to end':28} {'median':>9} {'least':>9} {'most':>9}   torchrun takes")
    for name, values in seconds.items():
        median = statistics.median(values)
        spread = f"{median:7.3f} s {min(values):7.3f} s {max(values):7.3f} s"
        print(f"{name:28} {spread}   {torchrun / median:6.1f} x as long")
    print(f"\n{rounds} rounds; again: {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
