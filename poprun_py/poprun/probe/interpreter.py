"""The Python that ran a program: whether it is another one than poprun's own, and lacks what that one has.

An installed poprun that is called by its path, or in an environment that is not active, finds another `python` on
PATH than the one that it was installed for.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

from poprun.process.spawn import answer_of

_ASK_SECONDS: Final = 10.0
_MISSING: Final = re.compile(r"ModuleNotFoundError: No module named '(\w+)'")
_PYTHON: Final = re.compile(r"python[\d.]*$")
_IMPORT: Final = re.compile(r"^\s*(?:import|from)\s+(torch|popdist)\b", re.MULTILINE)
_MOST_LETTERS: Final = 1_000_000


def words_for_own_python(program: Sequence[str], working_directory: str, said: Sequence[str]) -> str:
    """What to write instead, with the module that was missing: ``… has no torch, … : write poprun … train.py``.

    Args:
        program: The argv that failed.
        working_directory: Where it ran.
        said: The last lines of its standard error; none when it wrote past poprun. Then its file is looked at, and
            its Python is asked for what the file imports.

    Returns:
        An empty text when poprun's own Python ran it, or would not have found the module either.
    """
    own_folder = os.path.dirname(sys.executable)
    if not program or os.path.dirname(program[0]) == own_folder:
        return ""
    missing = _missing_module(said) if said else _missing_import(program, working_directory)
    if not missing or not _can_find(missing):
        return ""
    first, *arguments = program
    if _PYTHON.fullmatch(os.path.basename(first)):
        write = f"poprun [OPTIONS] {shlex.join((sys.executable, *arguments))}"
    else:
        write = f"PATH={shlex.quote(own_folder)}:$PATH poprun [OPTIONS] {shlex.join(program)}"
    return f"{first} has no {missing}, and poprun's own Python has: write {write}"


def _missing_module(said: Sequence[str]) -> str:
    found = [match[1] for line in said if (match := _MISSING.search(line))]
    return found[-1] if found else ""


def _missing_import(program: Sequence[str], working_directory: str) -> str:
    """The first of torch and popdist that a Python file imports and its Python cannot find; empty for none."""
    first, *arguments = program
    if not _PYTHON.fullmatch(os.path.basename(first)) or not arguments:
        return ""
    try:
        with open(os.path.join(working_directory, arguments[0]), encoding="utf-8", errors="replace") as file:
            wanted = sorted(set(_IMPORT.findall(file.read(_MOST_LETTERS))))
    except OSError:  # an option, not a file
        return ""
    asked = f"import importlib.util as u; print(*(n for n in {wanted!r} if u.find_spec(n) is None))"
    answer = answer_of((first, "-c", asked), _ASK_SECONDS) if wanted else None
    return next(iter((answer or "").split()), "")


def _can_find(module: str) -> bool:
    """Whether this Python has a module, which is not imported for that."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
