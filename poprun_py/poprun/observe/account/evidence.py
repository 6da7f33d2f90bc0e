"""The evidence of an instance after a hang or a failure: its stacks and its last collectives. Pure.

Stacks have the format of faulthandler (https://docs.python.org/3/library/faulthandler.html).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Annotated, Any, Final

from poprun.errors import PlanError
from poprun.observe.account.field_types import Count, Index, Text
from poprun.text import IF_USED
from poprun.text.fields import read_record

_THREAD: Final = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[.*\])? \(most recent call first\):")
_FRAME: Final = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_TYPES: Final = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
"""For each name of a dtype in torch's recorder, which uses C++ names, the name in Python."""


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One call on the stack of a thread: its file, line and function."""

    file: Text
    line: Count
    function: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """The stacks of all threads of one program at one moment."""

    threads: tuple[tuple[StackFrame, ...], ...] = ()  # the main thread first; in each thread the latest call last
    processes: tuple[Text, ...] = ()  # the processes in words, from /proc, if there are no stacks

    @property
    def main(self) -> tuple[StackFrame, ...]:
        """The stack of the program's main thread; empty if no stacks are known."""
        return self.threads[0] if self.threads else ()


def read_stacks(text: str, processes: Sequence[object]) -> Stacks:
    """Return the stacks in ``text``, which Python's faulthandler printed; other lines are ignored."""
    threads: list[list[StackFrame]] = []
    for line in text.splitlines():
        frame = _FRAME.fullmatch(line)
        if _THREAD.fullmatch(line):
            threads.append([])
        elif frame is not None and threads:
            threads[-1].append(StackFrame(frame["file"], int(frame["line"]), frame["function"]))
    main_first = tuple(tuple(reversed(thread)) for thread in reversed(threads))
    return Stacks(threads=main_first, processes=tuple(map(str, processes)))


_NO_STACKS: Final = Stacks()


def _without_backend(name: str) -> str:
    """Return the name of a collective without torch's backend: ``all_reduce`` for ``gloo:all_reduce``."""
    return name.partition(":")[2] or name


def _dtype_name(name: str) -> str:
    """Return Python's name of a dtype, such as ``float32``, for its name in torch's recorder."""
    return _TYPES.get(name, name)


