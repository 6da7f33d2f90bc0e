"""The meaning of a program's stacks: the user's last call, the collective it waits in, and lines of source."""

import linecache
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Final

from popdist.ground import contract
from poprun.launch.process.spawn import start_thread
from poprun.observe.account.evidence import InstanceEvidence, StackFrame, Stacks
from poprun.observe.account.last_words import LIBRARY

_MOST_READING_SECONDS = 1.0

Place = tuple[str, int]  # a file and the number of a line in it
POPDIST: Final = os.path.dirname(os.path.dirname(contract.__file__)) + os.sep
_OF_GROUPS: Final = re.compile(r"/torch/(?:distributed/|nn/parallel/distributed\.py)")
_GROUPS: Final = "/torch/distributed/distributed_c10d.py"
_OF_JAX: Final = re.compile(r"/jax/(?:experimental/multihost_utils|_src/distributed)\.py")
_BACKWARD: Final = "/torch/autograd/graph.py"
_OF_BACKEND: Final = re.compile(r"/popdist/exchange/(?:process_group|host_memory)/")
_PIPELINING: Final = "/torch/distributed/pipelining/"
_OF_PYTHON: Final = re.compile(r"/python3\.\d+/(?!site-packages/|dist-packages/)|/torch/futures/")
ReadLine = Callable[[str, int], str]  # the source of a file's line, or an empty text: `linecache.getline`


def read_lines(evidence: Iterable[InstanceEvidence]) -> ReadLine:
    """Read the source lines on the stacks; return a function of file and line; it returns "" for unread lines."""
    # a program often hangs because of the file system that its source lies on, so a thread reads
    places = {(frame.file, frame.line) for known in evidence for frame in known.frames}
    own_first = sorted(places, key=lambda place: (bool(LIBRARY.search(place[0])), place))
    sources_read: dict[Place, str] = {}
    reader = threading.Thread(target=_read, args=(own_first, sources_read), name="poprun-sources", daemon=True)
    with suppress(OSError):  # the process has reached its limit of threads
        start_thread(reader)
        reader.join(_MOST_READING_SECONDS)
    sources = dict(sources_read)
    return lambda file, line: sources.get((file, line), "")


def _read(places: Iterable[Place], found: dict[Place, str]) -> None:
    for file, line in places:
        if os.path.isfile(file):  # a pipe would be waited for
            text = linecache.getline(file, line).strip()
            found[file, line] = "".join(letter if letter.isprintable() else " " for letter in text)


def own_frame(frames: Sequence[StackFrame]) -> StackFrame | None:
    """Return the latest call in the user's own code, in no library; None if there is no such call."""
    own_frames = (it for it in reversed(frames) if not LIBRARY.search(it.file) and not it.file.startswith(POPDIST))
    return next(own_frames, None)


def collective_of(stacks: Stacks) -> str:
    """Return the call of torch or JAX in which the main thread waits for other instances; "" if none."""
    whole = stacks.main
    main = _without_backend(whole)
    # DistributedDataParallel waits in C++, below Python's last call
    if main and main[-1].file.endswith(_BACKWARD):
        return "backward() of torch"
    inside = list(takewhile(lambda frame: _OF_GROUPS.search(frame.file), reversed(main)))
    if inside and _PIPELINING in inside[-1].file:
        return f"{inside[-1].function}() of torch.distributed.pipelining"
    called = [frame.function for frame in reversed(inside) if frame.file.endswith(_GROUPS)]
    named = called or [frame.function for frame in inside]
    if named:
        return f"{named[0]}() of torch.distributed"
    if called := [frame.function for frame in main if _OF_JAX.search(frame.file)]:
        return f"{called[0]}() of jax" if "/jax/" in main[-1].file else ""
    return f"{whole[len(main)].function}() of the backend popdist" if len(main) < len(whole) else ""


def _without_backend(main: tuple[StackFrame, ...]) -> tuple[StackFrame, ...]:
    """Return the main thread's stack ``main``; if its last calls are in the backend popdist, without these."""
    end = len(main)
    while end and _OF_PYTHON.search(main[end - 1].file):
        end -= 1
    first = end
    while first and _OF_BACKEND.search(main[first - 1].file):
        first -= 1
    return main[:first] if first < end else main
