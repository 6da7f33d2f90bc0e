"""Which cores and which memory the processes of a host are bound to, as values. Pure."""

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum


class ProcessPlacement(StrEnum):
    """How the instances of a host are placed on its cores; `poprun.plan.placement` says what each one does."""

    SPREADNUMA = "spreadnuma"
    COMPACT = "compact"
    CORE = "core"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What some instances of a host are bound to, on every host of the job alike.

    Attributes:
        instances: Their indices among the instances of the host, ascending.
        cores: Cores on which their threads may run, ascending; at least one.
        memory_nodes: NUMA nodes from which they take memory, ascending; empty leaves that to the kernel.
    """

    instances: tuple[int, ...]
    cores: tuple[int, ...]
    memory_nodes: tuple[int, ...]

    def holds(self, instance: int) -> bool:
        """Whether ``instance`` is one of ``instances``."""
        position = bisect_left(self.instances, instance)
        return self.instances[position : position + 1] == (instance,)

    def share_of(self, instance: int) -> tuple[int, ...]:
        """The part of ``cores`` that one of ``instances`` has when they share them out; at least one core."""
        position, count = bisect_left(self.instances, instance), len(self.instances)
        first = position * len(self.cores) // count
        return self.cores[first : max(first + 1, (position + 1) * len(self.cores) // count)]
