"""The collectives of a host group over tensors that live anywhere."""

from collections.abc import Sequence

from torch import Tensor

from popdist.host_memory.all_reduce import AllReduce
from popdist.host_memory.combination import Op
from popdist.host_memory.host_group import HostGroup
from popdist.host_memory.quick_sums import QuickSum, alone
from popdist.host_memory.slots import Slots
from popdist.host_memory.transfers import Moving


class HostCollectives:
    """Collectives of a group; each call is one, on every rank, with the same arguments but for the values.

    Tensors are on the CPU, strided, and without gradient; in all calls but :meth:`all_reduce` they are flat and
    contiguous, too. Reductions are over the dtypes of `popdist.host_memory.combination.DTYPES`, half dtypes in
    float32, in the order of `popdist.tree`; "mean" is for floating dtypes only. Other calls take any dtype.

    Every call raises BackendError if a rank was lost or did not come in time, and CollectiveError if the ranks are
    not in the same one; and the reductions ValueError if there is no such operation on the dtype, before anything
    has been sent.

    Attributes:
        group: The ranks.
        size: How many they are.
        add_quickly: Whether the one tensor of a list has become the sum over the ranks, as by :meth:`all_reduce`;
            where it answers no, nothing has happened.
    """

    def __init__(self, group: HostGroup) -> None:
        self.group = group
        self.size = group.size
        self._is_alone = group.size == 1
        self.add_quickly: QuickSum = alone
        if not self._is_alone:
            slots = Slots(group)
            self._moving = Moving(group, slots)
            self.all_reduce_together = AllReduce(group, slots)
            self.add_quickly = self.all_reduce_together.quickly

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """Combine the tensors of all ranks, in place: the same bits on each of them."""
        if not self._is_alone:
            self.all_reduce_together(tensor, op)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite the tensor of every rank with that of rank ``root``."""
        if not self._is_alone:
            self._moving.broadcast(tensor, root)

    def reduce(self, tensor: Tensor, op: Op, root: int) -> None:
        """Combine the tensors of all ranks into that of rank ``root``; the others stay as they are."""
        if not self._is_alone:
            self._moving.reduce(tensor, op, root)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """``outputs[rank]`` becomes a copy of the tensor of ``rank``, which has the same length everywhere."""
        if self._is_alone:
            outputs[0].copy_(tensor)
        else:
            self._moving.all_gather(outputs, tensor)

    def reduce_scatter(self, output: Tensor, tensors: Sequence[Tensor], op: Op) -> None:
        """``output`` becomes the combination of what all ranks have at this rank's place in ``tensors``."""
        if self._is_alone:
            output.copy_(tensors[0])
        else:
            self._moving.reduce_scatter(output, tensors, op)

    def all_to_all(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """``outputs[rank]`` becomes what ``rank`` has at this rank's place in ``tensors``; lengths may differ."""
        if self._is_alone:
            outputs[0].copy_(tensors[0])
        else:
            self._moving.all_to_all(outputs, tensors)

    def barrier(self, timeout_seconds: float | None = None) -> None:
        """Wait for all ranks; see :meth:`HostGroup.barrier`."""
        self.group.barrier(timeout_seconds)

    def set_timeout(self, timeout_seconds: float) -> None:
        """How long a lost or late rank is waited for from now on."""
        self.group.flags.timeout_seconds = timeout_seconds

    def close(self) -> None:
        """Leave: the other ranks see it."""
        self.group.close()

    def break_off(self) -> None:
        """End a call that is going on in another thread, with an error."""
        self.group.flags.break_off()
