"""The recording that one instance's program made of some steps, as values. Pure.

Times are nanoseconds since 1970 by the program's clock, or by poprun's clock after the conversion.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from poprun.launch.messages.clock import Exchange
from poprun.launch.recorder import MALFORMED, groups_in
from poprun.observe.account.evidence import Call
from poprun.text.ranges import fold_numbers

DATA_NAME: Final = "enumerate(DataLoader)"
"""The beginning of torch's name for the time in which a training loop waits for its DataLoader."""

COLLECTIVE_NAME: Final = "c10d::"
POPDIST_GROUP: Final = "popdist"
"""The beginning of the names of popdist's process groups, before the ranks if a group has only some."""

GPU_ANNOTATION: Final = "gpu_user_annotation"
GPU_CATEGORIES: Final = ("kernel", "gpu_memcpy", "gpu_memset", GPU_ANNOTATION)
_KEPT_ARGUMENTS: Final = ("stream", "device", "bytes")
_NS_PER_US: Final = 1000


class Slice(NamedTuple):
    """An operation in a trace, with its begin, its end, and its row in the picture: a thread or a GPU stream."""

    row: str
    name: str
    category: str
    begin_ns: int
    end_ns: int
    arguments: Mapping[str, object]


class Arrow(NamedTuple):
    """One end of an arrow that torch's profiler recorded, such as from a forward to a backward operation."""

    row: str
    name: str
    number: int
    is_end: bool
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The description that a program writes of its recording: process, steps, times and collectives."""

    pid: int
    num_steps: int  # optimizer steps until the program wrote the text
    problem: str = ""  # why there is no trace, or only a part of the trace
    thread: str = ""  # the main thread, as the kernel numbers it
    first_step: int = 0
    begun_ns: int = 0
    ended_ns: int = 0
    exchanges: tuple[Exchange, ...] = ()  # comparisons with the agent's clock, before and after the recording
    calls: tuple[Call, ...] = ()  # the collectives that the program has called, by time; names include the backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The recorded events of one instance: operations, arrows, and the names of the rows."""

    slices: Sequence[Slice]
    arrows: Sequence[Arrow]
    row_names: Mapping[str, str]


def read_about(text: str) -> About:
    """Return the description of a recording in ``text``. Raises ValueError if the text is damaged."""
    values = _object(text)
    try:
        pid, num_steps, problem = int(values["pid"]), int(values["num_steps"]), str(values["problem"])
        about = About(pid=pid, num_steps=num_steps, problem=problem)
        if "recorder" not in values:
            return about
        begun_ns = int(values["begun_ns"])
        calls = [
            Call(
                group=group,
                number=int(it["collective_seq_id"]),
                name=str(it["profiling_name"]),
                begin_ns=int(it["time_created_ns"]),
            )
            for group, entries, _ in groups_in(values["recorder"].encode())
            for it in entries
            if int(it["time_created_ns"]) >= begun_ns and not it["is_p2p"]
        ]
        waits = [
            Call(
                group=_popdist_group(members),
                number=int(number),
                name=str(name),
                begin_ns=int(begin),
                end_ns=int(end),
            )
            for members, number, name, begin, end in values["waits"]
        ]
        return replace(
            about,
            thread=str(int(values["thread"])),
            first_step=int(values["first_step"]),
            begun_ns=begun_ns,
            ended_ns=int(values["ended_ns"]),
            exchanges=tuple(Exchange(*map(int, it)) for it in values["exchanges"] if it),
            calls=tuple(sorted((*calls, *waits), key=lambda it: it.begin_ns)),
        )
    except (*MALFORMED, OverflowError) as error:
        raise ValueError(f"it is damaged: {error}") from None


def _popdist_group(members: Sequence[int]) -> str:
    return f"{POPDIST_GROUP} {fold_numbers(members)}" if members else POPDIST_GROUP


