"""The `poprun` program: words in, an exit code out, and for every mistake one message.

Until Ctrl-C ends poprun as any command, nothing is imported that Python has not loaded at its start: an import is
where Python shows a traceback for it, or loses it.
"""

import _signal  # type: ignore[import-not-found]  # signal of the standard library stands on it, and loads more
import errno
import os
import sys

BROKEN_PIPE = 141


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
    """Run poprun with ``words``, without its name; returns the exit code.

    It is the job's; 2 for a mistake of the user's, or the error's own; 141 when nobody reads what poprun prints.
    """
    from poprun.errors import PoprunError  # noqa: PLC0415 - Ctrl-C is heard before this import
    from poprun.text.screen import abandon_stdout, write_any_letter  # noqa: PLC0415 - as above

    try:
        _open_closed_streams()
        write_any_letter()
        from poprun.command import run  # noqa: PLC0415 - as above

        return run(words)
    except PoprunError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        abandon_stdout()
        return BROKEN_PIPE
    except OSError as error:
        abandon_stdout()
        return _fail_of_system(error)


def _end_at_interrupt() -> None:
    """Let Ctrl-C end poprun like any command, with 130 in a shell, until a job has to be ended in order.

    Python's own handler raises an exception, which is lost when it is raised in a callback of an import.
    """
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


def _fail(message: str, exit_code: int) -> int:
    if sys.stderr is not None:
        from poprun.text.screen import log  # noqa: PLC0415 - as in run_command

        log(f"error: {message}")
    return exit_code


def _fail_of_system(error: OSError) -> int:
    """Report an error of the system: what there is too much of, or the file that it is about."""
    from poprun.errors import SHORTAGES, LaunchError, OutputError, PoprunError, describe_error  # noqa: PLC0415 - as in run_command  # noqa: PLC0415 - as in run_command

    if error.errno in SHORTAGES:
        return _fail(describe_error(error.errno), LaunchError.exit_code)
    if not error.filename and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        return _fail(f"standard output cannot be written: {error.strerror}", OutputError.exit_code)
    what = describe_error(error.errno) if error.errno else str(error)
    return _fail(f"{error.filename}: {what}" if error.filename else what, PoprunError.exit_code)


if __name__ == "__main__":
    main()
