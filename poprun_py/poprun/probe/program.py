"""The words of the user's program, made ready to execute.

A word with a slash is a path. Any other is looked for on PATH, as a shell does, and then in the working directory,
so that `poprun train.py` works; a Python file that cannot be executed by itself runs under poprun's own Python.
"""

import os
import shlex
import sys
from typing import Final

from poprun.errors import ProgramNotExecutableError, ProgramNotFoundError

_HEAD_BYTES: Final = 256
"""As much of a script as Linux reads for its ``#!`` line (execve(2))."""


def resolve_program(words: tuple[str, ...], working_directory: str, path: str) -> tuple[str, ...]:
    """The argv that runs ``words``, in ``working_directory``; its first word is an absolute path.

    ``path`` is in the form of ``PATH``. The error for what is not there names the nearest programs.
    """
    if not words:
        return ()
    program, *arguments = words
    if not program:
        raise ProgramNotFoundError("the name of the program is empty: poprun [OPTIONS] PROGRAM [ARGS]...")
    file = _find(program, working_directory, path)
    if file is None:
        raise ProgramNotFoundError(_not_found(program, working_directory, path))
    if os.path.isdir(file):
        raise ProgramNotExecutableError(f"{program} is a directory: give the program inside it")
    if file.endswith(".py") and not _runs_by_itself(file):
        return (sys.executable, program, *arguments)
    if not os.access(file, os.X_OK):
        raise ProgramNotExecutableError(
            f"{program} is not executable: make it so with chmod +x {shlex.quote(program)}, or name the program "
            f"that runs it, as in poprun python {shlex.quote(program)}"
        )
    _check_interpreter(program, file, working_directory)
    return (file, *arguments)


def program_on_another_machine(words: tuple[str, ...]) -> tuple[str, ...]:
    """The argv that runs ``words`` on a machine that poprun cannot see: a Python file runs under its Python."""
    return ("python", *words) if words and words[0].endswith(".py") else words


def _find(program: str, working_directory: str, path: str) -> str | None:
    here = os.path.join(working_directory, program.removeprefix("./"))
    if "/" in program:
        return here if os.path.exists(here) else None
    for folder in filter(None, path.split(os.pathsep)):
        file = os.path.join(working_directory, folder, program)
        if os.path.isfile(file) and os.access(file, os.X_OK):
            return file
    return here if program and os.path.exists(here) else None


def _runs_by_itself(file: str) -> bool:
    """Whether the system can execute a script: it has the permission and, as far as one can see, a ``#!`` line."""
    if not os.access(file, os.X_OK):
        return False
    try:
        with open(file, "rb") as script:
            return script.read(2) == b"#!"
    except OSError:
        return True


def _check_interpreter(program: str, file: str, working_directory: str) -> None:
    """Check that the interpreter in a script's ``#!`` line exists; execve(2) would name the script instead."""
    try:
        with open(file, "rb") as script:
            head = script.read(_HEAD_BYTES)
    except OSError:  # a program may be executed without being readable
        return
    line, ending, _ = head.removeprefix(b"#!").partition(b"\n")
    words = line.strip(b" \t").replace(b"\t", b" ").split(b" ")
    if not head.startswith(b"#!") or not ending or not words[0]:
        return
    interpreter = os.fsdecode(words[0])
    if os.path.exists(os.path.join(working_directory, interpreter)):
        return
    if interpreter.endswith("\r"):
        raise ProgramNotFoundError(
            f"{program} has lines that end as on Windows, so its interpreter would be {interpreter!r}: "
            f"mend it with sed -i 's/\\r$//' {shlex.quote(program)}"
        )
    raise ProgramNotFoundError(
        f"{program} is a script for {interpreter}, which is not there: change its first line, or name the program "
        f"that runs it, as in poprun python {shlex.quote(program)}"
    )


def _not_found(program: str, working_directory: str, path: str) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - only a mistake pays for it

    if "/" in program:
        folder = os.path.dirname(program.removeprefix("./"))
        names = {os.path.join(folder, name) for name in _names_in(os.path.join(working_directory, folder))}
        looked = f"there is no file {program}"
    else:
        folders = [working_directory, *filter(None, path.split(os.pathsep))]
        names = {name for folder in folders for name in _names_in(folder)}
        looked = f"there is no program {program} on PATH and no file of that name in {working_directory}"
    nearest = get_close_matches(program, sorted(names), n=3)
    return f"{looked}{'; nearest: ' + ', '.join(nearest) if nearest else ''}"


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
