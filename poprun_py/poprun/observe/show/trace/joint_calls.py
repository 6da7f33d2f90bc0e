"""The collectives in a trace that several instances called together, and when each call ended. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from poprun.observe.account.arrivals import Arrivals
from poprun.observe.account.evidence import Call, CallKey
from poprun.observe.show.trace.recorded import GPU_ANNOTATION, Slice

_ROUNDING_NS: Final = 1000


def find_joint_calls(calls: Mapping[int, Sequence[Call]]) -> dict[CallKey, Arrivals]:
    """Return when each instance called a collective, for collectives that all traced group members called."""
    arrivals: dict[CallKey, dict[int, int]] = defaultdict(dict)
    members: dict[str, set[int]] = defaultdict(set)
    for instance, own_calls in calls.items():
        for call in own_calls:
            arrivals[call.key][instance] = call.begin_ns
            members[call.group].add(instance)
    return {key: times for key, times in arrivals.items() if len(times) > 1 and times.keys() == members[key[0]]}


def with_ends(calls: Iterable[Call], slices: Iterable[Slice]) -> list[Call]:
    """Return the ``calls`` that ended in the trace; a call without an end gets the end of its operation in
    ``slices``, because a process group does its operations in the order of its calls.
    """
    work: dict[str, list[Slice]] = defaultdict(list)
    for one in sorted(slices, key=lambda it: it.begin_ns):
        if ":" in one.name and one.category in ("user_annotation", GPU_ANNOTATION):
            work[one.name].append(one)
    ended = []
    for call in calls:
        if call.end_ns:
            ended.append(call)
            continue
        done = work.get(call.name, [])
        if any(it.category == GPU_ANNOTATION for it in done):
            done = work[call.name] = [it for it in done if it.category == GPU_ANNOTATION]
        while done and done[0].begin_ns < call.begin_ns - _ROUNDING_NS:
            done.pop(0)
        if done:
            ended.append(replace(call, end_ns=done.pop(0).end_ns))
    return ended
