"""The results of micro batches, put together as `OutputMode` says."""

from typing import Any

import torch
from torch import Tensor

from poptorch.custom_types import Structure, put_together, taken_apart
from poptorch.enums import OutputMode
from poptorch.errors import Error


class Outputs:
    """What one call of a model gives: some micro batches' results, one after the other in dim 0.

    Args:
        mode: Final keeps the last result of each replica; EveryN each replica's N-th, 2N-th ...; All all of them;
            Sum adds up each replica's.
        period: N. At least 1.
        num_device_iterations: Of the call.
        num_accumulations: Micro batches of a replica in a step of the optimizer.
        num_replicas: Of this process.

    Raises:
        Error: If EveryN keeps nothing, or the mode is Default, which says nothing.
    """

    def __init__(
        self, mode: OutputMode, period: int, num_device_iterations: int, num_accumulations: int, num_replicas: int
    ) -> None:
        num_steps = num_device_iterations * num_accumulations
        if mode is OutputMode.Default:
            raise Error("OutputMode.Default is Final in training and All in inference: say which")
        if mode is OutputMode.EveryN and period > num_steps:
            raise Error(
                f"OutputMode.EveryN with a period of {period} keeps none of the {num_steps} micro batches that a "
                "replica has in one call"
            )
        self._mode = mode
        self._num_replicas = num_replicas
        self._period = {OutputMode.EveryN: period, OutputMode.Final: num_steps}.get(mode, 1)
        num_kept_steps = 1 if mode is OutputMode.Sum else num_steps // self._period
        self._num_kept = num_kept_steps * num_replicas
        self._is_one = num_steps * num_replicas == 1
        self.begin()

    def begin(self) -> None:
        """A call begins: nothing was kept yet."""
        self._num_seen = 0
        self._result: Any = None
        self._joined: list[_Joined] = []
        self._structure: Structure | None = None

    def add(self, value: Any) -> None:  # noqa: ANN401 - whatever a model gives
        """Take the next micro batch's result, in order of iteration, step of accumulation and replica.

        Tensors are copied, so that the model may change them later.

        Raises:
            Error: If it has another structure, shape or dtype than an earlier one, or cannot be joined.
        """
        if self._is_one:
            self._result = _result_of_one(value)
            if self._result is not None:
                return
        step, replica = divmod(self._num_seen, self._num_replicas)
        self._num_seen += 1
        number, remainder = divmod(step + 1, self._period)
        if remainder:
            return
        tensors: list[Tensor] = []
        structure = taken_apart(value, tensors)
        if self._structure is None:
            self._joined = [_Joined(tensor, self._num_kept) for tensor in tensors]
            if self._num_kept == 1:
                self._structure = structure
                return
        elif len(tensors) != len(self._joined) or structure.kind is not self._structure.kind:
            raise Error(
                f"a micro batch gave a result of {len(tensors)} tensors, and an earlier one of "
                f"{len(self._joined)}: all must give the same structure"
            )
        self._structure = structure
        is_sum = self._mode is OutputMode.Sum
        place = replica if is_sum else (number - 1) * self._num_replicas + replica
        for joined, tensor in zip(self._joined, tensors, strict=True):
            joined.put(place, tensor, adds=is_sum and step > 0)

    def result(self) -> Any:  # noqa: ANN401 - as above
        """What the user gets: the structure of a micro batch's result, on the CPU.

        Dim 0 of each tensor is as many times as long as results were kept. A tensor without dims gets one of the
        number of results, unless that is 1. What is no tensor is the last micro batch's.
        """
        if self._structure is None:
            return self._result
        return put_together(self._structure, iter([joined.values.cpu() for joined in self._joined]))


class _Joined:
    """One tensor of the result: room for those of all micro batches that are kept."""

    def __init__(self, first: Tensor, num_kept: int) -> None:
        self._shape = first.shape
        if num_kept == 1:
            self._num_rows, self.values = first.shape[0] if first.shape else 1, _kept(first)
            return
        self._num_rows = first.shape[0] if first.dim() else 1
        shape = (num_kept * self._num_rows, *first.shape[1:]) if first.dim() or num_kept > 1 else ()
        self.values = torch.empty(shape, dtype=first.dtype, device=first.device)

    def put(self, place: int, tensor: Tensor, *, adds: bool) -> None:
        """Copy a micro batch's tensor to its place, or add it there.

        Raises:
            Error: If it has another shape or dtype, or truth values shall be added.
        """
        if tensor.shape != self._shape or tensor.dtype is not self.values.dtype:
            raise Error(
                f"a micro batch gave {tensor.dtype} {list(tensor.shape)}, and an earlier one {self.values.dtype} "
                f"{list(self._shape)}: results of different shapes cannot be put together"
            )
        rows = self.values
        if rows.dim():
            rows = rows.narrow(0, place * self._num_rows, self._num_rows).view(self._shape)
        if not adds:
            rows.copy_(tensor.detach())
        elif tensor.dtype is torch.bool:
            raise Error(
                "OutputMode.Sum cannot add truth values (torch.bool): return numbers, or choose another mode"
            )
        else:
            rows.add_(tensor.detach())


def _kept(tensor: Tensor) -> Tensor:
    """A tensor that the model will not change: a copy, unless an operation has just made it."""
    if tensor.is_leaf or tensor._is_view() or tensor._version:  # noqa: SLF001 - torch's only names for it
        return tensor.detach().clone()
    return tensor.detach()


def _result_of_one(value: Any) -> Any:  # noqa: ANN401 - whatever a model gives
    """The result of a call's only micro batch: fast, for tensors, tuples and lists; None for others."""
    if type(value) is Tensor:
        return _kept(value) if value.is_cpu else value.detach().cpu()
    if type(value) is not tuple and type(value) is not list:
        return None
    parts = [_result_of_one(part) for part in value]
    return None if any(part is None for part in parts) else type(value)(parts)
