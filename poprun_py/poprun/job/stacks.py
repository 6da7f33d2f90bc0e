"""The stacks of the programs: asked for, and put into words as Python's tracebacks.

The latest call comes last, with its line of source; instances that stand alike are shown once.
"""

import linecache
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Final

from popdist.ground import contract
from popdist.ground.layout import Parallelism
from poprun.job.evidence import InstanceEvidence, StackFrame, Stacks
from poprun.job.hangs import Hang, describe_hang
from poprun.job.report.last_words import LIBRARY
from poprun.job.state import InstanceState, InstanceStatus, name_with_place
from poprun.launch.messages.control import Message
from poprun.launch.process.spawn import start_thread

_MOST_READING_SECONDS = 1.0

Place = tuple[str, int]  # a file and the number of a line in it
MAX_FRAMES: Final = 24  # frames of a main thread that are shown; the middle of a longer stack is left out
MAX_HELPER_FRAMES: Final = 4  # frames of another thread: its latest calls
MAX_HELPERS: Final = 4  # other threads that are shown
_FIRST_FRAMES: Final = 8
_POPDIST: Final = os.path.dirname(os.path.dirname(contract.__file__)) + os.sep
_MAX_LETTERS: Final = 160
_OF_GROUPS: Final = re.compile(r"/torch/(?:distributed/|nn/parallel/distributed\.py)")
_GROUPS: Final = "/torch/distributed/distributed_c10d.py"
_OF_JAX: Final = re.compile(r"/jax/(?:experimental/multihost_utils|_src/distributed)\.py")
_BACKWARD: Final = "/torch/autograd/graph.py"
_OF_BACKEND: Final = re.compile(r"/popdist/exchange/(?:process_group|host_memory)/")
_SAMPLER: Final = "/popdist/startup/phase_sampler.py"
_WORK_QUEUE: Final = "/popdist/exchange/process_group/work_queue.py"
_PIPELINING: Final = "/torch/distributed/pipelining/"
_OF_PYTHON: Final = re.compile(r"/python3\.\d+/(?!site-packages/|dist-packages/)|/torch/futures/")
ReadLine = Callable[[str, int], str]  # the source of a file's line, or an empty text: `linecache.getline`
_MOST_ANSWER_SECONDS = 4.0  # how long agents are waited for; each gives its program half of it
_MAX_GROUPS_OF_HANG = 6
_MOST_HELPERS: Final = 8  # processes below a program, such as a data loader's workers, that are asked for stacks
_NOT_SHARED: Final = Parallelism()


def read_lines(evidence: Iterable[InstanceEvidence]) -> ReadLine:
    """The lines of all calls on the stacks; empty where one cannot be read, or was not within a second."""
    # a program often hangs because of the file system that its source lies on, so a thread reads
    places = {(frame.file, frame.line) for known in evidence for frame in known.frames}
    own_first = sorted(places, key=lambda place: (bool(LIBRARY.search(place[0])), place))
    found: dict[Place, str] = {}
    reader = threading.Thread(target=_read, args=(own_first, found), name="poprun-sources", daemon=True)
    with suppress(OSError):  # there can be no more threads
        start_thread(reader)
        reader.join(_MOST_READING_SECONDS)
    sources = dict(found)
    return lambda file, line: sources.get((file, line), "")


def _read(places: Iterable[Place], found: dict[Place, str]) -> None:
    for file, line in places:
        if os.path.isfile(file):  # a pipe would be waited for
            text = linecache.getline(file, line).strip()
            found[file, line] = "".join(letter if letter.isprintable() else " " for letter in text)


def own_frame(frames: Sequence[StackFrame]) -> StackFrame | None:
    """The latest call in code that belongs to no library; None where there is none."""
    own = (it for it in reversed(frames) if not LIBRARY.search(it.file) and not it.file.startswith(_POPDIST))
    return next(own, None)


def collective_of(stacks: Stacks) -> str:
    """The call of torch's or JAX's in which the main thread of a program waits for others; "" for none."""
    whole = stacks.main
    main = _without_backend(whole)
    if main and main[-1].file.endswith(
        _BACKWARD
    ):  # DistributedDataParallel waits in C++, below Python's last call
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
    """The stack without the calls of the backend popdist at its end, and what these wait in."""
    end = len(main)
    while end and _OF_PYTHON.search(main[end - 1].file):
        end -= 1
    first = end
    while first and _OF_BACKEND.search(main[first - 1].file):
        first -= 1
    return main[:first] if first < end else main


