"""What an instance tells at a standstill or an end: where it stands, and which collectives it has called. Pure.

It comes from the agents (`launch.program_watch`): stacks of the program and its helpers, and torch's recorder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from poprun.job.stacks import Standing, read_standing

_NANOSECONDS: Final = 1e9
_NOWHERE: Final = Standing()
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
"""What users call the types that torch's recorder names as C++ does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective, or one message, that a program has called."""

    name: str  # such as all_reduce
    number: int = 0  # which one of its group it was, from 1
    sizes: tuple[tuple[int, ...], ...] = ()  # of the tensors that the program gave
    types: tuple[str, ...] = ()  # and their dtypes
    is_done: bool = True  # whether it has ended there
    at_epoch_seconds: float = 0.0  # when it was called, by its host's clock

    def __str__(self) -> str:
        types = (*self.types, *[""] * len(self.sizes))
        tensors = [f"{kind}{list(size)}" for kind, size in zip(types, self.sizes, strict=False)]
        return f"{self.name}({', '.join(tensors)})"

    def is_like(self, other: "Call") -> bool:
        """Whether it may be the same collective of another rank, as far as ranks must agree."""
        if self.name != other.name or self.types[:1] != other.types[:1]:
            return False
        return not self.name.startswith(_SAME_SIZES) or self.sizes == other.sizes


_SAME_SIZES: Final = ("all_reduce", "allreduce", "broadcast", "reduce", "_all_gather_base", "_allgather_base")
"""How the names of collectives begin to which every rank brings tensors of the same sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """The calls of one process group in one program."""

    name: str  # torch's name of the group, the same in all its ranks; "0" is the one of all
    ranks: tuple[int, ...] = ()  # its ranks in the job, where torch tells them
    num_called: int = 0
    num_done: int = 0
    calls: tuple[Call, ...] = ()  # those that are not done, and the last ones, ascending

    @property
    def pending(self) -> Call | None:
        """The call that it waits in, the first of several; None when all are done."""
        return next((call for call in self.calls if not call.is_done), None)

    def find(self, number: int) -> Call | None:
        """The call with that number, if it is kept."""
        return next((call for call in self.calls if call.number == number), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """A process below the program, such as a data loader's worker."""

    pid: int
    process: str  # what /proc tells of it, in words
    standing: Standing = _NOWHERE  # its stacks, where it writes them


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceEvidence:
    """What one instance has told."""

    standing: Standing | None = None  # None when it has ended, or was not asked
    helpers: tuple[Helper, ...] = ()
    groups: tuple[GroupRecord, ...] = ()  # those that torch has recorded calls of
    crash: Standing = _NOWHERE  # where it stood when a signal such as SIGSEGV ended it
    full_disks: tuple[str, ...] = ()  # places that were full when the program had failed

    def group(self, name: str) -> GroupRecord | None:
        """The record of the group of that name."""
        return next((group for group in self.groups if group.name == name), None)


def read_evidence(event: Mapping[str, Any], before: InstanceEvidence | None = None) -> InstanceEvidence:
    """The evidence in an agent's event, with what the program had told ``before`` its end; none if malformed."""
    try:
        return _read(event, before)
    except (TypeError, ValueError):
        return before or InstanceEvidence()


def _read(event: Mapping[str, Any], before: InstanceEvidence | None) -> InstanceEvidence:
    record = event.get("recorder")
    groups = _dicts(record.get("groups") if isinstance(record, dict) else (), *_GROUP_FIELDS)
    found = InstanceEvidence(
        groups=tuple(map(_read_group, groups)),
        full_disks=tuple(map(str, event.get("full_disks") or ())),
        crash=_read_crash(str(event.get("crash", ""))),
    )
    if "text" not in event:
        return found if before is None else replace(found, standing=before.standing, helpers=before.helpers)
    helpers = _dicts(event.get("helpers"), "pid", "process", "text")
    return replace(
        found,
        standing=read_standing(event["text"], event["processes"]),
        helpers=tuple(
            Helper(pid=helper["pid"], process=helper["process"], standing=read_standing(str(helper["text"]), ()))
            for helper in helpers
        ),
    )


def _read_crash(text: str) -> Standing:
    """The stack of the thread that crashed, of all that Python has written; the main one's if that was in C++."""
    _, current, thread = text.partition("Current thread")
    return read_standing(current + thread.partition("\n\n")[0] if current else text, ())


_GROUP_FIELDS: Final = ("name", "ranks", "num_called", "num_done", "calls")
_CALL_FIELDS: Final = ("name", "number", "sizes", "types", "is_done", "at_nanoseconds")


def _dicts(values: object, *fields: str) -> list[dict[str, Any]]:
    """Those of ``values`` that are objects with all ``fields``."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return []
    return [value for value in values if isinstance(value, dict) and value.keys() >= set(fields)]


def _read_group(group: Mapping[str, Any]) -> GroupRecord:
    calls = [_read_call(call) for call in _dicts(group["calls"], *_CALL_FIELDS)]
    return GroupRecord(
        name=str(group["name"]),
        ranks=tuple(group["ranks"]),
        num_called=group["num_called"],
        num_done=group["num_done"],
        calls=tuple(calls),
    )


def _read_call(call: Mapping[str, Any]) -> Call:
    return Call(
        name=str(call["name"]).partition(":")[2] or str(call["name"]),
        number=call["number"],
        sizes=tuple(tuple(size) for size in call["sizes"]),
        types=tuple(_TYPES.get(kind, kind) for kind in map(str, call["types"])),
        is_done=bool(call["is_done"]),
        at_epoch_seconds=call["at_nanoseconds"] / _NANOSECONDS,
    )
