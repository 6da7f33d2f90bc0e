"""What is wrong with a merged trace, by the rules of Chrome's Trace Event Format and those of ours."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
Row = tuple[int, int]


def faults(document: Mapping[str, Any]) -> list[str]:
    """Each fault in words; none in a good trace."""
    events: Sequence[Event] = document["traceEvents"]
    slices: dict[Row, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
    return [*_unnamed(events, slices), *_not_nested(slices), *_bad_arrows(events, slices)]


def _unnamed(events: Sequence[Event], slices: Mapping[Row, object]) -> Iterator[str]:
    """Processes and rows have a name and a place each, and only one."""
    given = [(it["name"], it["pid"], it.get("tid")) for it in events if it["ph"] == "M"]
    if len(set(given)) < len(given):
        yield "a name or a place is given twice"
    if any(process == 0 for process, _ in slices):
        yield "a process has number 0, which Perfetto takes for the kernel's"
    rows = {(name, *row) for row in slices for name in ("thread_name", "thread_sort_index")}
    processes = {(name, pid, None) for pid, _ in slices for name in ("process_name", "process_sort_index")}
    yield from (f"there is no {missing}" for missing in (rows | processes) - set(given))
    numbers = [row for _, row in slices]
    if len(set(numbers)) < len(numbers):
        yield "two processes have a row of the same number"


def _not_nested(slices: Mapping[Row, Sequence[Event]]) -> Iterator[str]:
    for row, own in slices.items():
        around: list[int] = []
        for begin, end in sorted(map(_nanoseconds, own), key=lambda it: (it[0], -it[1])):
            if end < begin:
                yield f"a slice on {row} ends before it begins"
            while around and around[-1] <= begin:
                around.pop()
            if around and end > around[-1]:
                yield f"a slice on {row} begins in another one at {begin} and ends after it"
            around.append(end)


def _bad_arrows(events: Sequence[Event], slices: Mapping[Row, Sequence[Event]]) -> Iterator[str]:
    """An arrow has one begin and one end, not earlier, each at a slice; no two have the same number."""
    arrows: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    for number, ends in arrows.items():
        if sorted(it["ph"] for it in ends) != ["f", "s"] or len({(it["cat"], it["name"]) for it in ends}) > 1:
            yield f"arrow {number} has {len(ends)} ends"
            continue
        begin, end = sorted(ends, key=lambda it: it["ph"] == "f")
        if end["ts"] < begin["ts"]:
            yield f"arrow {number} ends before it begins"
        for one in ends:
            at = round(one["ts"] * 1000)
            spans = map(_nanoseconds, slices[one["pid"], one["tid"]])
            if not any(first <= at <= last for first, last in spans):
                yield f"an end of arrow {number} is at no slice"


def _nanoseconds(event: Event) -> tuple[int, int]:
    return round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