def read_recorded(profile: str, workers: str, thread: str, to_ours: Callable[[int], int]) -> Recorded:
    """Return the events in the texts of the profiler and of DataLoader workers. Raise ValueError if damaged."""
    names = {thread: "main thread"}
    slices, arrows = _read_profile(profile, names)
    loads = _read_workers(workers)
    names.update({it.row: f"loader {it.row}" for it in loads})
    return Recorded(
        # a clock never runs backwards, so that all stay nested
        slices=_nested(
            it._replace(begin_ns=to_ours(it.begin_ns), end_ns=to_ours(it.end_ns)) for it in (*slices, *loads)
        ),
        arrows=[it._replace(at_ns=to_ours(it.at_ns)) for it in arrows],
        row_names=names,
    )


def _read_profile(text: str, names: dict[str, str]) -> tuple[list[Slice], list[Arrow]]:
    """Return operations and arrows in the output of torch's profiler; add the names of rows to ``names``."""
    values = _object(text)
    slices, arrows = [], []
    try:
        base_ns = int(values["baseTimeNanoseconds"])
        for event in values["traceEvents"]:
            kind, category = event["ph"], event.get("cat")
            if kind == "X" and category not in (None, "Trace", "Traces"):
                slices.append(_slice(event, base_ns, names))
            elif kind in "sf" and category is not None:
                row, at_ns = _row(event, names), base_ns + round(event["ts"] * _NS_PER_US)
                arrows.append(Arrow(row, category, int(event["id"]), kind == "f", at_ns))
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"it is damaged: {error}") from None
    return slices, arrows


def _slice(event: Mapping[str, Any], base_ns: int, names: dict[str, str]) -> Slice:
    begin_ns = base_ns + round(event["ts"] * _NS_PER_US)
    category, arguments_of_torch = event["cat"], event.get("args", {})
    arguments = (
        {key: arguments_of_torch[key] for key in _KEPT_ARGUMENTS if key in arguments_of_torch}
        if category in GPU_CATEGORIES
        else {}
    )
    row = _row(event, names)
    return Slice(row, event["name"], category, begin_ns, begin_ns + round(event["dur"] * _NS_PER_US), arguments)


def _row(event: Mapping[str, Any], names: dict[str, str]) -> str:
    """Return the name of an event's row (a thread, or a stream of a GPU), and add its title to ``names``."""
    is_of_gpu = event["cat"] in GPU_CATEGORIES or (event["cat"] == "ac2g" and event["ph"] == "f")
    row = f"gpu {event['pid']} {event['tid']}" if is_of_gpu else str(event["tid"])
    names.setdefault(row, f"GPU {event['pid']} stream {event['tid']}" if is_of_gpu else f"thread {row}")
    return row


def _read_workers(text: str) -> list[Slice]:
    """Return the operations of DataLoader workers in ``text``, except damaged lines."""
    slices = []
    for line in text.splitlines():
        with suppress(ValueError, TypeError):
            pid, name, begin_ns, end_ns = json.loads(line)
            slices.append(Slice(f"worker {int(pid)}", str(name), "loader", int(begin_ns), int(end_ns), {}))
    return slices


def _nested(slices: Iterable[Slice]) -> list[Slice]:
    """Return ``slices`` sorted by row and time; shorten a slice that, by rounding, ends after its outer slice."""
    nested: list[Slice] = []
    around: list[Slice] = []
    for one in sorted(slices, key=lambda it: (it.row, it.begin_ns, -it.end_ns)):
        while around and (around[-1].row != one.row or around[-1].end_ns <= one.begin_ns):
            around.pop()
        end_ns = min(one.end_ns, around[-1].end_ns) if around else one.end_ns
        around.append(one._replace(end_ns=max(one.begin_ns, end_ns)))
        nested.append(around[-1])
    return nested


def _object(text: str) -> dict[str, Any]:
    if not text:
        raise ValueError("it is empty, as what is written to a full disk")
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - the text is damaged, and the caller catches ValueError
    return values
