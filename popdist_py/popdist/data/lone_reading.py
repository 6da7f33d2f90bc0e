"""A warning for a program that reads a dealt loader on one instance, as in ``if is_main(): evaluate(loader)``.

The loader gives that instance its share of the samples, so the metric is one of a part of them. The instance
cannot ask the others, which are elsewhere. It sees by itself when it is in ``execute_on_instances``. Else it looks
at the code that it is in: whether a caller stands in the body of an ``if`` that asks for one instance.
"""

import ast
import linecache
import re
import warnings
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Final

from popdist import context
from popdist.errors import PopdistWarning

_ASKS: Final = re.compile(
    r"\bis_main\w*\(|\b(instance_index\(\)|getInstanceIndex\(\)|get_rank\(\)|\w*rank) == 0\b"
)
"""What the test of such an ``if`` looks like, in popdist's words and in those of torch's helpers."""

_OTHERWISE: Final = re.compile(r"(?<!\bis )\bnot\b|\bor\b|num_instances\(\)|world_size")
_MOST_FRAMES: Final = 20
_STANDARD_LIBRARY: Final = str(Path(ast.__file__).parent)


def warn_if_alone(frame: FrameType | None) -> None:
    """Warn if this instance reads a loader where the others do not.

    Args:
        frame: Of the code that starts to read.
    """
    contract = context.environment().contract
    if contract.num_instances == 1:
        return
    place = _place(frame) if contract.instance_index == 0 else None
    if context.is_initialized() and len(context.current_group().instances) < contract.num_instances:
        place = "execute_on_instances"
    if place is not None:
        warnings.warn(
            f"a loader of popdist.data_loader is read in {place}, by a part of the instances only, and has a "
            f"share of the samples for each of the {contract.num_instances}: evaluate on all instances and join "
            "what they find by popdist.weighted_mean or popdist.gather, or read a DataLoader of torch's there",
            PopdistWarning,
            stacklevel=3,
        )


def _place(frame: FrameType | None) -> str | None:
    """The ``if`` in whose body the innermost of the callers stands that stands in one, in words."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        for first, last, test in _guards(frame.f_code.co_filename):
            if first <= frame.f_lineno <= last:
                return f"`if {test}:`"
        frame = frame.f_back
    return None


@lru_cache(maxsize=64)
def _guards(path: str) -> tuple[tuple[int, int, str], ...]:
    """First and last line, and the test, of each body of an ``if`` that asks for one instance."""
    is_library = path.startswith(_STANDARD_LIBRARY) or "-packages" in path
    if is_library or not (lines := linecache.getlines(path)):
        return ()
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            if _ASKS.search(test) and not _OTHERWISE.search(test):
                last = node.body[-1]
                found.append((node.body[0].lineno, last.end_lineno or last.lineno, test))
    return tuple(found)
