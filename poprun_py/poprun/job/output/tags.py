"""What stands before each line: the instance that printed it, for tools or for people. Pure."""

from functools import lru_cache
from typing import Final

from poprun.plan.plan import LaunchPlan
from poprun.text.host_names import fold_hosts
from poprun.text.ranges import fold_numbers
from poprun.text.tag_format import PIPE_TAG, TERMINAL_TAG, fill_tag

_COLOURS: Final = (36, 33, 32, 35, 34, 31)
_NUM_REMEMBERED: Final = 4096


class Tags:
    """The tags of one of poprun's streams.

    Args:
        plan: The job; it says whether there are tags at all, and which.
        stream: ``stdout`` or ``stderr``.
        is_terminal: Whether people read them: then they are short.
        is_coloured: Whether each instance has its colour.
    """

    def __init__(self, plan: LaunchPlan, stream: str, *, is_terminal: bool, is_coloured: bool) -> None:
        self._plan = plan
        self._stream = stream
        asked = plan.output.tag_format
        self._template = (TERMINAL_TAG if is_terminal else PIPE_TAG) if asked is None else asked
        self._is_coloured = is_coloured
        self.of = lru_cache(maxsize=_NUM_REMEMBERED)(self._make)

    def _make(self, instances: tuple[int, ...]) -> bytes:
        """The tag of a line that these instances printed; it has a colour if they are one."""
        if not self._plan.is_tagged:
            return b""
        text = fill_tag(self._template, self._values(instances))
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
            "replicas": fold_numbers(replica for plan in plans for replica in plan.replicas),
            "stream": self._stream,
        }
