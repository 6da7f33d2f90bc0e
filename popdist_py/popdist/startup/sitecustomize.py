"""The code that every Python program of a poprun job runs at its start, with or without popdist.

poprun puts this folder first on the PYTHONPATH, where Python looks for a module of this name
(https://docs.python.org/3/library/site.html). Then this module imports the ``sitecustomize`` that would have been
imported without it, and removes itself from ``sys.path`` and ``sys.modules``. Errors here never prevent a
program's start. For Python 3.8 and later; imports little, because every Python that the program starts pays for
it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing takes longer than importing this module
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

PROGRESS_DESCRIPTOR = "POPDIST_PROGRESS_DESCRIPTOR"
"""The environment variable with the descriptor of the progress page, the memory that poprun reads."""

WORLD_SIZE = "WORLD_SIZE"
"""The environment variable with the number of instances; a single instance waits for no other instance."""

TRACE = "POPDIST_TRACE"
"""The environment variable with the settings of a recording of the program; absent if nothing is recorded."""

MPI_PREFIXES = ("PMI_", "PMIX_")
"""The prefixes of environment variables that only the launcher of an MPI runtime sets for a program."""

JAX_COORDINATOR = "POPDIST_JAX_COORDINATOR"
"""The environment variable with the address at which JAX's processes connect."""

FINALIZE = b"MPI_Finalize"
WAIT_AT, WAIT_FORMAT, CHANGES_ENDED_AT = 48, "=Qd96s96x", 256
"""Place of the program's wait on the page (number, time, name, no members), and of the last change counter."""

FIRST_OF_SIGNALS, LARGEST_CODE, LONG_BITS = 128, 255, 64


def begin() -> None:
    """Register poprun's functions in this process, unless another living process uses its memory for progress."""
    descriptor = os.environ.get(PROGRESS_DESCRIPTOR, "")
    if not descriptor.isdecimal():
        return
    load_module("startup", "stub_finder").begin()
    page, signals = int(descriptor), load_module("startup", "stack_signal")
    finder = load_module("startup", "after_import").AfterImport()
    if JAX_COORDINATOR in os.environ:
        finder.call("jax._src.clusters.cluster", lambda base: tell_jax(base, page, signals))
    if not signals.is_page(page):
        return
    holder = signals.announced_pid(page)
    if holder not in (0, os.getpid()) and signals.is_alive(holder):
        return
    signals.announce(page, signals.register(page))
    signals.watch_crashes(page)
    import atexit

    lone_training = (os.getpid(), page, signals)
    atexit.register(announce_lone_training, *lone_training)
    announce = lambda: announce_lone_training(*lone_training)  # noqa: E731 - importing functools takes time
    finder.call("torch", lambda _torch: load_module("startup", "phase_sampler").start(page, announce))
    if os.environ.get(WORLD_SIZE, "1") != "1":
        finder.call("torch", lambda _torch: serve_recorder(page, signals))
        finder.call("jax", lambda _jax: watch_ending(page))  # after JAX has registered its own functions at exit
    if any(name.startswith(MPI_PREFIXES) for name in os.environ):
        watch_ending(page)
    if TRACE in os.environ:  # last, because the function that is registered last at exit is called first
        sampler = load_module("startup", "phase_sampler")
        recording, pause = load_module("startup", "recording"), sampler.CollectorPause
        recording.begin(finder.call, lambda: read_recorder(page, signals), pause, sampler.used_device)


def load_module(*place: str) -> ModuleType:
    """Load a module of popdist by its path, without importing the package popdist."""
    from _frozen_importlib_external import SourceFileLoader

    name = "_".join(("popdist", *place))
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    loader = SourceFileLoader(name, os.path.join(folder, *place) + ".py")
    module = type(sys)(name)
    module.__file__ = loader.path
    loader.exec_module(module)
    return module


def tell_jax(clusters: ModuleType, page: int, signals: ModuleType) -> None:
    """Make JAX read its job from poprun's environment variables, and report to poprun that JAX is used."""

    def announce() -> None:
        if signals.is_page(page) and signals.announced_pid(page) == os.getpid():
            signals.announce_jax(page)

    load_module("startup", "jax_cluster").register(clusters, announce)