CallKey = tuple[str, int, str]
"""The process group, the number and the name of a collective, which are the same on all instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective, or a message to one rank, that a program has called, with its tensors and times."""

    name: Annotated[Text, _without_backend]  # such as ``all_reduce``
    group: Text = field(default="", metadata=IF_USED)  # the name of the process group, in a trace
    number: int = 0  # position among the collectives of the group, from 1
    sizes: tuple[tuple[Count, ...], ...] = ()  # sizes of the tensors that the program passed
    types: tuple[Annotated[str, _dtype_name], ...] = ()  # dtypes of these tensors
    is_done: bool = True  # whether the call has ended in this program
    begin_ns: int = 0  # when the program made the call, since 1970, by the clock of its host
    end_ns: int = field(default=0, metadata=IF_USED)  # when the call ended; 0 if that is not known

    @property
    def key(self) -> CallKey:
        """The process group, number and name of the collective: equal on all instances that take part in it."""
        return self.group, self.number, self.name

    def __str__(self) -> str:
        types = (*self.types, *[""] * len(self.sizes))
        tensors = [f"{kind}{list(size)}" for kind, size in zip(types, self.sizes, strict=False)]
        return f"{self.name}({', '.join(tensors)})"

    @property
    def num_bytes(self) -> int:
        """The size in bytes of the tensors that the program passed to the call."""
        widths = [int(digits[0]) // 8 if (digits := re.search(r"\d+", kind)) else 1 for kind in self.types]
        return sum(width * prod(size) for width, size in zip(widths, self.sizes, strict=False))

    @property
    def kind(self) -> str:
        """The text that must be equal on all ranks: the call's name and dtype, for some collectives also sizes."""
        return str(self) if self.name.startswith(_SAME_SIZES) else f"{self.name}({', '.join(self.types[:1])})"


_SAME_SIZES: Final = ("all_reduce", "allreduce", "broadcast", "reduce", "_all_gather_base", "_allgather_base")
"""The beginnings of the names of collectives to which all ranks pass tensors of the same sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """The collectives that one program has called in one process group, as torch recorded them."""

    name: Text  # torch's name of the group, the same in all its ranks; "0" is the group of all ranks
    ranks: tuple[Index, ...] = ()  # the ranks of the group in the job; empty if torch does not record the ranks
    num_called: int = 0
    num_done: int = 0
    calls: tuple[Call, ...] = ()  # the calls that are not done, and the last calls, ascending

    @property
    def pending(self) -> Call | None:
        """The program's first call in this process group that has not ended; None if all calls have ended."""
        return next((call for call in self.calls if not call.is_done), None)

    def find(self, number: int) -> Call | None:
        """Return the program's collective with the number ``number``; None if torch's recorder has lost it."""
        return next((call for call in self.calls if call.number == number), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """A process that a program started, such as a DataLoader worker, with its stacks."""

    pid: int
    process: Text  # the process in words, from /proc
    stacks: Stacks = _NO_STACKS  # empty if the process writes no stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceEvidence:
    """The evidence that one instance reported in a hang or after a failure: stacks, collectives, file locks."""

    stacks: Stacks = _NO_STACKS  # where the program stands; empty if the program has ended or was not asked
    helpers: tuple[Helper, ...] = ()
    groups: tuple[GroupRecord, ...] = ()  # the groups whose calls torch has recorded
    crash: Stacks = _NO_STACKS  # stacks at the end of the program by a signal such as SIGSEGV
    held_locks: tuple[Text, ...] = ()  # locks of files, as the kernel numbers the files
    # the locks that the program waits for, each with the process that holds the lock
    awaited_locks: tuple[tuple[Text, Text], ...] = ()
    ended_children: tuple[Count, ...] = ()  # child processes that ended, and whose end the program has not read
    full_disks: tuple[Text, ...] = ()  # places that were full when the program had failed

    @property
    def frames(self) -> Iterator[StackFrame]:
        """All calls on the stacks of the program and of the processes that it started."""
        for stacks in (self.stacks, self.crash, *(helper.stacks for helper in self.helpers)):
            for thread in stacks.threads:
                yield from thread

    def group(self, name: str) -> GroupRecord | None:
        """Return the program's calls in the process group ``name``; None if there are none."""
        return next((group for group in self.groups if group.name == name), None)


def read_evidence(event: Mapping[str, Any], before: InstanceEvidence | None = None) -> InstanceEvidence:
    """Return the evidence in an agent's message ``event``; fields that are missing come from ``before``."""
    try:
        return _read(event, before)
    except (PlanError, AttributeError, KeyError, TypeError, ValueError):
        return before or InstanceEvidence()


def _read(event: Mapping[str, Any], before: InstanceEvidence | None) -> InstanceEvidence:
    record = event.get("recorder") or {}
    evidence = InstanceEvidence(
        groups=tuple(read_record(GroupRecord, it, "an agent", is_part=True) for it in record.get("groups", ())),
        full_disks=tuple(map(str, event.get("full_disks") or ())),
        crash=_read_crash(str(event.get("crash", ""))),
    )
    if "text" not in event:
        return evidence if before is None else replace(evidence, stacks=before.stacks, helpers=before.helpers)
    return replace(
        evidence,
        stacks=read_stacks(event["text"], event["processes"]),
        held_locks=tuple(map(str, event.get("held_locks", ()))),
        awaited_locks=tuple((str(file), str(holder)) for file, holder in event.get("awaited_locks", {}).items()),
        ended_children=tuple(map(int, event.get("ended_children", ()))),
        helpers=tuple(
            Helper(pid=helper["pid"], process=helper["process"], stacks=read_stacks(str(helper["text"]), ()))
            for helper in event.get("helpers", ())
        ),
    )


def _read_crash(text: str) -> Stacks:
    """Return the crashed thread's stack from a crash report; all stacks if the crashed thread ran no Python."""
    _, current, thread = text.partition("Current thread")
    return read_stacks(current + thread.partition("\n\n")[0] if current else text, ())
