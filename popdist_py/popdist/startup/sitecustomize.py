"""What poprun has every Python program do when it starts, whether or not it imports popdist.

poprun puts this folder first on the PYTHONPATH, where Python looks for a module of this name
(https://docs.python.org/3/library/site.html). Then the ``sitecustomize`` is imported that would have been without
it, and ``sys.path`` and ``sys.modules`` keep nothing of this one, which never keeps a program from starting. For
Python 3.8 and later; it imports little, because every Python below the program pays for it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing takes longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

PROGRESS_DESCRIPTOR = "POPDIST_PROGRESS_DESCRIPTOR"
"""As the contract calls it, which a Python without popdist cannot import."""

WORLD_SIZE = "WORLD_SIZE"
"""Where the contract has the number of instances: a single one has nobody to wait for."""

TRACE = "POPDIST_TRACE"
"""Where the contract has what is to be recorded of the program, if anything is."""

MPI_PREFIXES = ("PMI_", "PMIX_")
"""How variables begin that the launcher of an MPI runtime gives a program, and no other launcher."""

JAX_COORDINATOR = "POPDIST_JAX_COORDINATOR"
"""Where the contract has the address at which JAX's processes connect."""

FINALIZE = b"MPI_Finalize"
WAIT_AT, WAIT_FORMAT, CHANGES_ENDED_AT = 48, "=Qd96s96x", 256
"""Where the page says what the program waits in: number, time, name, no members; and its end."""

FIRST_OF_SIGNALS, LARGEST_CODE, LONG_BITS = 128, 255, 64


def begin() -> None:
    """Register what poprun wants of this process, unless another living process has the page of progress."""
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
    announce = lambda: announce_lone_training(*lone_training)  # noqa: E731 - functools takes time to load
    finder.call("torch", lambda _torch: load_module("startup", "phase_sampler").start(page, announce))
    if os.environ.get(WORLD_SIZE, "1") != "1":
        finder.call("torch", lambda _torch: serve_recorder(page, signals))
        finder.call("jax", lambda _jax: watch_ending(page))  # once JAX has registered what it does at exit
    if any(name.startswith(MPI_PREFIXES) for name in os.environ):
        watch_ending(page)
    if TRACE in os.environ:  # after that: at exit, what is registered last is called first
        sampler = load_module("startup", "phase_sampler")
        recording, pause = load_module("startup", "recording"), sampler.CollectorPause
        recording.begin(finder.call, lambda: read_recorder(page, signals), pause, sampler.used_device)


def load_module(*place: str) -> ModuleType:
    """Load a module of popdist's by its path, without importing the package."""
    from _frozen_importlib_external import SourceFileLoader

    name = "_".join(("popdist", *place))
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    loader = SourceFileLoader(name, os.path.join(folder, *place) + ".py")
    module = type(sys)(name)
    module.__file__ = loader.path
    loader.exec_module(module)
    return module


def tell_jax(clusters: ModuleType, page: int, signals: ModuleType) -> None:
    """Have JAX ask poprun's variables which job it is in, and say so on the page if it is this process's."""

    def announce() -> None:
        if signals.is_page(page) and signals.announced_pid(page) == os.getpid():
            signals.announce_jax(page)

    load_module("startup", "jax_cluster").register(clusters, announce)


def serve_recorder(page: int, signals: ModuleType) -> None:
    """Have torch's recorder of collectives answer poprun, and tell of itself when the program fails."""
    import atexit

    atexit.register(leave_gloo_time, os.getpid())  # what is registered first is called last
    server = load_module("startup", "recorder_server")
    descriptor = server.start()
    if descriptor:
        signals.announce_recorder(page, descriptor)
        atexit.register(write_record, os.getpid(), page, signals, lambda: server.read_recorder(descriptor))


def leave_gloo_time(pid: int) -> None:
    """Wait 10 ms for the threads of gloo, which end a process by SIGABRT if they meet the end of Python."""
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    if is_initialized is not None and os.getpid() == pid and is_initialized():
        import time

        time.sleep(0.01)


def read_recorder(page: int, signals: ModuleType) -> bytes:
    """What torch's recorder holds; an OSError where there is none."""
    descriptor = int.from_bytes(os.pread(page, signals.RECORDER_BYTES, signals.RECORDER_AT), sys.byteorder)
    record: bytes = load_module("startup", "recorder_server").read_recorder(descriptor)
    return record


def write_record(pid: int, page: int, signals: ModuleType, read: Callable[[], bytes]) -> None:
    """Write behind the page of progress which collectives a program has called that an exception has ended."""
    if os.getpid() != pid or not signals.is_page(page) or not has_ended_program(last_error()):
        return
    try:
        os.pwrite(page, read(), os.sysconf("SC_PAGE_SIZE"))
    except Exception:  # noqa: BLE001 - the program ends as without it
        return


