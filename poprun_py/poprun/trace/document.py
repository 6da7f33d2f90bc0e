"""The merged trace as text that Perfetto and chrome://tracing read: an instance is a process, with rows. Pure.

The form is Chrome's Trace Event Format; times in the file are microseconds since the first window began.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from poprun.trace.joint_calls import JointCall
from poprun.trace.recorded import COLLECTIVE_NAME, DATA_NAME, POPDIST_GROUP, Arrow, CollectiveCall, Recorded, Slice

Key = tuple[str, int, str]  # what a collective has in common on all instances

_A_PAIR: Final = 2
_ROWS_PER_INSTANCE: Final = 1 << 16
_ARROWS_PER_INSTANCE: Final = 1 << 40
_PHASES, _COLLECTIVES = "phases", "collectives"
_BACKWARD: Final = "autograd::engine::evaluate_function"
_OPTIMIZER: Final = "Optimizer."
_HEAD: Final = '{"displayTimeUnit":"ms","poprun":'


class InstanceRows:
    """The numbers of an instance's rows in the file, in the order in which they are shown."""

    def __init__(self, index: int, recorded: Recorded, thread: str, num_lanes: int) -> None:
        self._index = index
        lanes = {_lane(number): _lane(number) for number in range(num_lanes)}
        rest = dict(sorted(recorded.row_names.items(), key=lambda it: (it[0] != thread, it[1])))
        self.names = {_PHASES: _PHASES, **lanes, **rest}
        self._numbers = {row: _number(index, place) for place, row in enumerate(self.names)}

    def place(self, row: str) -> dict[str, int]:
        """The process and thread of a row."""
        return {"pid": _process(self._index), "tid": self._numbers[row]}

    def describe(self, text: str) -> Iterator[dict[str, object]]:
        """The events that name and order the process, which is called ``text``, and its rows."""
        values = ("process_name", {"name": text}), ("process_sort_index", {"sort_index": self._index})
        for name, arguments in values:
            yield {"ph": "M", "pid": _process(self._index), "name": name, "args": arguments}
        for row, name in self.names.items():
            place = self.place(row)
            yield {"ph": "M", **place, "name": "thread_name", "args": {"name": name}}
            yield {"ph": "M", **place, "name": "thread_sort_index", "args": {"sort_index": place["tid"]}}


def _process(index: int) -> int:
    """The number of an instance's process: Perfetto takes number 0 for the kernel's idle process."""
    return 1 + index


def _number(index: int, place: int) -> int:
    return 1 + index * _ROWS_PER_INSTANCE + place


def instance_events(
    index: int, text: str, recorded: Recorded, thread: str, calls: Sequence[CollectiveCall], origin_ns: int
) -> Iterator[dict[str, object]]:
    """The events of one instance: its own, the phases of its main thread, and its collectives."""
    collectives = lanes_of(calls)
    rows = InstanceRows(index, recorded, thread, 1 + max((lane for lane, _ in collectives), default=0))
    yield from rows.describe(text)
    for one in (*recorded.slices, *phases_of(recorded.slices, thread, calls)):
        yield {**_slice(one, origin_ns), **rows.place(one.row)}
    for lane, call in collectives:
        arguments = {"group": call.group, "number": call.number}
        one = Slice(_lane(lane), call.name, "collective", call.begin_ns, call.end_ns, arguments)
        yield {**_slice(one, origin_ns), **rows.place(one.row)}
    yield from _arrows(index, recorded.arrows, rows, origin_ns)


def joint_events(
    joint_calls: Mapping[Key, JointCall], lanes: Mapping[int, Mapping[Key, int]], origin_ns: int
) -> Iterator[dict[str, object]]:
    """An arrow for each collective, from the first instance that came to the last, among those with ``lanes``."""
    for number, (key, joint) in enumerate(joint_calls.items()):
        came = sorted(
            (at, instance) for instance, at in joint.arrivals_ns.items() if key in lanes.get(instance, ())
        )
        if len(came) < _A_PAIR:
            continue
        for kind, (at_ns, instance) in (("s", came[0]), ("f", came[-1])):
            place = {"pid": _process(instance), "tid": _number(instance, 1 + lanes[instance][key])}
            moment = {"ts": _microseconds(at_ns - origin_ns), **({"bp": "e"} if kind == "f" else {})}
            yield {"ph": kind, "id": number + 1, "cat": "collective", "name": joint.name, **place, **moment}


