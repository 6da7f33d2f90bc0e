"""The launcher's processes: mpiexec, or one shim for each instance; and the shims that it may lose.

A shim that is killed before its agent has reported leaves no trace on the control socket, and Hydra goes on
waiting for it. So while a job starts, the shims below the launcher are looked for.
"""

import math
import os
import selectors
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from poprun.errors import LaunchError
from poprun.launch.launchers import SHIM_WORDS, LaunchCommand
from poprun.process.spawn import ProcessStart, start_process
from poprun.process.tree import descendants, reap, words_of

_INTERVAL_SECONDS: Final = 0.2

_READ_BYTES = 64 * 1024
_KEPT_BYTES = 16 * 1024
_JOB_PREFIXES = ("PMI_", "PMIX_", "PRTE_", "OMPI_COMM_", "HYDI_", "MPI_LOCAL")
_SETTINGS_MARK = "_MCA_"


class StartWatch:
    """The watch on the shims while a job starts: those that were seen, and those that are gone.

    It looks now and then: a start that takes the usual moment is over before the first look.

    Attributes:
        has_runtime: Whether an MPI runtime starts all shims, on this machine; else there is nothing to see.
        has_lost_one: Whether a shim, or an agent, was gone before it had reported.
        idle_seconds: For how long there has been no shim that may still report.
    """

    def __init__(self, now_seconds: float, *, has_runtime: bool = True) -> None:
        self.has_runtime = has_runtime
        self._next_seconds = now_seconds + _INTERVAL_SECONDS
        self._seen: set[int] = set()
        self._idle_since_seconds = math.inf
        self.has_lost_one = False
        self.idle_seconds = 0.0

    def look(self, roots: Iterable[int], reported: set[int], now_seconds: float) -> None:
        """Look below the launcher's processes, if it is time to; agents and shims that have reported are known."""
        if self.has_runtime and now_seconds >= self._next_seconds:
            self._next_seconds = now_seconds + _INTERVAL_SECONDS
            below = {key.pid for root in roots for key in descendants(root)}
            living = {pid for pid in below if words_of(pid) == list(SHIM_WORDS)}
            self.note(living, reported, now_seconds)

    def note(self, living: set[int], reported: set[int], now_seconds: float) -> None:
        """Take note of the shims, and of the agents that have not left their shim's session, that live now."""
        self.has_lost_one = self.has_lost_one or bool(self._seen - living - reported)
        self._seen |= living
        self._idle_since_seconds = math.inf if living - reported else min(self._idle_since_seconds, now_seconds)
        self.idle_seconds = max(0.0, now_seconds - self._idle_since_seconds)


class LauncherProcesses:
    """The processes that poprun itself has started, and the last of what they printed."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._running: set[int] = set()
        self._output = b""
        self._was_asked = False
        self.exit_code: int | None = None
        """Exit code of the first one that failed, negative for a signal; 0 when none has, None while all run."""

    def start(self, commands: Iterable[LaunchCommand], environ: Mapping[str, str], working_directory: str) -> None:
        """Start every command in the working directory, to which the user's words for the runtime may refer.

        Raises:
            LaunchError: If one cannot be executed.
        """
        inherited = {name: value for name, value in environ.items() if not _is_of_another_job(name)}
        reader, writer = os.pipe()
        null = os.open(os.devnull, os.O_RDONLY)
        for command in commands:
            start = ProcessStart(
                words=command.words,
                working_directory=working_directory,
                environment={**inherited, **command.environment},
                streams=(null, writer, writer),
                death_signal=command.death_signal,
            )
            try:
                self._running.add(start_process(start))
            except OSError as error:
                verb = "enter" if error.filename == working_directory else "run"
                raise LaunchError(f"cannot {verb} {error.filename}: {error.strerror}") from None
        os.close(null)
        os.close(writer)
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._read(reader))

    @property
    def running(self) -> frozenset[int]:
        """The process ids of those that run."""
        return frozenset(self._running)

    @property
    def has_ended(self) -> bool:
        """Whether none of them runs any more."""
        return not self._running

    @property
    def has_failed(self) -> bool:
        """Whether one of them has failed."""
        return bool(self.exit_code)

    @property
    def output(self) -> list[str]:
        """The last lines that they printed."""
        return self._output.decode(errors="replace").splitlines()

    def reap(self) -> None:
        """Reap every child that has ended, adopted ones too."""
        for ended in reap():
            if ended.pid in self._running:
                self._running.remove(ended.pid)
                self.exit_code = self.exit_code or (0 if self._was_asked else ended.code)

    def end(self, signum: int) -> None:
        """Send a signal to those that still run; how they then end is no failure."""
        self._was_asked = True
        for pid in self._running:
            os.kill(pid, signum)

    def _read(self, reader: int) -> Iterator[tuple[int, dict[str, Any]]]:
        data = os.read(reader, _READ_BYTES)
        self._output = (self._output + data)[-_KEPT_BYTES:]
        if not data:
            self._selector.unregister(reader)
            os.close(reader)
        yield from ()


def _is_of_another_job(name: str) -> bool:
    """Whether a variable tells of an MPI job around this one, which the runtime would then join."""
    return name.startswith(_JOB_PREFIXES) and _SETTINGS_MARK not in name
