"""Which numbers of the rows of gradients each instance needs, where sharded optimizers update all of a model.

An instance that updates some elements needs the sum of their gradients only. That is so as long as every parameter
that is trained belongs to a sharded optimizer; the instances tell each other, and one of them is enough to have
everybody get everything.
"""

import hashlib
import weakref
from collections.abc import Sequence
from typing import Final

from popdist.gradients.flat_gradients import FlatGradients, GradientRows
from popdist.gradients.ownership import ranges_of
from popdist.gradients.partial_gradients import StepGradients
from popdist.gradients.rows import num_reals
from popdist.gradients.scattering import joined, scatter_sum
from popdist.gradients.shards import Ranges
from popdist.groups import Group
from popdist.layout import ReplicaLayout


class GradientParts:
    """The parts of one model's gradients.

    Args:
        gradients: Of the model; not kept alive by this.
        ranges: For each of its parameters, by position, what each instance updates.
    """

    def __init__(self, gradients: FlatGradients, ranges: Sequence[Ranges]) -> None:
        self.ranges = ranges
        self._kinds = gradients.kinds
        self._names = gradients.names
        self._wanted: list[list[list[range]]] = []
        for kind in gradients.kinds:
            runs: list[list[range]] = [[] for _ in ranges[0]]
            for index, parameter, start in kind.members:
                times = num_reals(parameter) // max(1, parameter.numel())
                for wanted, it in zip(runs, ranges[index], strict=True):
                    wanted.append(range(start + times * it.start, start + times * it.stop))
            self._wanted.append([joined(it) for it in runs])
        digest = hashlib.blake2b(repr(ranges).encode(), digest_size=7).digest()
        self.number = 1 + int.from_bytes(digest, "little")

    def add(self, group: Group, layout: ReplicaLayout, own: Sequence[GradientRows], over: float) -> GradientRows:
        """The sum over all replicas, divided by ``over``, where this instance needs it.

        Args:
            group: All instances of the job, which all call this.
            layout: Which replicas each of them owns.
            own: This instance's part of the tree.
            over: The same on all instances.

        Returns:
            The first of ``own``; what stands elsewhere in it is nothing in particular.

        Raises:
            BackendError: If an instance was lost or did not come in time.
        """
        rows_of_nodes = zip(*(it.rows for it in own), strict=True)
        for row_of_nodes, wanted in zip(rows_of_nodes, self._wanted, strict=True):
            scatter_sum(group, layout, row_of_nodes, wanted)
            if over != 1:
                for run in wanted[group.backend.instance_index]:
                    row_of_nodes[0][run.start : run.stop].div_(over)
        return own[0]

    def cover(self, group: Group) -> None:
        """Make every ``.grad`` one of which this instance has its part."""
        step = StepGradients(group)
        for kind in self._kinds:
            for index, parameter, _ in kind.members:
                step.cover(self._names[index], parameter, self.ranges[index])


_known: Final[weakref.WeakKeyDictionary[FlatGradients, GradientParts]] = weakref.WeakKeyDictionary()


def parts_of(gradients: FlatGradients) -> GradientParts | None:
    """The parts of gradients; None where an instance needs more than what it updates, as far as this one knows."""
    parameters = {index: parameter for kind in gradients.kinds for index, parameter, _ in kind.members}
    ranges = [ranges_of(parameters[index]) for index in range(len(parameters))]
    found = [it for it in ranges if it is not None]
    if not found or len(found) < len(ranges):
        return None
    known = _known.get(gradients)
    if known is None or known.ranges != found:
        known = _known[gradients] = GradientParts(gradients, found)
    return known
