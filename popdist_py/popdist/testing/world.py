"""Small real jobs for tests: processes that poprun starts, no simulation.

pickle knows functions by their module's name alone. That is not enough for a script (its module is ``__main__``)
and for test modules, which pytest loads from their files. So a call names the module's file, too, which is loaded
where the name does not lead to it.
"""

import inspect
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Final, ParamSpec, Self, TypeVar

from popdist.errors import WorldError, name_instances

P = ParamSpec("P")
R = TypeVar("R")

STOP_SECONDS: Final = 15.0
"""How long poprun may take to stop a world whose time is up, before it is killed."""

TAIL_CHARACTERS: Final = 4000
"""How much of a failed world's output its error repeats."""

JOB_FILE: Final = "job.pickle"
"""Name of the file with the call."""

MAIN_ALIAS: Final = "__mp_main__"
"""The name of the program's ``__main__`` in the instances; the same as multiprocessing's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReference:
    """A module-level function, as another process finds it."""

    module: str
    path: str
    qualname: str

    @classmethod
    def of(cls, fn: Callable[..., object]) -> Self:
        """Make the reference to ``fn``; an error if another process could not find it."""
        qualname = getattr(fn, "__qualname__", repr(fn))
        if not inspect.isfunction(fn) or "<" in qualname:
            raise WorldError(
                f"{qualname} cannot run in other processes: give a function that a module defines by name"
            )
        path = inspect.getsourcefile(fn)
        if path is None or not Path(path).is_file():
            raise WorldError(f"{qualname} cannot run in other processes: its module is not in a file")
        sys.modules.setdefault(MAIN_ALIAS, sys.modules["__main__"])
        return cls(module=fn.__module__, path=str(Path(path).resolve()), qualname=qualname)

    def load(self) -> Callable[..., Any]:
        """Import the function in this process."""
        fn: Callable[..., Any] = attrgetter(self.qualname)(_load_module(self.module, Path(self.path)))
        return fn


def _load_module(name: str, path: Path) -> ModuleType:
    if name == "__main__":
        module = sys.modules["__main__"] = _load_file(MAIN_ALIAS, path)
        return module
    try:
        module = import_module(name)
    except ImportError:
        return _load_file(name, path)
    found = getattr(module, "__file__", None)
    return module if found is not None and Path(found).resolve() == path else _load_file(name, path)


def _load_file(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorldError(f"{path} cannot be loaded as a Python module")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome_path(directory: Path, instance: int) -> Path:
    """The path where an instance writes what its call returned, and the traceback if it failed."""
    return directory / f"outcome-{instance}.pickle"


def run_world(
    fn: Callable[..., R],
    *args: object,
    num_instances: int,
    num_replicas: int | None = None,
    tensor: int = 1,
    pipeline: int = 1,
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
        num_replicas: Replicas in the job, a multiple of ``num_instances``; None means one for each instance, or
            for each ``tensor * pipeline`` of them.
        tensor: Instances that share each layer of a replica. At least 1.
        pipeline: Stages that share the layers of a replica. At least 1.
        timeout_seconds: How long the whole job may take before it is stopped. Greater than 0.

    Returns:
        What ``fn`` returned, in instance order.

    Raises:
        WorldError: If ``fn`` raised or an instance died (the first failure, with its traceback), the time was up,
            ``fn`` cannot be found by other processes, or poprun refuses the numbers.
    """
    reference = FunctionReference.of(fn)
    with tempfile.TemporaryDirectory(prefix="popdist-world-") as name:
        directory = Path(name)
        (directory / JOB_FILE).write_bytes(pickle.dumps((reference, pickle.dumps(args))))
        counts = ["-n", str(num_instances)]
        if tensor * pipeline > 1:
            counts += ["--parallelism", f"tensor={tensor},pipeline={pipeline}"]
        if num_replicas is not None or not counts[2:]:
            counts += ["--num-replicas", str(num_replicas or num_instances)]
        program = [sys.executable, "-m", "popdist.testing", name]
        command = [sys.executable, "-m", "poprun", "--launcher", "local", *counts, *program]
        code, output = _run(command, directory / "output", timeout_seconds)
        sys.stdout.write(output)
        return _values(directory, num_instances, code, output)


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


def _values(directory: Path, num_instances: int, code: int | None, output: str) -> list[Any]:
    """What the call returned on every instance; an error with the failure that was written first."""
    paths = {instance: outcome_path(directory, instance) for instance in range(num_instances)}
    written = {instance: path.stat().st_mtime_ns for instance, path in paths.items() if path.exists()}
    values: dict[int, Any] = {}
    for instance in sorted(written, key=written.__getitem__):
        values[instance], failure = pickle.loads(paths[instance].read_bytes())  # noqa: S301 - written by our own processes in a directory of our own
        if failure is not None:
            raise WorldError(f"instance {instance} of {num_instances} raised:\n{failure}")
    if missing := set(paths) - set(values):
        ended = "the time was up" if code is None else f"poprun ended with code {code}"
        tail = output[-TAIL_CHARACTERS:]
        raise WorldError(f"{name_instances(missing)} of {num_instances} brought no result; {ended}:\n{tail}")
    return [values[instance] for instance in range(num_instances)]
