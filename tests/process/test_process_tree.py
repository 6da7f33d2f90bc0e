"""Processes are found whatever session they moved to, and never mistaken for another."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from poprun.launch.process import process_tree
from poprun.launch.process.process_tree import ProcessKey, descendants, key_of, reap, send, terminate

FAMILY = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""

HEAR = """
import signal, sys
both = {signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, both)
print("ready", flush=True)
sys.stdin.read()
print(int(signal.sigwait(both)))
"""
"""Tells the lowest of the signals that it was sent."""


def test_a_descendant_in_another_session_is_found() -> None:
    """The walk goes by parents, not by sessions or groups."""
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        family = [key for key in descendants(os.getpid()) if key.pid in (parent.pid, grandchild)]

        assert [key.pid for key in family] == [parent.pid, grandchild]
        assert [key.pid for key in descendants(parent.pid)] == [grandchild]
        send(reversed(family), signal.SIGKILL)

    assert parent.returncode == -signal.SIGKILL


def test_the_processes_of_others_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel tells a process's children: beside thousands of others an agent would do little else."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        pytest.skip("this kernel does not tell children: CONFIG_PROC_CHILDREN")
    monkeypatch.setattr(process_tree, "_all_stats", lambda: pytest.fail("all processes are read"))
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        family = [key for key in process_tree.own_tree() if key.pid in (parent.pid, grandchild)]
        send(reversed(family), signal.SIGKILL)

    assert [key.pid for key in family] == [parent.pid, grandchild]


def test_a_process_with_a_used_id_is_left_alone() -> None:
    """An id that another process has now is not signalled: the start time tells them apart."""
    with subprocess.Popen([sys.executable, "-c", HEAR], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        key = key_of(process.pid)
        assert key is not None
        send([ProcessKey(key.pid, key.start_ticks - 1)], signal.SIGUSR1)
        send([key], signal.SIGUSR2)
        heard, _ = process.communicate()

    assert int(heard) == signal.SIGUSR2


def test_a_stopped_process_can_be_terminated() -> None:
    """It is continued, so that its SIGTERM arrives."""
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        terminate(key for key in [key_of(process.pid)] if key is not None)

    assert process.returncode == -signal.SIGTERM


def test_the_peak_of_a_childs_memory_is_its_own() -> None:
    """Not what the process that forked it held; one that held more tells it."""
    own_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    more_bytes = own_bytes + 2**27
    for text, least in (("pass", 0), (f"bytearray({more_bytes})", more_bytes)):
        pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", text], {})
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        (peak_bytes,) = [ended.peak_bytes for ended in reap() if ended.pid == pid]
        assert peak_bytes >= least
        assert bool(peak_bytes) == bool(least)
