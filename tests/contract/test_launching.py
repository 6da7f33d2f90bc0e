"""A function is called in a real job, and what it returns, raises or prints comes back.

Holds popdist.launching.__main__, popdist.launching.launch_function, popdist.launching.poprun_process,
popdist.launching.sent_values and popdist.launching.start_poprun.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

import popdist
from popdist.launching.__main__ import call_function
from popdist.launching.sent_values import Outcome
from tests.running import DEADLINE_SECONDS, run

SCRIPT = """
import pickle, sys
import popdist

class Place:
    def __init__(self, number):
        self.number = number

class LostError(Exception):
    def __init__(self, instance, reason):
        super().__init__(f"instance {instance}: {reason}")

class WrongError(Exception):
    pass

def shifted(place, by):
    return Place(pickle.loads(pickle.dumps(place)).number + by)

def place(start, *, scale):
    print(f"from {start.number}")
    return shifted(start, scale * popdist.local_replicas().start)

def fail(culprit, kind, *args):
    if popdist.instance_index() == culprit:
        raise kind(*args)

launch = lambda *args: popdist.launch(*args, num_instances=2, num_replicas=4, launcher="local")
places = launch(place, (Place(10),), {"scale": 3})
print([found.number for found in places], {type(found) for found in places} == {Place})
failing = lambda *error: fail(1, *error)
for fn, *args in ((failing, WrongError, "here"), (failing, LostError, 1, "gone"), (print, LostError(1, "gone"))):
    try:
        launch(fn, args)
    except (WrongError, LostError, popdist.LaunchError) as found:
        print(type(found).__name__, found, repr(str(found.__cause__)))
"""


@pytest.fixture
def launch() -> Callable[..., Any]:
    """What a function returns on one instance."""
    return partial(popdist.launch, num_instances=1, launcher="local", timeout=DEADLINE_SECONDS)


def test_what_a_script_defines_goes_there_and_back(tmp_path: Path) -> None:
    """Functions and classes of ``__main__``, also by plain pickle, and exceptions of its own classes."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    ended = run([sys.executable, str(script)]).succeeded()

    assert {"[0] from 10", "[1] from 10"} <= {*ended.lines}
    tags = ("[0] ", "[1] ")
    values, wrong, lost, unread = (line for line in ended.out.splitlines() if not line.startswith(tags))
    assert values == "[10, 16] True"
    assert wrong.startswith("WrongError here")
    assert "instance 1 of 2:\\nTraceback (most recent call last):\\n  File" in wrong
    assert "in fail\\n    raise kind(*args)\\n" in wrong
    assert lost.startswith("LostError instance 1: gone")
    assert unread.startswith(
        "LaunchError print and its arguments cannot be read on an instance: LostError.__init__"
    )
    assert "popdist/launching" not in ended.err


def place() -> tuple[int, int, int]:
    """Where this instance is: in which replica, which instance of the job, and how many replicas there are."""
    return popdist.replica_index(), popdist.instance_index(), popdist.num_replicas()


def test_options_are_those_of_poprun(launch: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """They reach poprun, which refuses what is wrong in its own words; Python's streams show what it prints."""
    assert launch(place, num_instances=4, parallelism="tensor=2") == [(0, 0, 2), (0, 1, 2), (1, 2, 2), (1, 3, 2)]
    with pytest.raises(popdist.LaunchError, match=r"started nothing .* code 2: .* replicas of 3"):
        launch(place, num_instances=4, parallelism="tensor=3")
    with pytest.raises(popdist.LaunchError, match="its own words stand above"):
        launch(place, num_host=2, debug=True, tag_output=False)
    assert "there is no option --num-host: did you mean --host?" in capsys.readouterr().err


def test_an_attempt_is_not_taken_for_another(launch: Callable[..., Any], tmp_path: Path) -> None:
    """After a restart only the last attempt counts, not the exception before."""

    def fail_twice() -> None:
        if (tmp_path / "restarted").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / "restarted").mkdir()
        raise ValueError("the first time")

    with pytest.raises(
        popdist.LaunchError, match="fail_twice did not return on instance 0 of 1: it ended with SIGKILL"
    ):
        launch(fail_twice, max_restarts=1, report=[tmp_path / "run.html", tmp_path / "run.json"])
    assert len(json.loads((tmp_path / "run.json").read_text())["attempts"]) == 2


