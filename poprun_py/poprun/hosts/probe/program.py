"""The user's program: the command line that can be executed, and the analysis of its Python file and Python.

A program with a slash is a path. Any other program is looked up on PATH, as a shell does, and then in the working
directory, so that `poprun train.py` works. A Python file that cannot be executed runs under poprun's own Python.
"""

import ast
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Final

from poprun.errors import PoprunError, ProgramNotExecutableError, ProgramNotFoundError, UsageError
from poprun.launch.process.spawn import answer_of

_INTERPRETER: Final = r"python[\d.]*|(?P<shell>(?:ba|da|k|z)?sh)"
_LONG_WITH_VALUE: Final = ("--rcfile", "--init-file", "--check-hash-based-pycs")
_ASSIGNMENT: Final = r"[A-Za-z_]\w*="

_HEAD_BYTES: Final = 256  # number of bytes in which Linux looks for the ``#!`` line of a script (execve(2))


def resolve_program(words: tuple[str, ...], working_directory: str, path: str) -> tuple[str, ...]:
    """Return the argv that executes the command line ``words``. Raises PoprunError if that is impossible."""
    if not words:
        return ()
    program, *arguments = words
    if not program:
        raise ProgramNotFoundError("the name of the program is empty: poprun [OPTIONS] PROGRAM [ARGS]...")
    file = _find(program, working_directory, path)
    if file is None:
        raise _not_found(words, working_directory, path)
    if os.path.isdir(file):
        raise ProgramNotExecutableError(f"{program} is a directory: give the program inside it")
    if file.endswith(".py") and not _runs_by_itself(file):
        *on_path, _ = _places(program, working_directory, path)
        return (sys.executable, file if file in on_path else program, *arguments)
    if not os.access(file, os.X_OK):
        raise ProgramNotExecutableError(
            f"{program} is not executable: make it so with chmod +x {shlex.quote(program)}, or name the program "
            f"that runs it, as in poprun python {shlex.quote(program)}"
        )
    _check_interpreter(program, file, working_directory)
    return (file, *arguments)


