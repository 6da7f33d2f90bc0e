"""Which descriptors each program gets as its standard streams, and what becomes of what it writes to them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poprun.errors import LaunchError, PlanError
from poprun.job.orders import JobIdentity
from poprun.plan.plan import LaunchPlan
from poprun.text.screen import say

if TYPE_CHECKING:
    from poprun.job.output.bars import BottomRow
    from poprun.job.output.display import Display
    from poprun.job.output.folding import Folder
    from poprun.job.output.log_files import LogFiles

_STDIN, _STDOUT, _STDERR = 0, 1, 2
_NAMES = {_STDOUT: "stdout", _STDERR: "stderr"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One stream of one program that poprun reads.

    Attributes:
        descriptor: The reading end of its pipe.
        instance: Whose stream it is.
        target: Descriptor of poprun's own stream that it goes to: 1 or 2.
        is_shown: Whether its lines are written there at all; they are logged and remembered either way.
        is_raw: Whether its bytes are written there as they come, because nobody else writes and no tag is wanted.
    """

    descriptor: int
    instance: int
    target: int
    is_shown: bool
    is_raw: bool


class StreamPlan:
    """The streams of all programs of one attempt of a job, and the logs of them.

    One instance without tags and logs inherits poprun's own streams, so debuggers and progress bars work as they
    do without poprun. Others get pipes; instance 0 reads poprun's standard input, the others read nothing.

    Attributes:
        sources: What is to be read, of the instances that were opened.
        fed: Socket to which poprun's standard input is to be sent; None where instance 0 reads it itself.
        logs: Where the output is kept, or None.

    Raises:
        PlanError: If there are to be logs and they cannot be made; a job that is started again goes on without.
        LaunchError: If poprun may not open as many files.
    """

    def __init__(self, plan: LaunchPlan, environ: Mapping[str, str], identity: JobIdentity) -> None:
        self._plan = plan
        self._has_colours = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._null = os.open(os.devnull, os.O_RDWR)
        self.sources: list[Source] = []
        self.fed: int | None = None
        self.logs = _open_logs(plan, identity)

    @property
    def is_inherited(self) -> bool:
        """Whether the program writes to poprun's own streams."""
        return self._is_raw and self.logs is None and not self._plan.output.has_monitor

    @property
    def _is_raw(self) -> bool:
        return self._plan.num_instances == 1 and not self._plan.is_tagged

    def open(self, instance: int, sockets: Mapping[int, int]) -> list[int]:
        """The three descriptors for ``instance``; :meth:`close` them once they have been passed on.

        An instance of a job of several hosts has connected ``sockets``, by the streams' numbers, and needs none.
        """
        if sockets:
            self.fed = sockets.get(_STDIN, self.fed)
            for target in sockets.keys() - {_STDIN}:
                self._read_from(sockets[target], instance, target)
            return []
        stdin = _STDIN if instance == 0 else self._null
        if self.is_inherited:
            return [stdin, _STDOUT, _STDERR]
        return [stdin, self._open_pipe(instance, _STDOUT), self._open_pipe(instance, _STDERR)]

    def close(self, streams: list[int]) -> None:
        """Close what :meth:`open` opened."""
        for descriptor in streams:
            if descriptor > _STDERR and descriptor != self._null:
                os.close(descriptor)

    def displays(self, on_closed: Callable[[], None]) -> "dict[int, Display]":
        """Where the lines of each stream are shown; ``on_closed`` is called when nobody reads them any more."""
        rows: dict[int, BottomRow] = {}
        return {target: self._display(target, rows, on_closed) for target in _NAMES}

    def _display(self, target: int, rows: "dict[int, BottomRow]", on_closed: Callable[[], None]) -> "Display":
        from poprun.job.output.display import Display, Outlet  # noqa: PLC0415 - loaded with the relay
        from poprun.job.output.lines import Tags  # noqa: PLC0415 - as above

        is_terminal = os.isatty(target)
        tags = Tags(
            self._plan,
            _NAMES[target],
            is_terminal=is_terminal,
            is_coloured=is_terminal and self._has_colours,
        )
        row = _bottom_row(target, rows) if is_terminal else None
        return Display(_NAMES[target], Outlet(target, on_closed), tags, row, self._folder())

    def _folder(self) -> "Folder | None":
        if not self._plan.output.is_folded:
            return None
        from poprun.job.output.folding import Folder  # noqa: PLC0415 - few jobs fold

        return Folder(filter(self._is_shown, range(self._plan.num_instances)))

    def _is_shown(self, instance: int) -> bool:
        shown = self._plan.output.shown_instances
        return not self._plan.output.has_monitor and (shown is None or instance in shown)

    def _open_pipe(self, instance: int, target: int) -> int:
        try:
            reader, writer = os.pipe()
        except OSError as error:
            raise LaunchError(
                f"cannot open the output of instance {instance}: {error.strerror}; "
                "raise the limit with `ulimit -n`"
            ) from None
        self._read_from(reader, instance, target)
        return writer

    def _read_from(self, descriptor: int, instance: int, target: int) -> None:
        is_shown = self._is_shown(instance)
        self.sources.append(
            Source(
                descriptor=descriptor,
                instance=instance,
                target=target,
                is_shown=is_shown,
                is_raw=is_shown and self._is_raw,
            )
        )


def _bottom_row(terminal: int, rows: "dict[int, BottomRow]") -> "BottomRow":
    """The bottom row of a terminal, which two streams may share."""
    from poprun.job.output import bars  # noqa: PLC0415 - in a batch job there is no terminal

    return rows.setdefault(os.fstat(terminal).st_rdev, bars.BottomRow(lambda: _columns(terminal)))


def _columns(terminal: int) -> int:
    try:
        return os.get_terminal_size(terminal).columns
    except OSError:  # the terminal has gone
        return 0


def _open_logs(plan: LaunchPlan, identity: JobIdentity) -> "LogFiles | None":
    if plan.output.log_dir is None:
        return None
    from poprun.job.output.log_files import LogFiles  # noqa: PLC0415 - few jobs keep logs

    log_dir = os.path.join(plan.working_directory, plan.output.log_dir)
    try:
        return LogFiles(log_dir, identity.job_id, identity.restart_count, plan.num_instances, say)
    except PlanError as error:
        if identity.restart_count == 0:
            raise
        say(f"warning: {error}; the job goes on without logs")
        return None