def last_error() -> BaseException | None:
    """The exception that Python printed last, which has ended the program if it came out of it."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def announce_lone_training(pid: int, page: int, signals: ModuleType) -> None:
    """Write on the page of progress that this program has trained alone, if it has."""
    if os.getpid() != pid or not signals.is_page(page):
        return
    try:
        lone_training = load_module("startup", "lone_training")
        if lone_training.has_trained_alone(sys.modules, sys.argv, sys.excepthook, os.environ):
            signals.announce_lone_training(page)
    except Exception:  # noqa: BLE001 - a torch that is built in another way says nothing
        return


class ExitCode:
    """The attribute ``code`` of SystemExit, which also keeps what Python read there when it ended the program.

    A SystemExit leaves no other trace: Python reads its code, forgets it and calls what is registered at exit.
    """

    def __init__(self) -> None:
        import gc

        # the code in a tuple, which is empty as long as no SystemExit has ended the program
        self.last_words: tuple[object, ...] = ()
        self._original = SystemExit.__dict__["code"]
        # the dict that the type shows read-only; without it only exceptions other than SystemExit are seen
        referents = gc.get_referents(SystemExit.__dict__)
        self._attributes = referents[0] if referents and isinstance(referents[0], dict) else None
        names = ("_clear_internal_caches", "_clear_type_cache")  # of types' attributes; the first from 3.13 on
        self._clear = next((getattr(sys, name) for name in names if hasattr(sys, name)), None)

    def __get__(self, error: BaseException | None, kind: type[BaseException] | None = None) -> object:
        code = self._original.__get__(error, kind)
        if error is not None and sys._getframe().f_back is None:  # noqa: SLF001 - called by no Python code
            self.last_words = (code,)
        return code

    def __set__(self, error: BaseException, code: object) -> None:
        self._original.__set__(error, code)

    def __delete__(self, error: BaseException) -> None:
        self._original.__delete__(error)

    def begin(self) -> None:
        """Replace the attribute ``code`` of SystemExit."""
        self._place(self)

    def end(self) -> None:
        """Restore the attribute, before the interpreter tears its types down."""
        self._place(self._original)

    def _place(self, attribute: object) -> None:
        if self._attributes is not None and self._clear is not None:
            self._attributes["code"] = attribute
            self._clear()


def exit_with_exception(*status: object) -> None:
    """Raise SystemExit as an object, as sys.exit does from Python 3.12 on: `ExitCode` sees no other."""
    first = status[0] if status else None
    if isinstance(first, SystemExit):
        raise first
    raise SystemExit(*(first if isinstance(first, tuple) else status if first is not None else ()))


def watch_ending(page: int) -> None:
    """Have the program end at once after a failure, when it is one of an MPI job or one that uses JAX."""
    import atexit

    ending = SystemExit.__dict__["code"]
    if not isinstance(ending, ExitCode):
        ending = ExitCode()
        ending.begin()
    atexit.register(end_before_finalize, os.getpid(), page, ending)  # what is registered first is called last
    if sys.version_info < (3, 12):
        exit_with_exception.__name__ = exit_with_exception.__qualname__ = "exit"
        exit_with_exception.__doc__ = sys.exit.__doc__
        sys.exit = exit_with_exception  # type: ignore[assignment]


def end_before_finalize(pid: int, page: int, ending: ExitCode) -> None:
    """End a failed program before MPI_Finalize or JAX's end, which would wait for those that wait for this one.

    It is called after what the program itself has registered, so what that prints of its end has been printed.
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
    """Whether JAX has connected this process to others."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return getattr(state, "client", None) is not None


def exit_status(code: object) -> int:
    """The exit status that Python gives the system for the ``code`` of a SystemExit."""
    if code is None:
        return 0
    if not isinstance(code, int):
        return 1
    return code & 0xFFFFFFFF if code.bit_length() < LONG_BITS else LARGEST_CODE


def has_ended_program(error: BaseException | None) -> bool:
    """Whether ``error``, which was printed last, came out of the main program; extensions print others, too."""
    if error is None or error.__traceback__ is None:
        return False
    frame = error.__traceback__.tb_frame
    return frame.f_back is None and frame.f_globals.get("__name__") in ("__main__", "runpy")


def flush() -> None:
    """Flush the buffers of Python's streams and of the C library."""
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
    """Write on the page of progress that the program waits in MPI_Finalize, as `popdist.ground.progress` would."""
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
    try:  # noqa: SIM105 - contextlib is not loaded yet, and need not be
        begin()
    except Exception:  # noqa: BLE001, S110 - a program starts as it would without this
        pass
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(__file__)]
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")  # that there is none is what site expects to hear
