"""The merged trace as JSON for Perfetto and chrome://tracing: each instance is a process with rows. Pure.

The format is Chrome's Trace Event Format. Times in the file are microseconds since the first window began.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from poprun.observe.account.arrivals import Arrivals
from poprun.observe.account.evidence import Call, CallKey
from poprun.observe.show.trace.recorded import (
    COLLECTIVE_NAME,
    DATA_NAME,
    POPDIST_GROUP,
    Arrow,
    Recorded,
    Slice,
)

Places = Mapping[str, Mapping[str, int]]  # by row: the numbers of its process and its thread in the file

_ROWS_PER_INSTANCE: Final = 1 << 16
_ARROWS_PER_INSTANCE: Final = 1 << 40
_PHASES, _COLLECTIVES = "phases", "collectives"
_BACKWARD: Final = "autograd::engine::evaluate_function"
_OPTIMIZER: Final = "Optimizer."


def instance_events(
    index: int, title: str, recorded: Recorded, thread: str, calls: Sequence[Call], origin_ns: int
) -> Iterator[dict[str, object]]:
    """Yield the trace's events of one instance: operations, phases of its main ``thread``, collectives."""
    placed = lanes_of(calls)
    num_lanes = 1 + max((lane for lane, _ in placed), default=0)
    rows = sorted(recorded.row_names.items(), key=lambda it: (it[0] != thread, it[1]))
    names = {_PHASES: _PHASES, **{_lane(number): _lane(number) for number in range(num_lanes)}, **dict(rows)}
    places = {row: _place(index, number) for number, row in enumerate(names)}
    collectives = [
        Slice(_lane(lane), it.name, "collective", it.begin_ns, it.end_ns, {"group": it.group, "number": it.number})
        for lane, it in placed
    ]
    yield from _titles(index, title, names, places)
    for one in (*recorded.slices, *phases_of(recorded.slices, thread, calls), *collectives):
        yield {**_slice(one, origin_ns), **places[one.row]}
    yield from _arrows(index, recorded.arrows, places, origin_ns)


def _place(index: int, number: int) -> dict[str, int]:
    """Return Chrome's process and thread number for a row of an instance; Perfetto itself uses process 0."""
    return {"pid": 1 + index, "tid": 1 + index * _ROWS_PER_INSTANCE + number}


def _titles(index: int, title: str, names: Mapping[str, str], places: Places) -> Iterator[dict[str, object]]:
    """Yield the trace's events that give an instance's process and rows their names and their order."""
    process = {"ph": "M", "pid": 1 + index}
    yield {**process, "name": "process_name", "args": {"name": title}}
    yield {**process, "name": "process_sort_index", "args": {"sort_index": index}}
    for row, name in names.items():
        thread = {"ph": "M", **places[row]}
        yield {**thread, "name": "thread_name", "args": {"name": name}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": thread["tid"]}}


def joint_events(
    joint_calls: Mapping[CallKey, Arrivals], calls: Mapping[int, Iterable[Call]], origin_ns: int
) -> Iterator[dict[str, object]]:
    """Yield the two ends of an arrow for each collective: at the instance that called first, and at the last."""
    lanes = {index: {call.key: lane for lane, call in lanes_of(own_calls)} for index, own_calls in calls.items()}
    for number, (key, arrivals) in enumerate(joint_calls.items()):
        callers = sorted((at, instance) for instance, at in arrivals.items() if key in lanes.get(instance, ()))
        if len(callers) > 1:
            for end, (at_ns, instance) in (({"ph": "s"}, callers[0]), ({"ph": "f", "bp": "e"}, callers[-1])):
                place = _place(instance, 1 + lanes[instance][key])
                moment = {**place, "ts": _microseconds(at_ns - origin_ns)}
                yield {**end, "id": number + 1, "cat": "collective", "name": key[2], **moment}


def lanes_of(calls: Iterable[Call]) -> list[tuple[int, Call]]:
    """Return each call with a number of a row, so that calls which overlap in time are in different rows."""
    free_at: list[int] = []
    placed = []
    for call in sorted(calls, key=lambda it: it.begin_ns):
        lane = next((number for number, at in enumerate(free_at) if at <= call.begin_ns), len(free_at))
        free_at[lane : lane + 1] = [call.end_ns]
        placed.append((lane, call))
    return placed


def _lane(number: int) -> str:
    return _COLLECTIVES if number == 0 else f"{_COLLECTIVES} {number + 1}"


def phases_of(slices: Sequence[Slice], thread: str, calls: Sequence[Call]) -> list[Slice]:
    """Return the phases of the training loop, such as forward, found from the operations of ``thread``."""
    phases: list[Slice] = []
    waits = [
        Slice(thread, it.name, "wait", it.begin_ns, it.end_ns, {})
        for it in calls
        if it.group.startswith(POPDIST_GROUP)
    ]
    for one in sorted((*_outermost(slices, thread), *waits), key=lambda it: it.begin_ns):
        phase = _phase(one)
        begin_ns = max(one.begin_ns, phases[-1].end_ns) if phases else one.begin_ns
        if phases and phases[-1].name == phase:
            phases[-1] = phases[-1]._replace(end_ns=max(phases[-1].end_ns, one.end_ns))
        elif one.end_ns > begin_ns:
            phases.append(Slice(_PHASES, phase, "phase", begin_ns, one.end_ns, {}))
    return phases


def _outermost(slices: Sequence[Slice], thread: str) -> Iterator[Slice]:
    """Yield the operations that no other operation called: of the main thread and of autograd's threads."""
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


def _arrows(index: int, arrows: Iterable[Arrow], places: Places, origin_ns: int) -> Iterator[dict[str, object]]:
    """Yield the events of torch's arrows whose two ends were recorded, renumbered to be unique in the trace."""
    ends: dict[tuple[str, int], list[Arrow]] = {}
    for one in arrows:
        ends.setdefault((one.name, one.number), []).append(one)
    for number, pair in enumerate(ends.values(), (1 + index) * _ARROWS_PER_INSTANCE):
        if sorted(it.is_end for it in pair) != [False, True]:
            continue
        for one in pair:
            kind = {"ph": "f", "bp": "e"} if one.is_end else {"ph": "s"}
            moment = {**places[one.row], "ts": _microseconds(one.at_ns - origin_ns)}
            yield {**kind, "id": number, "cat": one.name, "name": one.name, **moment}


def _microseconds(nanoseconds: float) -> float:
    return nanoseconds / 1000


def write_document(about: Mapping[str, object], events: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """Yield the text of the trace file piece by piece: the description ``about``, and all ``events``."""
    yield f'{{"displayTimeUnit":"ms","poprun":{json.dumps(about)},"traceEvents":[\n'
    separator = ""
    for event in events:
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ",\n"
    yield "\n]}\n"
