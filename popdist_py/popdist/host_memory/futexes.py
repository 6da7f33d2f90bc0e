"""Sleeping until another process has news: futexes in shared memory.

Each rank has a bell, which it rings after news if somebody sleeps. Who wants to sleep says so first, then looks
once more, and then has the kernel put it to sleep unless the bell has been rung since. News and sleep may cross
unseen on their way through memory; therefore nobody sleeps for long without looking.
"""

import ctypes
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

BELL: Final = 9
SLEEPS: Final = 10
"""Words of a rank's page; see `popdist.host_memory.flags`."""

_SYSCALL_NUMBERS: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1
_EVERYBODY: Final = 2**31 - 1
_WORD_MASK: Final = 2**32 - 1
_LOW_HALF: Final = 0 if sys.byteorder == "little" else 4

_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bells:
    """The bells of a group.

    Args:
        pages: Every rank's page, in order, as 64-bit numbers.
        rank: This one.
    """

    def __init__(self, pages: Sequence[memoryview], rank: int) -> None:
        self._mine = pages[rank]
        self._others = tuple(page for other, page in enumerate(pages) if other != rank)
        self._pages = tuple(pages)
        self._number = _SYSCALL_NUMBERS.get(platform.machine())
        self._addresses = [_address(page) for page in pages]
        self._my_address = self._addresses[rank]

    def ring(self) -> None:
        """Wake those who sleep."""
        for words in self._others:
            if words[SLEEPS]:
                self._mine[BELL] = self._mine[BELL] + 1 & _WORD_MASK
                if self._number is not None:
                    _syscall(self._number, self._my_address, _WAKE, _EVERYBODY, None)
                return

    def sleep(self, rank: int, is_done: Callable[[], bool], most_seconds: float) -> None:
        """Sleep until ``rank`` rings, unless ``is_done()``; or for a while."""
        if self._number is None:
            time.sleep(most_seconds)
            return
        mine = self._mine
        mine[SLEEPS] = 1
        heard = self._pages[rank][BELL]
        if not is_done():
            limit = _Timespec(int(most_seconds), int(most_seconds % 1 * 1e9))
            _syscall(self._number, self._addresses[rank], _WAIT, heard, ctypes.addressof(limit))
        mine[SLEEPS] = 0


def _address(page: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(page)) + BELL * page.itemsize + _LOW_HALF