def serve_recorder(page: int, signals: ModuleType) -> None:
    """Let poprun ask for the collectives that torch has recorded; write the collectives if the program fails."""
    import atexit

    atexit.register(leave_gloo_time, os.getpid())  # registered first, so called last
    server = load_module("startup", "recorder_server")
    descriptor = server.start()
    if descriptor:
        signals.announce_recorder(page, descriptor)
        atexit.register(write_record, os.getpid(), page, signals, lambda: server.read_recorder(descriptor))


def leave_gloo_time(pid: int) -> None:
    """Wait 10 ms so that gloo's threads can end, because they abort a process that ends before these threads."""
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    if is_initialized is not None and os.getpid() == pid and is_initialized():
        import time

        time.sleep(0.01)


def read_recorder(page: int, signals: ModuleType) -> bytes:
    """Return the collectives that torch has recorded. Raise OSError if torch has no recorder."""
    descriptor = int.from_bytes(os.pread(page, signals.RECORDER_BYTES, signals.RECORDER_AT), sys.byteorder)
    record: bytes = load_module("startup", "recorder_server").read_recorder(descriptor)
    return record


def write_record(pid: int, page: int, signals: ModuleType, read: Callable[[], bytes]) -> None:
    """Write torch's recorded collectives to memory that poprun reads, if an exception has ended the program."""
    if os.getpid() != pid or not signals.is_page(page) or not has_ended_program(last_error()):
        return
    try:
        os.pwrite(page, read(), os.sysconf("SC_PAGE_SIZE"))
    except Exception:  # noqa: BLE001 - the program must end as without the record
        return


def last_error() -> BaseException | None:
    """Return the exception that Python printed last, which may have ended the program; otherwise None."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def announce_lone_training(pid: int, page: int, signals: ModuleType) -> None:
    """Write on the progress page (memory that poprun reads) that this program has trained a model alone, if
    nothing has connected the program to the programs of the other instances.
    """
    if os.getpid() != pid or not signals.is_page(page):
        return
    try:
        lone_training = load_module("startup", "lone_training")
        if lone_training.has_trained_alone(sys.modules, sys.argv, sys.excepthook, os.environ):
            signals.announce_lone_training(page)
    except Exception:  # noqa: BLE001 - with a torch that is built differently, nothing is announced
        return


class ExitCode:
    """A replacement for ``SystemExit.code``, which keeps the exit code with which Python ended the program.

    A SystemExit leaves no other trace, because Python reads its code, deletes it and calls the functions
    registered at exit.
    """

    def __init__(self) -> None:
        import gc

        # the code in a tuple, which is empty unless a SystemExit has ended the program
        self.last_words: tuple[object, ...] = ()
        self._original = SystemExit.__dict__["code"]
        # the dict behind the read-only view of the type; without it, only other exceptions than SystemExit are
        # seen
        referents = gc.get_referents(SystemExit.__dict__)
        self._attributes = referents[0] if referents and isinstance(referents[0], dict) else None
        names = ("_clear_internal_caches", "_clear_type_cache")  # of types' attributes; the first since 3.13
        self._clear = next((getattr(sys, name) for name in names if hasattr(sys, name)), None)

    def __get__(self, error: BaseException | None, kind: type[BaseException] | None = None) -> object:
        code = self._original.__get__(error, kind)
        if error is not None and sys._getframe().f_back is None:  # noqa: SLF001 - no Python code has called this method
            self.last_words = (code,)
        return code

    def __set__(self, error: BaseException, code: object) -> None:
        self._original.__set__(error, code)

    def __delete__(self, error: BaseException) -> None:
        self._original.__delete__(error)

    def begin(self) -> None:
        """Replace the attribute ``code`` of SystemExit by this object."""
        self._place(self)

    def end(self) -> None:
        """Restore the attribute ``code`` of SystemExit, before the interpreter deletes its types."""
        self._place(self._original)

    def _place(self, attribute: object) -> None:
        if self._attributes is not None and self._clear is not None:
            self._attributes["code"] = attribute
            self._clear()


def exit_with_exception(*status: object) -> None:
    """Raise SystemExit as an object, as sys.exit does since Python 3.12, because `ExitCode` sees only objects."""
    first = status[0] if status else None
    if isinstance(first, SystemExit):
        raise first
    raise SystemExit(*(first if isinstance(first, tuple) else status if first is not None else ()))


def watch_ending(page: int) -> None:
    """Make the program end at once after a failure, if the program is in an MPI job or uses JAX."""
    import atexit

    ending = SystemExit.__dict__["code"]
    if not isinstance(ending, ExitCode):
        ending = ExitCode()
        ending.begin()
    atexit.register(end_before_finalize, os.getpid(), page, ending)  # registered first, so called last
    if sys.version_info < (3, 12):
        exit_with_exception.__name__ = exit_with_exception.__qualname__ = "exit"
        exit_with_exception.__doc__ = sys.exit.__doc__
        sys.exit = exit_with_exception  # type: ignore[assignment]


def end_before_finalize(pid: int, page: int, ending: ExitCode) -> None:
    """End a failed program before MPI_Finalize or JAX's shutdown, where the program would wait for others.

    This function runs after the functions that the program itself has registered, so that their output is printed.
    """
    ending.end()
    mpi = sys.modules.get("mpi4py.MPI")
    is_in_mpi = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    if os.getpid() != pid or not (is_in_mpi or is_in_jax_job()):
        return
    error = last_error()
    status = exit_status(ending.last_words[0]) if ending.last_words else int(has_ended_program(error))
    if status == 0:
        if is_in_mpi:
            announce_finalize(page)
        return
    flush()
    if type(error) is KeyboardInterrupt and not ending.last_words:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(pid, signal.SIGINT)
        status = FIRST_OF_SIGNALS + signal.SIGINT
    os._exit(status & LARGEST_CODE)


def is_in_jax_job() -> bool:
    """Whether JAX has connected this process to other processes."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return getattr(state, "client", None) is not None


