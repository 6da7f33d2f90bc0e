"""The program `poprun`: it reads the command line, returns an exit code, and prints one message for an error.

Until ``main`` makes Ctrl-C end poprun at once, the module imports only what Python loads at its own start. During
an import, Ctrl-C would show a traceback or be lost.
"""

import _signal  # type: ignore[import-not-found]  # signal would load more modules
import gc
import os
import sys

_SOFTWARE = 70  # EX_SOFTWARE of sysexits.h, the exit code for every lack of memory


def main() -> None:
    """Run poprun with the arguments of this process, then end the process with poprun's exit code."""
    _end_at_interrupt()
    gc.disable()  # until the job runs: the collector would go through all modules again and again as they load
    exit_code = run_command(sys.argv[1:])
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        pass
    os._exit(exit_code)  # the interpreter's own exit would take a tenth of a short job's time


def run_command(words: list[str]) -> int:
    """Run poprun with the arguments ``words``; return the job's exit code, or the error's if poprun fails."""
    try:
        from poprun.text.screen import exit_code_of, log, write_any_letter
    except (MemoryError, SystemError):  # Python raises SystemError if an import finds no memory
        os.write(2, b"poprun: error: too little address space or memory: raise `ulimit -v`\n")
        return _SOFTWARE

    def run() -> int:
        _open_closed_streams()
        write_any_letter()
        from poprun.command import run

        return run(words)

    return exit_code_of(run, lambda message: log(f"error: {message}"))


def _end_at_interrupt() -> None:
    """Let Ctrl-C kill poprun at once, without a traceback; a job replaces this by a handler that ends the job."""
    # Python's own handler raises an exception, which is lost if a callback of an import raises the exception
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def _open_closed_streams() -> None:
    """Open /dev/null for each closed standard stream, so that no file opened later gets the stream's number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.dup2(descriptor, number)
            if descriptor != number:
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode))


if __name__ == "__main__":
    main()