def program_on_another_machine(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the argv for a host that poprun cannot inspect: ``words``, with ``python`` before a .py file."""
    return ("python", *words) if words and words[0].endswith(".py") else words


def script_of(program: Sequence[str]) -> str:
    """Return the script that ``program`` runs with Python or a shell; ``-`` for standard input, "" for none."""
    if not program or not (interpreter := re.fullmatch(_INTERPRETER, os.path.basename(program[0]))):
        return ""
    words = iter(program[1:])
    for word in words:
        if word == "-" or (word == "-s" and interpreter["shell"]):
            return "-"
        if not word.startswith("-"):
            return word
        if word in ("--help", "--version"):
            return ""
        no_script, with_value = ("c", "[oO]") if interpreter["shell"] else ("cmhV?", "[WX]")
        letters, *values = re.split(with_value, word, maxsplit=1)
        if not word.startswith("--") and set(no_script).intersection(letters):
            return ""
        if values == [""] or word in _LONG_WITH_VALUE:  # otherwise the value is in the same word as its letter
            next(words, None)
    return "-"


def _places(program: str, working_directory: str, path: str) -> list[str]:
    """Return the paths at which the file ``program`` may be, in the order in which poprun searches."""
    in_working_directory = os.path.join(working_directory, program.removeprefix("./"))
    folders = [] if "/" in program else filter(None, path.split(os.pathsep))
    return [*(os.path.join(working_directory, folder, program) for folder in folders), in_working_directory]


def _find(program: str, working_directory: str, path: str) -> str | None:
    *on_path, in_working_directory = _places(program, working_directory, path)
    found = (file for file in on_path if os.path.isfile(file) and os.access(file, os.X_OK))
    return next(found, in_working_directory if os.path.exists(in_working_directory) else None)


def _closed_folder(file: str) -> str:
    """Return the folder above ``file`` that this user may not enter; an empty text if there is none."""
    try:
        os.stat(file)
    except PermissionError:
        names = os.path.realpath(file).split("/")
        folders = ("/".join(names[:number]) or "/" for number in range(1, len(names)))
        return next((folder for folder in folders if not os.access(folder, os.X_OK)), "")
    except OSError:  # the file does not exist
        pass
    return ""


def _runs_by_itself(file: str) -> bool:
    """Whether a script is executable and begins with ``#!``; if the script is unreadable, suppose that it does."""
    if not os.access(file, os.X_OK):
        return False
    try:
        with open(file, "rb") as script:
            return script.read(2) == b"#!"
    except OSError:
        return True


def _check_interpreter(program: str, file: str, working_directory: str) -> None:
    """Check that the interpreter in a script's ``#!`` line exists; execve(2)'s own error names only the script."""
    try:
        with open(file, "rb") as script:
            head = script.read(_HEAD_BYTES)
    except OSError:  # a program can be executable but not readable
        return
    line, ending, _ = head.removeprefix(b"#!").partition(b"\n")
    words = line.strip(b" \t").replace(b"\t", b" ").split(b" ")
    if not head.startswith(b"#!") or not ending or not words[0]:
        return
    interpreter = os.fsdecode(words[0])
    place = os.path.join(working_directory, interpreter)
    if os.path.exists(place):
        return
    if folder := _closed_folder(place):
        raise _unreachable(f"{interpreter}, which {program} is a script for", folder)
    if interpreter.endswith("\r"):
        raise ProgramNotFoundError(
            f"{program} has lines that end as on Windows, so its interpreter would be {interpreter!r}: "
            f"mend it with sed -i 's/\\r$//' {shlex.quote(program)}"
        )
    raise ProgramNotFoundError(
        f"{program} is a script for {interpreter}, which is not there: change its first line, or name the program "
        f"that runs it, as in poprun python {shlex.quote(program)}"
    )


def _unreachable(what: str, folder: str) -> ProgramNotExecutableError:
    return ProgramNotExecutableError(
        f"you may not reach {what}: the folder {folder} is closed to you: have it opened, as with "
        f"chmod a+x {shlex.quote(folder)}, or name a program that you may reach"
    )


def _not_found(words: tuple[str, ...], working_directory: str, path: str) -> PoprunError:
    """Return the error, with advice, for a program that does not exist or that this user may not reach."""
    from difflib import get_close_matches

    program = words[0]
    if re.match(_ASSIGNMENT, program):
        return UsageError(f"{program} is no program: write poprun [OPTIONS] env {shlex.join(words)}")
    closed = ""
    for file in _places(program, working_directory, path):
        folder = _closed_folder(file)
        if folder and ("/" in program or os.path.lexists(file)):
            return _unreachable(file, folder)
        closed = closed or (f"; {os.path.dirname(file)} on it is closed to you" if folder else "")
    if program.split()[1:]:
        return UsageError(
            f"there is no program of the name {program!r}, with blanks: write its words without quotes around "
            f"them all: poprun [OPTIONS] {' '.join((program, *words[1:]))}"
        )
    if "/" in program:
        folder = os.path.dirname(program.removeprefix("./"))
        names = {os.path.join(folder, name) for name in _names_in(os.path.join(working_directory, folder))}
        looked = f"there is no file {program}"
    else:
        folders = [working_directory, *filter(None, path.split(os.pathsep))]
        names = {name for folder in folders for name in _names_in(folder)}
        looked = f"there is no program {program} on PATH and no file of that name in {working_directory}{closed}"
    nearest = get_close_matches(program, sorted(names), n=3)
    return ProgramNotFoundError(f"{looked}{'; nearest: ' + ', '.join(nearest) if nearest else ''}")


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


_USED: Final = "LT_CLI_USED"
_DEVICES: Final = "LT_DEVICES"
_NODES: Final = "LT_NUM_NODES"
_ACCELERATOR: Final = "LT_ACCELERATOR"
_MOST_LETTERS: Final = 1_000_000
_POSITIONS: Final = {"accelerator": 0, "devices": 2, "num_nodes": 3}
"""The positions of Fabric's arguments if they are given without names."""

_ASK_SECONDS: Final = 10.0
_MISSING: Final = r"ModuleNotFoundError: No module named '(\w+)'"
_PYTHON: Final = r"python[\d.]*$"
_IMPORT: Final = r"^\s*(?:import|from)\s+(torch|popdist)\b"


def fabric_variables(
    program: Sequence[str],
    working_directory: str,
    counts: tuple[int, int],
    user: Mapping[str, str],
    *,
    on_cpu: bool,
) -> dict[str, str]:
    """Return the variables that Lightning's `fabric run` sets; ``counts`` is (instances per host, hosts)."""
    # Fabric() takes the number of devices from its launcher: without these variables each instance would
    # train alone. A script with other numbers would fail with these variables.
    file = next((word for word in program if word.endswith(".py")), "")
    calls = _calls(_source(file, working_directory))
    names = _arguments_of_fabric(calls)
    # a user who sets one of these variables must set all of them
    if names is None or names & {"devices", "num_nodes"} or counts == (1, 1) or {_USED, _DEVICES} & user.keys():
        return {}
    variables = {_DEVICES: str(counts[0]), _NODES: str(counts[1])}
    if not any(_name(call.func) == "launch" for call in calls):  # the script relies on `fabric run` to launch
        variables[_USED] = "1"
    if on_cpu and "accelerator" not in names:
        variables[_ACCELERATOR] = "cpu"
    return variables


def _source(file: str, working_directory: str) -> str:
    """Return the text of a Python file; an empty text if the file does not exist or cannot be read."""
    try:
        with open(os.path.join(working_directory, file), encoding="utf-8", errors="replace") as stream:
            return stream.read(_MOST_LETTERS)
    except OSError:
        return ""


def _calls(source: str) -> "list[ast.Call]":
    """Return all function calls in the Python text ``source``; [] if the text does not call Lightning's Fabric."""
    if "Fabric(" not in source:
        return []
    try:
        return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError, RecursionError):
        return []