def exit_status(code: object) -> int:
    """Return the exit code of a process that Python ends with the ``code`` of a SystemExit."""
    if code is None:
        return 0
    if not isinstance(code, int):
        return 1
    return code & 0xFFFFFFFF if code.bit_length() < LONG_BITS else LARGEST_CODE


def has_ended_program(error: BaseException | None) -> bool:
    """Whether the exception ``error`` came out of the main module, and so has ended the program."""
    if error is None or error.__traceback__ is None:
        return False
    frame = error.__traceback__.tb_frame
    return frame.f_back is None and frame.f_globals.get("__name__") in ("__main__", "runpy")


def flush() -> None:
    """Flush the output buffers of Python's streams and of the C library."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    try:
        import ctypes

        ctypes.CDLL(None).fflush(None)
    except (ImportError, OSError, AttributeError):
        return


def announce_finalize(page: int) -> None:
    """Write on the progress page (memory that poprun reads) that the program waits in MPI_Finalize."""
    import struct
    import time

    num_changes, num_waits = (_number_at(page, place) for place in (CHANGES_ENDED_AT, WAIT_AT))
    changed = struct.pack("=Q", num_changes + 1)
    os.pwrite(page, changed, CHANGES_ENDED_AT)
    os.pwrite(page, struct.pack(WAIT_FORMAT, num_waits + 1, time.monotonic(), FINALIZE), WAIT_AT)
    os.pwrite(page, changed, 0)


def _number_at(page: int, place: int) -> int:
    return int.from_bytes(os.pread(page, 8, place), sys.byteorder)


if __name__ == "sitecustomize":
    try:  # noqa: SIM105 - contextlib is not loaded yet, and its import takes time
        begin()
    except Exception:  # noqa: BLE001, S110 - a program must start as without this module
        pass
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(__file__)]
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")  # if there is none, site expects the ImportError
