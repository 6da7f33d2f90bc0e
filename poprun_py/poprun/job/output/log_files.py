"""The logs of the programs' output: one file for each stream of each instance, with exactly the bytes written."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from popdist.ground.trusted_paths import FOLDER, open_below, opened_parent
from poprun.errors import LaunchError, PlanError
from poprun.plan.program_environment import check_folder_name

_NAMES: Final = {1: "out", 2: "err"}
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
"""Flags to open a log; O_NONBLOCK, because opening a pipe of another user would wait for a reader."""
_OUT_OF_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)


class LogFiles:
    """The open log files of one start of a job: for each instance, ``instance-<n>.out.log`` and ``….err.log``."""

    def __init__(
        self, log_dir: str, job_id: str, restart_count: int, num_instances: int, warn: Callable[[str], None]
    ) -> None:
        check_folder_name("--log-dir", job_id)
        self._folder = os.path.join(log_dir, job_id, str(restart_count))
        self._warn = warn
        self._num_cut = 0
        self._descriptors: dict[tuple[int, int], int] = {}
        try:
            with (
                opened_parent(f"{log_dir}/.", makes=True) as (folder, _),
                _opened_folder(folder, job_id) as job_folder,
                _opened_folder(job_folder, str(restart_count)) as attempt_folder,
            ):
                for instance in range(num_instances):
                    for stream in _NAMES:
                        name = os.path.basename(self._path(instance, stream))
                        self._descriptors[instance, stream] = open_below(attempt_folder, name, _APPEND)
        except OSError as error:
            self.close()
            if error.errno in _OUT_OF_DESCRIPTORS:
                raise LaunchError(
                    f"cannot open the logs of {num_instances} instances: {error.strerror}; "
                    "raise the limit with `ulimit -n`"
                ) from None
            raise PlanError(
                f"--log-dir {log_dir}: cannot make {error.filename} ({error.strerror}): "
                "name a directory that you may write to"
            ) from None

    def write(self, instance: int, stream: int, data: bytes) -> None:
        """Append ``data`` to the log of an instance's stdout (1) or stderr (2), unless writing failed before."""
        descriptor = self._descriptors.get((instance, stream))
        if descriptor is None:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError as error:
            del self._descriptors[instance, stream]
            self._note_cut(instance, stream, error)
            with suppress(OSError):
                os.close(descriptor)

    def close(self) -> None:
        """Close all log files; if write errors have cut several log files off, warn of their number."""
        for (instance, stream), descriptor in self._descriptors.items():
            try:
                os.close(descriptor)
            except OSError as error:  # a file system that writes late reports errors now
                self._note_cut(instance, stream, error)
        self._descriptors = {}
        if self._num_cut > 1:
            self._warn(f"warning: {self._num_cut} logs in {self._folder} are cut off")

    def _note_cut(self, instance: int, stream: int, error: OSError) -> None:
        self._num_cut += 1
        if self._num_cut == 1:
            path = self._path(instance, stream)
            self._warn(f"warning: {path} is cut off: {error.strerror}; the job goes on without it")

    def _path(self, instance: int, stream: int) -> str:
        return os.path.join(self._folder, f"instance-{instance}.{_NAMES[stream]}.log")


@contextmanager
def _opened_folder(above: int, name: str) -> Iterator[int]:
    """A context with the descriptor of the folder ``name`` in the folder ``above``; makes a missing folder."""
    descriptor = open_below(above, name, FOLDER, makes_folder=True)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
