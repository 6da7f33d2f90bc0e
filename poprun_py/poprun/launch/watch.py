"""What an agent sees of its program once a second: what its tree uses, and what it says on its page of progress.

The page is a file in memory that the program inherits (`popdist.progress_page` says what stands there); the agent
passes its bytes on as they are. Walking the tree costs more than measuring it, so it is walked less often.
Standard library only: the agents run this in a bare interpreter.
"""

import os
import signal
import struct
import time
from typing import TYPE_CHECKING, Any

from poprun.launch.usage import measure
from poprun.messages.control import Message
from poprun.process.tree import ProcessKey, own_tree

if TYPE_CHECKING:
    from poprun.launch.stack_request import StackQuestion

_LOOK_SECONDS = 1.0
_LOOKS_PER_WALK = 5
_PAUSE_SECONDS = 7 * 24 * 3600.0
_PAGE_NAME = "poprun-progress"
_TEXT_AT = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """The looks at one program."""

    def __init__(self) -> None:
        self._page = -1
        self._page_bytes = 0
        self._announcement = (0, "")
        self._tree: list[ProcessKey] = []
        self._num_looks = 0
        self._next_seconds = 0.0

    def open_page(self, order: dict[str, Any]) -> int:
        """Make the page that a ``start`` order describes; its descriptor, for the program to inherit."""
        self._page_bytes = order["progress_bytes"]
        self._announcement = (order["announcement_at"], order["announcement_format"])
        self._page = os.memfd_create(_PAGE_NAME)
        os.ftruncate(self._page, _TEXT_AT)
        return self._page

    def begin(self) -> None:
        """The program runs: the first look is due when it has run for a moment."""
        self._next_seconds = time.monotonic() + _LOOK_SECONDS

    def heed(self, signum: int) -> None:
        """Pause while poprun stops the program: it does not read then, and looks would pile up on the way."""
        if signum == signal.SIGSTOP:
            self._next_seconds = time.monotonic() + _PAUSE_SECONDS
        elif signum == signal.SIGCONT:
            self._next_seconds = time.monotonic() + _LOOK_SECONDS

    def is_due(self) -> bool:
        """Whether it is time for a look."""
        return time.monotonic() >= self._next_seconds

    def patience_seconds(self) -> float:
        """How long until the next look."""
        return max(0.0, self._next_seconds - time.monotonic())

    def last_words(self) -> Message:
        """What the page says after the program's end, as an event."""
        return {"event": "stats", "progress": self._read_page()}

    def look(self) -> Message:
        """What there is to see, as an event."""
        self._next_seconds = time.monotonic() + _LOOK_SECONDS
        if self._num_looks % _LOOKS_PER_WALK == 0:
            self._tree = own_tree()
        self._num_looks += 1
        usage = measure(self._tree)
        return {
            "event": "stats",
            "memory_bytes": usage.memory_bytes,
            "cpu_seconds": usage.cpu_seconds,
            "num_processes": usage.num_processes,
            "progress": self._read_page(),
        }

    def ask_for_stacks(self) -> "StackQuestion":
        """Ask the program where it stands."""
        from poprun.launch.stack_request import Announcement, StackQuestion  # noqa: PLC0415 - most jobs are never asked

        at, form = self._announcement
        announced = struct.unpack(form, os.pread(self._page, struct.calcsize(form), at))
        return StackQuestion(self._page, _TEXT_AT, Announcement(*announced))

    def _read_page(self) -> str:
        return os.pread(self._page, self._page_bytes, 0).hex()