def _arguments_of_fabric(calls: "Sequence[ast.Call]") -> set[str] | None:
    """Return the names of the arguments in calls of ``Fabric``; None without a call, or if ``**`` hides names."""
    fabrics = [call for call in calls if _name(call.func) == "Fabric"]
    if not fabrics or any(word.arg is None for call in fabrics for word in call.keywords):  # ** may name all
        return None
    named = {word.arg for call in fabrics for word in call.keywords if word.arg}
    placed = {name for name, place in _POSITIONS.items() if any(len(call.args) > place for call in fabrics)}
    return named | placed


def _name(function: "ast.expr") -> str:
    """Return the last part of a function's name; an empty text if the function is not called by a name."""
    return getattr(function, "attr", "") or getattr(function, "id", "")


def words_for_own_python(program: Sequence[str], working_directory: str, said: Sequence[str]) -> str:
    """Return advice if the program's Python lacks a module that poprun's Python has; otherwise an empty text."""
    own_folder = os.path.dirname(sys.executable)
    if not program or os.path.dirname(program[0]) == own_folder:
        return ""
    # poprun has no output if the program wrote to a file or terminal: then its Python file is searched
    missing = _missing_module(said) if said else _missing_import(program, working_directory)
    if not missing or not _can_find(missing):
        return ""
    first, *arguments = program
    if re.fullmatch(_PYTHON, os.path.basename(first)):
        write = f"poprun [OPTIONS] {shlex.join((sys.executable, *arguments))}"
    else:
        write = f"PATH={shlex.quote(own_folder)}:$PATH poprun [OPTIONS] {shlex.join(program)}"
    return f"{first} has no {missing}, and poprun's own Python has: write {write}"


def _missing_module(output: Sequence[str]) -> str:
    modules = [match[1] for line in output if (match := re.search(_MISSING, line))]
    return modules[-1] if modules else ""


def _missing_import(program: Sequence[str], working_directory: str) -> str:
    """Return the module, torch or popdist, that a Python file imports but its Python lacks; "" if none."""
    if not re.fullmatch(_PYTHON, os.path.basename(program[0])):
        return ""
    imported = sorted(set(re.findall(_IMPORT, _source(script_of(program), working_directory), re.MULTILINE)))
    code = f"import importlib.util as u; print(*(n for n in {imported!r} if u.find_spec(n) is None))"
    answer = answer_of((program[0], "-c", code), _ASK_SECONDS) if imported else None
    return next(iter((answer or "").split()), "")


def _can_find(module: str) -> bool:
    """Whether this Python can import ``module``, found without importing the module."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
