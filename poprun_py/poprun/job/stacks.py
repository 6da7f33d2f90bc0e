"""Where the programs stand, as lines for people: their stacks, as Python's tracebacks show them. Pure.

An agent passes on what faulthandler wrote (https://docs.python.org/3/library/faulthandler.html): every thread,
each with its latest call first. Here the latest call comes last, with its line of source, as in a traceback;
instances that stand alike are shown once.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from popdist import contract
from poprun.job.report.other_instances import name_instances

MAX_FRAMES: Final = 24
"""Frames of a main thread that are shown; the middle of a longer stack is left out."""

MAX_HELPER_FRAMES: Final = 4
"""Frames of another thread: its latest calls."""

MAX_HELPERS: Final = 4
"""Other threads that are shown."""

_FIRST_FRAMES: Final = 8
_LIBRARY: Final = os.path.dirname(contract.__file__) + os.sep
_MAX_LETTERS: Final = 160
_THREAD: Final = re.compile(
    r"(Current thread|Thread) 0x[0-9a-f]+(?: \[(?P<name>.*)\])? \(most recent call first\):"
)
_FRAME: Final = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')

ReadLine = Callable[[str, int], str]
"""The source of a file's line, or an empty text: `linecache.getline`."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call: where it stands."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where one program stands.

    Attributes:
        threads: The stacks of its threads, each with the latest call last; the main thread comes first.
        processes: What /proc tells of its processes, in words, when there are no stacks.
    """

    threads: tuple[tuple[Frame, ...], ...] = ()
    processes: tuple[str, ...] = ()


def read_standing(text: str, processes: Sequence[object]) -> Standing:
    """What an agent's event says; anything in it that is no stack is passed over."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        frame = _FRAME.fullmatch(line)
        if _THREAD.fullmatch(line):
            threads.append([])
        elif frame is not None and threads:
            threads[-1].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    stacks = tuple(tuple(reversed(thread)) for thread in reversed(threads))  # the first thread is written last
    return Standing(threads=stacks, processes=tuple(map(str, processes)))


def render_standings(
    standings: Mapping[int, Standing], read_line: ReadLine, max_groups: int | None = None
) -> list[str]:
    """The instances in the order given, those that stand alike together.

    Args:
        standings: Where each instance stands, by index.
        read_line: Gives the source of a line.
        max_groups: How many different ones to show; None for all.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, standing in standings.items():
        groups.setdefault(tuple(_render(standing, read_line)), []).append(index)
    shown = list(groups.items())[:max_groups]
    lines = [line for text, indices in shown for line in (f"{name_instances(sorted(indices))}:", *_quoted(text))]
    num_left = len(standings) - sum(len(indices) for _, indices in shown)
    return [*lines, f"and {num_left} more: Ctrl-\\ shows all"] if num_left else lines


def _quoted(lines: Sequence[str]) -> list[str]:
    return [f"  | {line if len(line) <= _MAX_LETTERS else line[:_MAX_LETTERS] + '…'}" for line in lines]


def _render(standing: Standing, read_line: ReadLine) -> list[str]:
    if not standing.threads:
        return list(standing.processes) or ["it has no process"]
    main, *helpers = standing.threads
    lines = _render_thread(main, MAX_FRAMES, _FIRST_FRAMES, read_line)
    for number, helper in enumerate(helpers[:MAX_HELPERS], 1):
        lines += [f"thread {number}:", *_render_thread(helper, MAX_HELPER_FRAMES, 0, read_line)]
    num_left = len(helpers) - MAX_HELPERS
    return [*lines, f"… {num_left} more threads …"] if num_left > 0 else lines


def _render_thread(frames: Sequence[Frame], most: int, num_first: int, read_line: ReadLine) -> list[str]:
    if not frames:
        return ["no Python code: it starts, or it is about to end"]
    num_inside = len(list(takewhile(lambda frame: frame.file.startswith(_LIBRARY), reversed(frames))))
    if num_inside > 1:  # the way to where popdist waits is the same for all
        frames = frames[: 1 - num_inside]
    left_out = len(frames) - most
    shown = list(frames) if left_out <= 0 else [*frames[:num_first], *frames[left_out + num_first :]]
    rendered = [_render_frame(frame, read_line) for frame in shown]
    if left_out > 0:
        rendered.insert(num_first, [f"… {left_out} calls …"])
    if num_inside > 1:
        rendered.append([f"… {num_inside - 1} calls inside popdist …"])
    return [line for lines in rendered for line in lines]


def _render_frame(frame: Frame, read_line: ReadLine) -> list[str]:
    source = read_line(frame.file, frame.line).strip()
    where = f'File "{frame.file}", line {frame.line}, in {frame.function}'
    return [where, f"  {source}"] if source else [where]
