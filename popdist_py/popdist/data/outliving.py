"""The start of a loader's worker process, so that it survives the signals that ask a job to stop.

Slurm and other batch systems signal every process of a job. The program finishes its step and reads on until it
has saved, so the program's workers must live until then: see `popdist.on_preemption`.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Collection
from functools import cache
from multiprocessing.util import Finalize
from typing import Any, Final

_BEFORE_CHILDREN_ARE_ENDED: Final = 100
"""The exit priority of functions that multiprocessing calls before it ends its daemon processes."""


class LoaderStart:
    """A ``worker_init_fn`` for torch's DataLoader: workers survive signals, then the program's function runs."""

    def __init__(self, programs_own: Callable[[int], object] | None) -> None:
        self._programs_own = programs_own
        self._signals: tuple[int, ...] = ()
        self._is_ending: Any = None

    def prepare(self, signals: Collection[int], multiprocessing_context: Any) -> None:
        """Make workers that start later ignore ``signals``, which ask the job to stop, until this process ends."""
        self._signals = tuple(signals)
        if self._signals:
            self._is_ending = _ending_event(os.getpid(), multiprocessing_context or multiprocessing)

    def __call__(self, number: int) -> None:
        """Set the signal handlers of the worker process ``number``, and call the program's ``worker_init_fn``."""
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
    """Return an event that this process, whose ID is ``_pid``, sets at its end. Until this process sets the event,
    its DataLoader workers ignore the signals that ask the job to stop.

    At the end of a process multiprocessing sends one SIGTERM to each daemon and waits for the daemon, so the event
    is set before the SIGTERM. A forked child has its own finalizers and its own event.
    """
    event = multiprocessing_context.Event()
    Finalize(None, event.set, exitpriority=_BEFORE_CHILDREN_ARE_ENDED)
    return event
