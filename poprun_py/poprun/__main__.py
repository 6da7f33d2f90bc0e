"""The `poprun` program: words in, an exit code out, and for every mistake one message.

Until Ctrl-C ends poprun as any command, nothing is imported that Python has not loaded at its start: an import is
where Python shows a traceback for it, or loses it.
"""

import _signal  # type: ignore[import-not-found]  # signal of the standard library stands on it, and loads more
import os
import sys

_SOFTWARE = 70  # EX_SOFTWARE of sysexits.h, as of all that there is too little of


def main() -> None:
    """Run poprun with the words of this process and end it."""
    _end_at_interrupt()
    exit_code = run_command(sys.argv[1:])
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
    os._exit(exit_code)  # nothing is left to be torn down, and the interpreter would take a tenth of a short job


def run_command(words: list[str]) -> int:
    """Run poprun with ``words``, without its name; returns the exit code: the job's, or that of an error."""
    try:
        from poprun.text.screen import exit_code_of, log, write_any_letter
    except (MemoryError, SystemError):  # the second is Python's own, where an import finds no memory
        os.write(2, b"poprun: error: too little address space or memory: raise `ulimit -v`\n")
        return _SOFTWARE

    def run() -> int:
        _open_closed_streams()
        write_any_letter()
        from poprun.command import run

        return run(words)

    return exit_code_of(run, lambda message: log(f"error: {message}"))


def _end_at_interrupt() -> None:
    """Let Ctrl-C end poprun like any command, with 130 in a shell, until a job has to be ended in order."""
    # Python's own handler raises an exception, which is lost when it is raised in a callback of an import
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed, before another file gets its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.dup2(descriptor, number)
            if descriptor != number:
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode))


if __name__ == "__main__":
    main()
