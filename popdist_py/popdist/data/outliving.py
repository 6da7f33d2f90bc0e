"""The start of a loader's worker process, which outlives the signals by which a batch system asks a job to leave.

Slurm and others signal every process of a job. The program finishes its step, and reads on until it has saved, so
its workers must live until then: see `popdist.on_preemption`.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Collection
from functools import cache
from multiprocessing.util import Finalize
from typing import Any, Final

_BEFORE_CHILDREN_ARE_ENDED: Final = 100
"""The priority of what multiprocessing calls at the end of a process before it ends its daemons."""


class LoaderStart:
    """The function that a loader calls at the start of each worker; the program's own function is called by it."""

    def __init__(self, programs_own: Callable[[int], object] | None) -> None:
        self._programs_own = programs_own
        self._signals: tuple[int, ...] = ()
        self._is_ending: Any = None

    def prepare(self, signals: Collection[int], multiprocessing_context: Any) -> None:
        """Have workers that start from now on outlive ``signals``, as long as this process lives and goes on."""
        self._signals = tuple(signals)
        if self._signals:
            self._is_ending = _ending_event(os.getpid(), multiprocessing_context or multiprocessing)

    def __call__(self, number: int) -> None:
        """Prepare the worker ``number``, in its process."""
        parent, is_ending = os.getppid(), self._is_ending

        def outlive(_signum: int, _frame: object) -> None:
            if is_ending.is_set() or os.getppid() != parent:
                os._exit(0)

        for signum in self._signals:
            if signal.getsignal(signum) in (signal.SIG_DFL, None):
                signal.signal(signum, outlive)
        if self._programs_own is not None:
            self._programs_own(number)


@cache
def _ending_event(_pid: int, multiprocessing_context: Any) -> Any:
    """Return the event that tells the workers of the process ``_pid`` that this process ends.

    At the end of a process multiprocessing sends one SIGTERM to each daemon and waits for the daemon, so the event
    is set before. A forked child has finalizers, and an event, of its own.
    """
    event = multiprocessing_context.Event()
    Finalize(None, event.set, exitpriority=_BEFORE_CHILDREN_ARE_ENDED)
    return event
