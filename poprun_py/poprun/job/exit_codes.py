"""Exit codes in a shell's numbers and in words. Pure."""

import signal
from typing import Final

_EXIT_OF_SIGNAL: Final = 128
_TOLD_BY_SHELLS: Final = frozenset(
    {
        signal.SIGILL,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGKILL,
        signal.SIGSEGV,
        signal.SIGTERM,
        signal.SIGXCPU,
    }
)


def shell_code(code: int) -> int:
    """The code that a shell shows: 128 + n for signal n, given as -n."""
    return _EXIT_OF_SIGNAL - code if code < 0 else code


def signal_of(code: int) -> int | None:
    """The signal that ended a program, also one that a shell passed on as 128 + n; else None."""
    if code < 0:
        return -code
    return code - _EXIT_OF_SIGNAL if code - _EXIT_OF_SIGNAL in _TOLD_BY_SHELLS else None


def name_code(code: int) -> str:
    """An exit code in short: ``exit code 3``, ``SIGSEGV``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def describe_code(code: int) -> str:
    """An exit code with what it stands for: ``exit code 3``, ``SIGSEGV, segmentation fault``."""
    signum = signal_of(code)
    if signum is None:
        return name_code(code)
    if code >= 0:
        return f"{name_code(code)}, which stands for {name_code(-signum)}"
    meaning = signal.strsignal(signum)
    return f"{name_code(code)}, {meaning.lower()}" if meaning else name_code(code)