def render_stacks(
    stacks: Mapping[int, Stacks],
    read_line: ReadLine,
    max_groups: int | None = None,
    parallelism: Parallelism = _NOT_SHARED,
) -> list[str]:
    """The stacks of all instances as lines; instances with equal stacks are shown once."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, of_one in stacks.items():
        groups.setdefault(tuple(_render(of_one, read_line)), []).append(index)
    shown = list(groups.items())[:max_groups]
    lines = [
        line
        for text, indices in shown
        for line in (f"{name_with_place(sorted(indices), parallelism)}:", *_quoted(text))
    ]
    num_left = len(stacks) - sum(len(indices) for _, indices in shown)
    return [*lines, f"and {num_left} more: Ctrl-\\ shows all"] if num_left else lines


def _quoted(lines: Sequence[str]) -> list[str]:
    return [f"  | {line if len(line) <= _MAX_LETTERS else line[:_MAX_LETTERS] + '…'}" for line in lines]


def _render(stacks: Stacks, read_line: ReadLine) -> list[str]:
    if not stacks.threads:
        return list(stacks.processes) or ["it has no process"]
    main, *others = stacks.threads
    helpers = [stack for stack in others if not _is_idle(stack)]
    lines = _render_thread(main, MAX_FRAMES, _FIRST_FRAMES, read_line)
    for number, helper in enumerate(helpers[:MAX_HELPERS], 1):
        lines += [f"thread {number}:", *_render_thread(helper, MAX_HELPER_FRAMES, 0, read_line)]
    num_left = len(helpers) - MAX_HELPERS
    return [*lines, f"… {num_left} more threads …"] if num_left > 0 else lines


def _is_idle(thread: Sequence[StackFrame]) -> bool:
    """Whether a thread is that of a process group, and waits for the next call, or poprun's own."""
    if any(frame.file.endswith(_SAMPLER) for frame in thread):
        return True
    return bool(thread) and thread[-1].function == "_work" and thread[-1].file.endswith(_WORK_QUEUE)


def _render_thread(frames: Sequence[StackFrame], most: int, num_first: int, read_line: ReadLine) -> list[str]:
    if not frames:
        return ["no Python code: it starts, or it is about to end"]
    num_inside = len(list(takewhile(lambda frame: frame.file.startswith(_POPDIST), reversed(frames))))
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


def _render_frame(frame: StackFrame, read_line: ReadLine) -> list[str]:
    source = read_line(frame.file, frame.line).strip()
    where = f'File "{frame.file}", line {frame.line}, in {frame.function}'
    return [where, f"  {source}"] if source else [where]


class StackInquiry:
    """A request to all running programs for their stacks, because of a hang or at the user's wish."""

    def __init__(
        self,
        statuses: Sequence[InstanceStatus],
        now_seconds: float,
        send_order: Callable[[int, Message], None],
        hang: Hang | None = None,
        hang_timeout_seconds: float | None = None,
        parallelism: Parallelism = _NOT_SHARED,
    ) -> None:
        running = [status.index for status in statuses if status.state is InstanceState.RUNNING]
        first = hang.absent if hang is not None else ()
        self.hang = hang  # because of which they are asked, or None
        self._hang_timeout_seconds = hang_timeout_seconds
        self._parallelism = parallelism
        self._asked = tuple(dict.fromkeys((*first, *running)))
        self._awaited = set(self._asked)
        self._deadline_seconds = now_seconds + _MOST_ANSWER_SECONDS
        for index in running:
            send_order(index, {"order": "stacks", "most_helpers": _MOST_HELPERS})

    def note_answer(self, instance: int) -> None:
        """Wait no longer for an instance, which has answered."""
        self._awaited.discard(instance)

    @property
    def is_about_suspicion(self) -> bool:
        """Whether it is only suspected that somebody waits: then the answers' calls decide."""
        return self.hang is not None and self.hang.is_suspicion

    def calls(self, evidence: Mapping[int, InstanceEvidence]) -> dict[int, str]:
        """The collectives of torch that programs stand in, in words, by instance."""
        answers = self._answers(evidence).items()
        return {index: call for index, stacks in answers if (call := collective_of(stacks))}

    def is_over(self, statuses: Sequence[InstanceStatus], now_seconds: float) -> bool:
        """Whether all programs that run have answered, or will not."""
        is_awaited = any(statuses[index].state is InstanceState.RUNNING for index in self._awaited)
        return not is_awaited or now_seconds >= self._deadline_seconds

    def text(
        self,
        statuses: Sequence[InstanceStatus],
        evidence: Mapping[int, InstanceEvidence],
        read_line: ReadLine,
        findings: Sequence[str] = (),
    ) -> str:
        """The answers in words; ``findings`` say who is at fault, as far as it is known."""
        answers = self._answers(evidence)
        stacks = {
            index: answers.get(index) or Stacks(processes=(_without_answer(statuses[index]),))
            for index in self._asked
        }
        max_groups = None if self.hang is None else _MAX_GROUPS_OF_HANG
        lines = render_stacks(stacks, read_line, max_groups, self._parallelism)
        return "\n  ".join([*self._heading(statuses, findings), *lines, *self._last_lines()])

    def _answers(self, evidence: Mapping[int, InstanceEvidence]) -> dict[int, Stacks]:
        """The stacks of those that have answered; ``evidence`` may hold earlier answers of the others."""
        answered = (index for index in self._asked if index not in self._awaited and index in evidence)
        return {index: evidence[index].stacks for index in answered}

    def _heading(self, statuses: Sequence[InstanceStatus], findings: Sequence[str]) -> list[str]:
        if self.hang is not None:
            return describe_hang(self.hang, statuses, self._parallelism, findings)
        return ["where the instances stand, the latest call last" if self._asked else "no program runs"]

    def _last_lines(self) -> list[str]:
        if self.hang is None:
            return []
        if self._hang_timeout_seconds is None:
            return ["the job goes on: an instance that compiles or saves for long looks the same"]
        return [f"the job is ended when this has lasted {self._hang_timeout_seconds:g} s (--hang-timeout)"]


def _without_answer(status: InstanceStatus) -> str:
    return "no answer" if status.state is InstanceState.RUNNING else "it has ended"
