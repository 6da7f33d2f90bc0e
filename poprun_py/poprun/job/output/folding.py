"""Folding of lines that several instances print: each such line is shown once. Pure: time is an argument.

The lines of each instance wait in a queue. A line that is in all queues is shown at once, after the lines before
it in each queue. Any other line is shown when it has waited long enough, together with the instances that have
printed it by then. Lines leave a queue only at the front, so that every instance's lines stay in order.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

HOLD_SECONDS: Final = 0.2  # longest time that a line waits for other instances to print it
MAX_HELD_BYTES: Final = 1024 * 1024  # if more bytes wait, the oldest lines are shown


class Folded(NamedTuple):
    """A line of output, and the ascending indices of all instances that have printed this line."""

    instances: tuple[int, ...]
    line: bytes


class _Held(NamedTuple):
    number: int
    due_at_seconds: float
    line: bytes


class Folder:
    """A buffer of output lines, so that a line that several instances print within 0.2 s is shown only once."""

    def __init__(self, instances: Iterable[int]) -> None:
        self._queues: dict[int, deque[_Held]] = {instance: deque() for instance in sorted(instances)}
        self._running = set(self._queues)
        self._counts: dict[bytes, dict[int, int]] = {}  # how often each line is in the queue of each instance
        self._num_lines = 0
        self._held_bytes = 0

    def add(self, instance: int, line: bytes, now_seconds: float) -> list[Folded]:
        """Add one whole line that ``instance`` has printed; return the buffered lines that must be shown now."""
        counts = self._counts.setdefault(line, {})
        counts[instance] = counts.get(instance, 0) + 1
        self._queues[instance].append(_Held(self._num_lines, now_seconds + HOLD_SECONDS, line))
        self._num_lines += 1
        self._held_bytes += len(line)
        shown: list[Folded] = []
        if self._is_everybodys(line):
            shown += self._remove_until(instance, 0)
        while self._held_bytes > MAX_HELD_BYTES:
            shown.append(self._remove_next(self._oldest(self._queues)))
        return shown

    def add_lines(self, instance: int, lines: bytes, now_seconds: float) -> list[Folded]:
        """Add output of ``instance``; return the lines to show now. A progress bar's updates are shown at once."""
        shown: list[Folded] = []
        for line in lines.splitlines(keepends=True):
            if line.endswith(b"\n"):
                shown += self.add(instance, line, now_seconds)
            else:
                shown += [*self._remove_until(instance, 0), Folded((instance,), line)]
        return shown

    def due(self, now_seconds: float) -> list[Folded]:
        """Remove and return the buffered lines that have waited 0.2 s for equal lines of other instances."""
        shown: list[Folded] = []
        while (due := self.due_at_seconds) is not None and due <= now_seconds:
            shown.append(self._remove_next(self._oldest(self._queues)))
        return shown

    def end(self, instance: int) -> list[Folded]:
        """Record that ``instance`` has ended; return the buffered lines that now wait for no other instance."""
        self._running.discard(instance)
        if not self._running:
            return [folded for other in self._queues for folded in self._remove_until(other, 0)]
        one = min(self._running)
        places = [place for place, held in enumerate(self._queues[one], 1) if self._is_everybodys(held.line)]
        return self._remove_until(one, len(self._queues[one]) - places[-1]) if places else []

    @property
    def due_at_seconds(self) -> float | None:
        """The time at which the oldest buffered line must be shown; None if no line is buffered."""
        return min((queue[0].due_at_seconds for queue in self._queues.values() if queue), default=None)

    def _is_everybodys(self, line: bytes) -> bool:
        return self._running <= self._counts[line].keys()

    def _remove_until(self, instance: int, num_left: int) -> list[Folded]:
        """Remove and return buffered lines, oldest first, until ``instance`` has only ``num_left`` lines left."""
        queue, shown = self._queues[instance], []
        while len(queue) > num_left:
            holders = self._counts[queue[len(queue) - num_left - 1].line]
            shown.append(self._remove_next(self._oldest(holders)))
        return shown

    def _oldest(self, instances: Iterable[int]) -> int:
        """Return which of ``instances`` has the oldest line at the front of its queue of buffered lines."""
        return min(
            (instance for instance in instances if self._queues[instance]),
            key=lambda instance: self._queues[instance][0].number,
        )

    def _remove_next(self, instance: int) -> Folded:
        """Remove and return the first buffered line of ``instance``. If another instance printed other lines
        before the same line, take the first of those instead, so that each instance's lines stay in order.
        """
        seen = {instance}
        line = self._queues[instance][0].line
        while (other := self._find_other_first(line, seen)) is not None:
            seen.add(other)
            line = self._queues[other][0].line
        return self._remove(line)

    def _find_other_first(self, line: bytes, seen: set[int]) -> int | None:
        """Return an instance, not in ``seen``, that printed other lines before ``line``; None if there is none."""
        others = (other for other in self._counts[line] if other not in seen)
        return next((other for other in others if self._queues[other][0].line != line), None)

    def _remove(self, line: bytes) -> Folded:
        """Remove ``line`` from each instance's queue that begins with it; return the line and these instances."""
        counts = self._counts[line]
        instances = sorted(instance for instance in counts if self._queues[instance][0].line == line)
        for instance in instances:
            self._queues[instance].popleft()
            counts[instance] -= 1
            if not counts[instance]:
                del counts[instance]
        if not counts:
            del self._counts[line]
        self._held_bytes -= len(line) * len(instances)
        return Folded(tuple(instances), line)
