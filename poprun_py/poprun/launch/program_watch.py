"""What an agent sees of its program: what its tree uses, its page of progress, and its stacks on request.

A Python program announces the signal at which it writes its stacks into the file of its page, behind the page
(`popdist.stack_signal`). Nothing else is ever sent that signal: it would end a program that does not handle it.
Standard library only: the agents run this in a bare interpreter.

The page is a file in memory that the program inherits (`popdist.progress` says what stands there); the agent
passes its bytes on as they are. Walking the tree costs more than measuring it, so it is walked less often.
Standard library only: the agents run this in a bare interpreter.
"""

import os
import signal
import struct
import time
from typing import Any, NamedTuple

from poprun.launch.process_view import describe_process, is_stopped, measure
from poprun.messages.control import Message
from poprun.process.tree import ProcessKey, catches, key_of, own_tree, send

LONGEST_SECONDS = 2.0
"""How long a program may take to write its stacks."""

_STILL_SECONDS = 0.1
_MOST_BYTES = 64 * 1024
_MOST_PROCESSES = 8


class Announcement(NamedTuple):
    """What the page says of who writes stacks.

    Attributes:
        pid: The process; 0 when there is none.
        signum: The signal at which it does.
    """

    pid: int
    signum: int


class StackQuestion:
    """One question to the program, from its signal to the answer.

    Args:
        page: Descriptor of the page's file, which the program has under the same number.
        text_at: Where in the file the text begins.
        announcement: What the page says.
    """

    def __init__(self, page: int, text_at: int, announcement: Announcement) -> None:
        self._page = page
        self._text_at = text_at
        self._deadline_seconds = time.monotonic() + LONGEST_SECONDS
        self._num_bytes = 0
        self._grown_at_seconds = 0.0
        self._is_asked = False
        key = _listener(page, announcement)
        if key is not None:
            os.ftruncate(page, text_at)
            os.lseek(page, text_at, os.SEEK_SET)  # the program's descriptor has the same offset
            send([key], announcement.signum)
            self._is_asked = True

    def answer(self) -> Message | None:
        """The event that answers; None as long as the program may still write."""
        text = b""
        if self._is_asked:
            if not self._is_complete(time.monotonic()):
                return None
            text = os.pread(self._page, _MOST_BYTES, self._text_at)
            os.ftruncate(self._page, self._text_at)
        processes = [] if text else _describe_tree()
        return {"event": "stacks", "text": text.decode(errors="replace"), "processes": processes}

    def _is_complete(self, now_seconds: float) -> bool:
        num_bytes = os.fstat(self._page).st_size - self._text_at
        if num_bytes > self._num_bytes:
            self._num_bytes, self._grown_at_seconds = num_bytes, now_seconds
        is_still = num_bytes > 0 and now_seconds >= self._grown_at_seconds + _STILL_SECONDS
        return is_still or now_seconds >= self._deadline_seconds


def _describe_tree() -> list[str]:
    """The program's processes, parents first."""
    tree = own_tree()
    lines = [describe_process(key.pid) for key in tree[:_MOST_PROCESSES]]
    num_left = len(tree) - len(lines)
    return [*lines, f"and {num_left} more processes"] if num_left else lines


def _listener(page: int, announcement: Announcement) -> ProcessKey | None:
    """The process to ask: ours, not stopped, listening, and with the page still under the number it was given."""
    pid, signum = announcement
    key = key_of(pid) if pid else None
    if key is None or key not in own_tree() or not catches(pid, signum) or is_stopped(pid):
        return None
    try:
        there, here = os.stat(f"/proc/{pid}/fd/{page}"), os.fstat(page)
    except OSError:
        return None
    return key if os.path.samestat(there, here) else None


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
        at, form = self._announcement
        announced = struct.unpack(form, os.pread(self._page, struct.calcsize(form), at))
        return StackQuestion(self._page, _TEXT_AT, Announcement(*announced))

    def _read_page(self) -> str:
        return os.pread(self._page, self._page_bytes, 0).hex()
