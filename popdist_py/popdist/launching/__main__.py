"""The program that each instance of `popdist.launch` runs: ``python -m popdist.launching FOLDER``.

The program calls the function, and writes the result or the exception of the function into the folder.
"""

import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

from popdist.ground.trusted_paths import opened_own_folder
from popdist.job.context import instance_index
from popdist.launching.sent_values import Outcome, load_call, name_of, outcome_path, pickle_values

_HERE: Final = Path(__file__).parent


def call_function(folder: Path) -> None:
    """Call the function in ``folder`` on this instance, and write its result or exception to ``folder``."""
    instance = instance_index()
    try:
        with opened_own_folder(str(folder)):
            pass
    except OSError as error:
        sys.exit(
            f"popdist.launch: this host has no folder {folder} of yours, in which the function is "
            f"({error.strerror}): set TMPDIR to a folder that all hosts share, or start a script with poprun"
        )
    outcome_path(folder, instance).unlink(missing_ok=True)  # left by an attempt before a restart
    try:
        fn, args, kwargs = load_call(folder)
        value = fn(*args, **kwargs)
        outcome = Outcome(pickled=pickle_values((f"what {name_of(fn)} returned", value)))
    except Exception as error:
        users = _without_ours(error.__traceback__)
        traceback_text = "".join(traceback.format_exception(type(error), error, users))
        Outcome.of_error(error, traceback_text).save(folder, instance)
        _print_only(users)
        raise
    outcome.save(folder, instance)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback ``trace`` without its first frames, which are in the folder of this module."""
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == _HERE:
        trace = trace.tb_next
    return trace


def _print_only(users: TracebackType | None) -> None:
    """Let Python print the final exception with the traceback ``users`` only, as if a script had made the call."""
    print_error = sys.excepthook

    def print_users(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print_error(kind, error.with_traceback(users), users)
        error.with_traceback(trace)  # which tells the start-up hook that this exception has ended the program

    sys.excepthook = print_users


if __name__ == "__main__":
    call_function(Path(sys.argv[1]))