def wait() -> None:
    """Never return."""
    sys.stdout.write("waiting\n")
    sys.stdout.flush()
    while True:
        os.read(os.pipe()[0], 1)


def kill_poprun() -> None:
    """Kill the poprun that has started this instance, and wait for the end that comes of it."""
    next(
        it for it in psutil.Process().parents() if any(word.startswith("--report=") for word in it.cmdline())
    ).kill()
    wait()


def raise_lock() -> None:
    """Raise an exception that nobody can pickle."""
    raise OSError(threading.Lock())


class CodeError(Exception):
    """An exception whose ``__init__`` does not accept its ``args``."""

    def __init__(self, code: int, *, place: str) -> None:
        super().__init__(f"code {code} at {place}")
        self.code = code


def test_an_exception_comes_back_whatever_its_init_takes() -> None:
    """Its class, its message and its attributes."""
    error = Outcome.of_error(CodeError(7, place="here"), "Traceback").load()
    assert (type(error), str(error), error.code) == (CodeError, "code 7 at here", 7)


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (lambda: os._exit(0), "<lambda> did not return on instance 0 of 1: it ended with 0"),
        (partial(popdist.launch, place, num_instances=1), "by instance 0 of 1 .* poprun started: call place"),
        (kill_poprun, "poprun was killed by SIGKILL, and its job has ended with it"),
        (partial(raise_lock), r"OSError: <unlocked .*\n\(which cannot be sent itself: cannot pickle"),
        (lambda: {"made": [threading.Lock()]}, r"what <lambda> returned\['made'\]\[0\] cannot .* is a lock: "),
    ],
)
def test_a_call_without_a_value_is_told(launch: Callable[..., Any], fn: Callable[[], object], told: str) -> None:
    """Whether the instance left, has what cannot come back, or poprun is lost."""
    with pytest.raises(popdist.LaunchError, match=told):
        launch(fn)


def test_a_host_without_the_function_is_told(tmp_path: Path) -> None:
    """The function comes through a folder, which the other hosts of a job may not have."""
    with pytest.raises(
        SystemExit, match=r"this host has no folder .* set TMPDIR to a folder that all hosts share"
    ):
        call_function(tmp_path / "popdist-launch-1")


def test_a_job_whose_time_is_up_is_stopped(launch: Callable[..., Any]) -> None:
    """The time is poprun's: nothing of the job is left."""
    with pytest.raises(popdist.LaunchError, match="ended the job with code 124: not over after --timeout 1 s"):
        launch(wait, timeout=1)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_job_ends_with_who_launched_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int) -> None:
    """By an interrupt, which is raised after the job's end, and by its death."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what is killed removes nothing
    words = "from tests.contract.test_launching import *; popdist.launch(wait, num_instances=2, launcher='local')"
    with subprocess.Popen(
        [sys.executable, "-c", words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)]
        process.send_signal(signum)
        _, err = process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode == -signum
    assert ("interrupted: instances 0 and 1\n" in err) == (signum == signal.SIGINT)


def unsendable() -> list[tuple[Callable[..., object], tuple[object, ...], str]]:
    """Calls that cannot be sent, with what is said of each."""
    lock = threading.Lock()
    holder = type("Holder", (), {})()
    holder.parts = [lock]

    def helper() -> object:
        return lock

    return [
        (
            partial(helper),
            (),
            r"helper.func → lock cannot be .* because it is a lock: cannot pickle",
        ),
        (print, (1, holder), r"args\[1\].parts\[0\] cannot"),
        (partial(print, end=lock), (), r"print.keywords\['end'\] cannot"),
        (None, (), "fn=None must be a function"),  # type: ignore[list-item]
        (print, 5, r"args=5 must be a tuple of the arguments of print: write args=\(5,\)"),  # type: ignore[list-item]
    ]


def test_what_cannot_be_sent_is_named(launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable, and why; nothing is started, and cloudpickle is left as it was."""
    for fn, args, told in unsendable():
        with pytest.raises(popdist.LaunchError, match=told):
            launch(fn, args)
    assert cloudpickle.list_registry_pickle_by_value() == set()
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(popdist.LaunchError, match=r"not installed: pip install 'poprun\[launch\]'"):
        launch(print)
