"""Scripts for Lightning Fabric that leave it to their launcher how many devices there are: `Fabric()`.

`fabric run` tells them by variables (lightning.fabric.cli), and without those each instance would train alone. The
same variables are errors for a script that says something else, so they are set only where it says nothing.
"""

import ast
import os
from collections.abc import Mapping, Sequence
from typing import Final

_USED: Final = "LT_CLI_USED"
_DEVICES: Final = "LT_DEVICES"
_NODES: Final = "LT_NUM_NODES"
_ACCELERATOR: Final = "LT_ACCELERATOR"
_MOST_LETTERS: Final = 1_000_000
_POSITIONS: Final = {"accelerator": 0, "devices": 2, "num_nodes": 3}
"""Where Fabric's own arguments stand when they are not named."""


def fabric_variables(
    program: Sequence[str],
    working_directory: str,
    counts: tuple[int, int],
    user: Mapping[str, str],
    *,
    on_cpu: bool,
) -> dict[str, str]:
    """What `fabric run` would set for a program; nothing for one that is no such script, or for one instance.

    Args:
        program: Its argv.
        working_directory: Where it starts.
        counts: The instances of each host, and the hosts.
        user: The user's variables: whoever sets one of Fabric's sets them all.
        on_cpu: Whether the job has no GPUs.
    """
    calls = _calls(_source(program, working_directory))
    given = _arguments_of_fabric(calls)
    if given is None or given & {"devices", "num_nodes"} or counts == (1, 1) or {_USED, _DEVICES} & user.keys():
        return {}
    variables = {_DEVICES: str(counts[0]), _NODES: str(counts[1])}
    if not any(_name(call.func) == "launch" for call in calls):  # `fabric run` launches in place of the script
        variables[_USED] = "1"
    if on_cpu and "accelerator" not in given:
        variables[_ACCELERATOR] = "cpu"
    return variables


def _source(program: Sequence[str], working_directory: str) -> str:
    """The text of the first Python file among the words; empty when there is none that can be read."""
    file = next((word for word in program if word.endswith(".py")), "")
    try:
        with open(os.path.join(working_directory, file), encoding="utf-8") as stream:
            return stream.read(_MOST_LETTERS) if file else ""
    except (OSError, UnicodeError):
        return ""


def _calls(source: str) -> list[ast.Call]:
    """Every call in a file that calls Fabric; none in others."""
    if "Fabric(" not in source:
        return []
    try:
        return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError, RecursionError):
        return []


def _arguments_of_fabric(calls: Sequence[ast.Call]) -> set[str] | None:
    """Which of the arguments that count are given to `Fabric(…)`; None where it is not called, or not plainly."""
    made = [call for call in calls if _name(call.func) == "Fabric"]
    if not made or any(word.arg is None for call in made for word in call.keywords):  # **options: anything
        return None
    named = {word.arg for call in made for word in call.keywords if word.arg}
    placed = {name for name, place in _POSITIONS.items() if any(len(call.args) > place for call in made)}
    return named | placed


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
