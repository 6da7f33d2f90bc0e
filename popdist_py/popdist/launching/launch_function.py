"""The function `popdist.launch`, which calls a function as a job, and returns its results or raises its error."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Any, TypeVar

from popdist.errors import LaunchError
from popdist.ground.environments import Launcher, detect
from popdist.launching.poprun_process import run_poprun
from popdist.launching.sent_values import Call, Outcome, load_outcome, name_of

R = TypeVar("R")


class RemoteTraceback(Exception):  # noqa: N818 - the class is only the cause of an error
    """The traceback of an exception on another instance, as text and as the cause of the same error here."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def launch(
    fn: Callable[..., R],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    num_instances: int | str,
    num_replicas: int | None = None,
    **options: object,
) -> list[R]:
    """Call ``fn(*args, **kwargs)`` on every instance of a new poprun job, and return the results of all calls.

    The call works in a notebook, a REPL, a script or a test. Each instance is a new process of this Python, with
    this working directory, environment and ``sys.path``. The function is called as a program would be, so it must
    call ``popdist.init()`` itself. The output of the instances appears here immediately.

    Args:
        fn: Any function that cloudpickle can send: from a module, a script or a notebook, a closure, a lambda.
        args: Positional arguments of ``fn``.
        kwargs: Keyword arguments of ``fn``; None if there are none.
        num_instances: Number of processes in the job, at least 1; ``"auto"`` means one for each free GPU.
        num_replicas: Number of replicas in the job; None means one for each instance.
        **options: Options of poprun: ``timeout=60`` is ``--timeout=60``, True and False switch an option on and
            off, a list repeats the option, and None leaves the option out.

    Returns:
        The results of ``fn``, in instance order. Tensors have the device that they had on the instance.

    Raises:
        Exception: If ``fn`` raised it on the instance that poprun finds at fault; its cause is the traceback
            there.
        LaunchError: If cloudpickle is missing, ``fn``, an argument or a value cannot be sent, this process is an
            instance of a job itself, poprun refuses the options, an instance died, or the time was up.
    """
    _check_call(fn, args, kwargs)
    call = Call.of(fn, args, kwargs or {})
    with tempfile.TemporaryDirectory(prefix="popdist-launch-") as name:
        folder = Path(name)
        call.save(folder)
        report = folder / "report.json"
        words = _words({"num_instances": num_instances, "num_replicas": num_replicas, **options})
        program = [sys.executable, "-P", "-m", "popdist.launching", name]
        code = run_poprun([*words, f"--report={report}", "--", *program])
        return _values(folder, _read_attempt(report, code), code, name_of(fn))


def _check_call(fn: object, args: object, kwargs: object) -> None:
    """Check the arguments of ``launch``. Raise LaunchError if one is wrong, or this is an instance of a job."""
    if not callable(fn):
        raise LaunchError(f"fn={fn!r} must be a function")
    if not isinstance(args, list | tuple):
        raise LaunchError(
            f"args={args!r} must be a tuple of the arguments of {name_of(fn)}: write args=({args!r},)"
        )
    if not isinstance(kwargs, Mapping | None):
        raise LaunchError(f"kwargs={kwargs!r} must map names to the arguments of {name_of(fn)}")
    job = detect(os.environ)
    if job.launcher is Launcher.POPRUN or job.contract.num_instances > 1:
        raise LaunchError(
            f"popdist.launch was called by instance {job.contract.instance_index} of "
            f"{job.contract.num_instances} of a job that {job.launcher} started: call {name_of(fn)} itself, or "
            "launch it from outside of a job"
        )


def _words(options: Mapping[str, object]) -> Iterator[str]:
    """Yield the options of poprun as words of a command line, such as ``--timeout=60``."""
    for name, value in options.items():
        word = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is not None:
                yield word if each is True else f"{word}={'no' if each is False else each}"


def _read_attempt(report: Path, code: int) -> dict[str, Any]:
    """Return the last attempt in poprun's report. Raise LaunchError if poprun made no attempt or was killed."""
    if code < 0:
        raise LaunchError(f"poprun was killed by {Signals(-code).name}, and its job has ended with it")
    job = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    if not job.get("attempts"):
        why = job.get("error") or "its own words stand above"
        raise LaunchError(f"poprun started nothing and ended with code {code}: {why}")
    attempt: dict[str, Any] = job["attempts"][-1]
    return attempt


def _values(folder: Path, attempt: Mapping[str, Any], code: int, name: str) -> list[Any]:
    """Return the results on all instances; if the job failed, raise the error of the instance at fault."""
    outcomes = [load_outcome(folder, instance["index"]) for instance in attempt["instances"]]
    if code == 0 and None not in outcomes:
        found = [_load(it, f"what {name} returned on instance {index}") for index, it in enumerate(outcomes) if it]
        return [value for (value,) in found]
    culprits = (attempt["verdict"] or {}).get("culprits", ())
    index = outcomes.index(None) if code == 0 else next(iter(culprits), attempt["first_failure"])
    if index is None or attempt["instances"][index]["was_stopped"]:
        raise LaunchError(f"poprun ended the job with code {code}: {attempt['stop_reason'] or 'it was asked to'}")
    where, outcome = f"instance {index} of {len(outcomes)}", outcomes[index]
    if outcome is None:
        raise LaunchError(_describe_end(attempt["instances"][index], where, name))
    error = _load(outcome, f"the exception of {where}")
    raise error from RemoteTraceback(f"{where}:\n{outcome.traceback}")


def _load(outcome: Outcome, what: str) -> Any:
    try:
        return outcome.load()
    except Exception as why:  # noqa: BLE001 - the code of the value's class may raise anything
        error = LaunchError(f"{what} cannot be read here: {why}")
        raise error from (RemoteTraceback(outcome.traceback) if outcome.traceback else why)


def _describe_end(instance: Mapping[str, Any], where: str, name: str) -> str:
    """Return a text about the end of an instance that has neither returned a result nor raised an error."""
    how = instance["problem"] or f"it ended with {instance['signal'] or instance['exit_code']}"
    hint = f": {instance['hint']}" if instance["hint"] else ""
    return "\n  ".join([f"{name} did not return on {where}: {how}{hint}", *instance["excerpt"]])