def lanes_of(calls: Iterable[CollectiveCall]) -> list[tuple[int, CollectiveCall]]:
    """Each call with the first row that is free when it begins: several may be on their way at once."""
    free_at: list[int] = []
    placed = []
    for call in sorted(calls, key=lambda it: it.begin_ns):
        lane = next((number for number, at in enumerate(free_at) if at <= call.begin_ns), len(free_at))
        free_at[lane : lane + 1] = [call.end_ns]
        placed.append((lane, call))
    return placed


def _lane(number: int) -> str:
    return _COLLECTIVES if number == 0 else f"{_COLLECTIVES} {number + 1}"


def phases_of(slices: Sequence[Slice], thread: str, calls: Sequence[CollectiveCall]) -> list[Slice]:
    """The phases of a loop, by what its main thread and autograd's threads do; what is alike is joined."""
    made: list[Slice] = []
    waits = [
        Slice(thread, it.name, "wait", it.begin_ns, it.end_ns, {})
        for it in calls
        if it.group.startswith(POPDIST_GROUP)
    ]
    for one in sorted((*_outermost(slices, thread), *waits), key=lambda it: it.begin_ns):
        phase = _phase(one)
        begin_ns = max(one.begin_ns, made[-1].end_ns) if made else one.begin_ns
        if made and made[-1].name == phase:
            made[-1] = made[-1]._replace(end_ns=max(made[-1].end_ns, one.end_ns))
        elif one.end_ns > begin_ns:
            made.append(Slice(_PHASES, phase, "phase", begin_ns, one.end_ns, {}))
    return made


def _outermost(slices: Sequence[Slice], thread: str) -> Iterator[Slice]:
    """Operations that no other one has called: the main thread's, and autograd's in other threads."""
    end_ns = 0
    for one in slices:
        is_own = one.row == thread and (one.category == "cpu_op" or one.name.startswith((DATA_NAME, _OPTIMIZER)))
        if is_own and one.begin_ns >= end_ns:
            end_ns = one.end_ns
            yield one
        elif one.row != thread and one.name.startswith(_BACKWARD):
            yield one


def _phase(one: Slice) -> str:
    if one.name.startswith(DATA_NAME):
        return "data"
    if one.name.startswith(_OPTIMIZER):
        return "optimizer"
    if one.name.startswith(_BACKWARD):
        return "backward"
    return "communication" if one.category == "wait" or one.name.startswith(COLLECTIVE_NAME) else "forward"


def _slice(one: Slice, origin_ns: int) -> dict[str, object]:
    begin, end = _microseconds(one.begin_ns - origin_ns), _microseconds(one.end_ns - origin_ns)
    event = {"ph": "X", "name": one.name, "cat": one.category, "ts": begin, "dur": round(end - begin, 3)}
    return {**event, "args": one.arguments} if one.arguments else event


def _arrows(
    index: int, arrows: Iterable[Arrow], rows: InstanceRows, origin_ns: int
) -> Iterator[dict[str, object]]:
    """Torch's own arrows, with numbers that no other instance has; those that lack an end are left out."""
    ends: dict[tuple[str, int], list[Arrow]] = {}
    for one in arrows:
        ends.setdefault((one.name, one.number), []).append(one)
    for number, pair in enumerate(ends.values()):
        if sorted(it.is_end for it in pair) != [False, True]:
            continue
        for one in pair:
            place = {**rows.place(one.row), "ts": _microseconds(one.at_ns - origin_ns)}
            kind = {"ph": "f", "bp": "e"} if one.is_end else {"ph": "s"}
            yield {
                **kind,
                "id": (index + 1) * _ARROWS_PER_INSTANCE + number,
                "cat": one.name,
                "name": one.name,
                **place,
            }


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000


def write_document(about: Mapping[str, object], events: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """The pieces of the whole text."""
    yield f'{_HEAD}{json.dumps(about)},"traceEvents":[\n'
    separator = ""
    for event in events:
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ",\n"
    yield "\n]}\n"
