"""The two calls of prctl(2) that Python does not offer."""

import os

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Adopt every descendant whose own parent dies, so that none escapes by losing its parent."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int) -> None:
    """Have the kernel send ``signum`` to this process when the *thread* that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def _prctl(option: int, argument: int) -> None:
    # Of ctypes the part that calls functions: the rest of it takes longer to load than a shim to start.
    try:
        from _ctypes import call_function, dlopen, dlsym  # noqa: PLC0415 - what forks shims needs it, a plan does not
    except ImportError:
        import ctypes  # noqa: PLC0415 - another Python than CPython

        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)
    else:
        this_program = dlopen(None, os.RTLD_NOW)  # type: ignore[arg-type] # dlopen(3) takes no name for it
        call_function(dlsym(this_program, "prctl"), (option, argument, 0, 0, 0))
