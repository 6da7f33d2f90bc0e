"""Small real jobs for tests: processes that poprun starts, no simulation."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from popdist.errors import WorldError, name_instances
from popdist.testing.function_reference import JOB_FILE, FunctionReference, Outcome, outcome_path

P = ParamSpec("P")
R = TypeVar("R")

STOP_SECONDS: Final = 15.0
"""How long poprun may take to stop a world whose time is up, before it is killed."""

TAIL_CHARACTERS: Final = 4000
"""How much of a failed world's output its error repeats."""


def run_world(
    fn: Callable[..., R],
    *args: object,
    num_instances: int,
    num_replicas: int | None = None,
    timeout_seconds: float = 60.0,
) -> list[R]:
    """Call ``fn(*args)`` on every instance of a small job on this machine.

    Each instance is a process that poprun starts with this Python, this ``sys.path`` and this environment. The
    function is called as a program would be: it calls ``popdist.init()`` itself. What the instances print appears
    on this process's standard output when the world has ended.

    Args:
        fn: A function that a module, a script or a test file defines by name.
        *args: Its arguments: anything that pickles.
        num_instances: Processes in the job. At least 1.
        num_replicas: Replicas in the job, a multiple of ``num_instances``; None means one for each instance.
        timeout_seconds: How long the whole job may take before it is stopped. Greater than 0.

    Returns:
        What ``fn`` returned, in instance order.

    Raises:
        WorldError: If ``fn`` raised or an instance died (the first failure, with its traceback), the time was up,
            or ``fn`` cannot be found by other processes.
    """
    reference = FunctionReference.of(fn)
    with tempfile.TemporaryDirectory(prefix="popdist-world-") as name:
        directory = Path(name)
        (directory / JOB_FILE).write_bytes(pickle.dumps((reference, pickle.dumps(args))))
        counts = ["-n", str(num_instances), "--num-replicas", str(num_replicas or num_instances)]
        program = [sys.executable, "-m", "popdist.testing", name]
        command = [sys.executable, "-m", "poprun", "--launcher", "local", *counts, *program]
        code, output = _run(command, directory / "output", timeout_seconds)
        sys.stdout.write(output)
        return [outcome.value for outcome in _outcomes(directory, num_instances, code, output)]  # type: ignore[misc] # the instance's fn is ours


def _run(command: list[str], output_path: Path, timeout_seconds: float) -> tuple[int | None, str]:
    """Run the command: its exit code, None when the time was up, and its output, which is written to a file."""
    with output_path.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_child_environment()
        )
        try:
            code: int | None = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _stop(process)
    return code, output_path.read_text(errors="replace")


def _child_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop poprun if it still runs, first with SIGTERM; if it is killed, its instances end by themselves."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _outcomes(directory: Path, num_instances: int, code: int | None, output: str) -> list[Outcome]:
    """The outcome of every instance; an error with the failure that was written first."""
    paths = {instance: outcome_path(directory, instance) for instance in range(num_instances)}
    written = {instance: path.stat().st_mtime_ns for instance, path in paths.items() if path.exists()}
    outcomes: dict[int, Outcome] = {}
    for instance in sorted(written, key=written.__getitem__):
        outcomes[instance] = pickle.loads(paths[instance].read_bytes())  # noqa: S301 - written by our own processes in a directory of our own
        if (failure := outcomes[instance].failure) is not None:
            raise WorldError(f"instance {instance} of {num_instances} raised:\n{failure}")
    if missing := set(paths) - set(outcomes):
        ended = "the time was up" if code is None else f"poprun ended with code {code}"
        tail = output[-TAIL_CHARACTERS:]
        raise WorldError(f"{name_instances(missing)} of {num_instances} brought no result; {ended}:\n{tail}")
    return [outcomes[instance] for instance in range(num_instances)]
