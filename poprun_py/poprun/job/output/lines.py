r"""Lines: divided from a byte stream, and tagged with the instance that printed the line.

Bytes are not decoded, so that no character is damaged or lost. A line ends with ``\n``, ``\r\n`` or ``\r`` (a step
of a progress bar). Lines are passed on in blocks, as they were read: whole lines, one after the other.
"""

from functools import lru_cache
from typing import Final

from poprun.plan.plan import LaunchPlan
from poprun.plan.request import POPRUN_TAG, USUAL_TAG
from poprun.text.ranges import fold_hosts, fold_numbers

STEP_SECONDS: Final = 1.0
_CURSOR_UP: Final = b"\x1b[A"
MAX_LINE_BYTES: Final = 1024 * 1024  # a longer line is passed on in parts
_COLOURS: Final = (36, 33, 32, 35, 34, 31)
_NUM_REMEMBERED: Final = 4096


class LineSplitter:
    """A buffer that divides a stream of bytes into whole lines."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_drawing = False

    def feed(self, data: bytes) -> bytes:
        r"""Add ``data``; return the lines now complete. A last line that ends with ``\r`` waits for a ``\n``."""
        data = self._rest + data
        after_bar = data.rfind(b"\r", 0, -1) + 1
        end = max(after_bar, data.rfind(b"\n") + 1)
        if len(data) - end > MAX_LINE_BYTES:
            end = len(data)
        self._rest = data[end:]
        if end:
            self._is_drawing = end == after_bar
        return data[:end]

    def finish(self) -> bytes:
        """Return the last line of the stream, with a line break added if the program has printed none."""
        rest, self._rest = self._rest, b""
        return rest if not rest or rest.endswith(b"\r") else rest + b"\n"

    @property
    def step(self) -> bytes:
        """A progress bar's next update, as far as it has arrived; empty if no progress bar is drawn."""
        # programs write ``\r`` before or after each step; without this, a step would be shown one step late
        if self._rest.endswith(b"\r"):
            return self._rest[:-1]
        return self._rest if self._is_drawing else b""


def tagged(tag: bytes, lines: bytes) -> bytes:
    """Return ``lines``, one or more whole lines of output, with the prefix ``tag`` before each line."""
    if not tag or not lines:
        return lines
    if b"\r" in lines:
        return b"".join(tag + line for line in lines.splitlines(keepends=True))
    return tag + lines[:-1].replace(b"\n", b"\n" + tag) + lines[-1:]


class StepLines:
    """A filter that shows each progress bar in a pipe or file as lines, with at most one update per second."""

    def __init__(self) -> None:
        self._shown_at_seconds: dict[tuple[int, ...], float] = {}
        self._waiting: dict[tuple[int, ...], bytes] = {}  # the last step that was not shown

    def show(self, instances: tuple[int, ...], lines: bytes, now_seconds: float) -> bytes:
        """Return the part of ``lines`` to show now: of a progress bar, show at most one update per second."""
        has_bar = instances in self._shown_at_seconds
        if not (has_bar or b"\r" in lines or _CURSOR_UP in lines):
            return lines
        shown = []
        for line in lines.splitlines(keepends=True):
            text = line.replace(_CURSOR_UP, b"").rstrip()
            if not (line.endswith(b"\r") or _CURSOR_UP in line):
                self._waiting.pop(instances, None)
                shown += [line] if text or not has_bar else []
            elif not text:
                self._waiting.pop(instances, None)
            elif now_seconds - self._shown_at_seconds.get(instances, -STEP_SECONDS) >= STEP_SECONDS:
                self._shown_at_seconds[instances] = now_seconds
                shown.append(text + b"\n")
            else:
                self._waiting[instances] = text + b"\n"
        return b"".join(shown)

    def end(self, instances: tuple[int, ...]) -> bytes:
        """Return the last update of the progress bar of ``instances`` if it was not shown; empty if it was."""
        self._shown_at_seconds.pop(instances, None)
        return self._waiting.pop(instances, b"")


class Tags:
    """The prefixes, coloured if asked for, that say which instance printed a line on poprun's stdout or stderr."""

    def __init__(self, plan: LaunchPlan, stream: str, *, is_coloured: bool) -> None:
        self._plan = plan
        self._stream = stream
        tag_format = plan.output.tag_format
        self._template = (POPRUN_TAG if plan.output.is_tagged else USUAL_TAG) if tag_format is None else tag_format
        self._is_coloured = is_coloured
        self.of = lru_cache(maxsize=_NUM_REMEMBERED)(self._make)

    def _make(self, instances: tuple[int, ...]) -> bytes:
        """Return the prefix of a line that ``instances`` printed; coloured only if there is one instance."""
        if not self._plan.is_tagged:
            return b""
        text = self._template.format_map(self._values(instances))
        label = text.rstrip(" ")
        if self._is_coloured and label and len(instances) == 1:
            space = text[len(label) :]
            text = f"\x1b[{_COLOURS[instances[0] % len(_COLOURS)]}m{label}\x1b[0m{space}"
        return text.encode(errors="surrogateescape")

    def _values(self, instances: tuple[int, ...]) -> dict[str, str]:
        plans = [self._plan.instance(index) for index in instances]
        return {
            "instance": fold_numbers(instances),
            "local_instance": fold_numbers(sorted({plan.local_index for plan in plans})),
            "host": fold_hosts(dict.fromkeys(plan.host for plan in plans)),
            "replicas": fold_numbers(sorted({replica for plan in plans for replica in plan.replicas})),
            "stage": fold_numbers(sorted({plan.part.stage for plan in plans})),
            "shard": fold_numbers(sorted({plan.part.shard for plan in plans})),
            "stream": self._stream,
        }
