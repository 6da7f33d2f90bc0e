"""What poprun has every Python program do when it starts, whether or not it imports popdist.

poprun puts this folder first on the PYTHONPATH of its programs, and Python imports a module of this name when it
starts (https://docs.python.org/3/library/site.html). It announces the signal at which the program shows its
stacks, and sees to it that a program which fails under MPI ends. Then it gives way to the ``sitecustomize`` that
would have been imported without it: nothing of it can be seen in ``sys.path`` or ``sys.modules`` afterwards. It
does this in the one process that poprun watches, in no helper, and never keeps a program from starting. For Python
3.8 and later; standard library only, and little of it: every Python below the program pays for it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing takes longer than all of this
if TYPE_CHECKING:
    from types import ModuleType

PROGRESS_DESCRIPTOR = "POPDIST_PROGRESS_DESCRIPTOR"
"""As the contract calls it, which a Python without popdist cannot import."""


def begin() -> None:
    """Take the page of progress and register what belongs to it, unless a living process has the page."""
    descriptor = os.environ.get(PROGRESS_DESCRIPTOR, "")
    if not descriptor.isdecimal():
        return
    page, signals = int(descriptor), load_stack_signal()
    if not signals.is_page(page):
        return
    holder = signals.announced_pid(page)
    if holder not in (0, os.getpid()) and signals.is_alive(holder):
        return
    signals.announce(page, signals.register(page))
    import atexit  # noqa: PLC0415 - only the program itself pays for it

    atexit.register(end_after_failure, os.getpid())  # what is registered first is called last


def load_stack_signal() -> ModuleType:
    """`popdist.stack_signal`, without the package around it."""
    from _frozen_importlib_external import SourceFileLoader  # noqa: PLC0415 - it is loaded already; importlib is not

    name = "popdist_stack_signal"
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    loader = SourceFileLoader(name, os.path.join(folder, "stack_signal.py"))
    module = type(sys)(name)
    loader.exec_module(module)
    return module


def end_after_failure(pid: int) -> None:
    """End a program at once that an exception has ended, when mpi4py would now wait for the other instances.

    Its MPI_Finalize waits for every instance, and those wait for this one. The traceback has been printed and
    everything else that was to be done at exit has been done.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if mpi is None or os.getpid() != pid or not has_ended_program(error):
        return
    if mpi.Is_initialized() and not mpi.Is_finalized():
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue
        os._exit(1)


def has_ended_program(error: BaseException | None) -> bool:
    """Whether ``error``, which was printed last, came out of the main program; extensions print others, too."""
    if not isinstance(error, Exception) or error.__traceback__ is None:
        return False
    frame = error.__traceback__.tb_frame
    return frame.f_back is None and frame.f_globals.get("__name__") in ("__main__", "runpy")


if __name__ == "sitecustomize":
    try:  # noqa: SIM105 - contextlib is not loaded yet, and need not be
        begin()
    except Exception:  # noqa: BLE001, S110 - a program starts as it would without this
        pass
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(__file__)]
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")  # that there is none is what site expects to hear
