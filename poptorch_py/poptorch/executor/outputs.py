"""The result of a call, put together from those of its micro batches, and the tensors that are anchored."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from poptorch.custom_types import Structure, unflatten
from poptorch.enums import OutputMode
from poptorch.errors import Error
from poptorch.losses import REFUSED_BACKWARD

Result: TypeAlias = tuple[Structure, list[Tensor]]  # what a forward gives, as `custom_types.flattened` has it


class Outputs:
    """The result of one call: of the micro batches that its output mode keeps, joined along dim 0."""

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
        self.begin()

    def begin(self) -> None:
        """Start a call, for which nothing is kept yet."""
        self._num_seen = 0
        self._kept: list[list[Tensor]] = []  # copies of the tensors of each result
        self._structure: Structure | None = None

    def add(self, result: Result) -> None:
        """Add the next micro batch's result; tensors are copied, as the model may change them later."""
        step, replica = divmod(self._num_seen, self._num_replicas)
        self._num_seen += 1
        if (step + 1) % self._period:
            return
        structure, tensors = result
        if self._structure is not None:
            self._check(structure, tensors, self._structure)
        self._structure = structure
        if self._mode is OutputMode.Sum and step > 0:
            if any(tensor.dtype is torch.bool for tensor in tensors):
                raise Error(
                    "OutputMode.Sum cannot add truth values (torch.bool): return numbers, or choose another mode"
                )
            for total, tensor in zip(self._kept[replica], tensors, strict=True):
                total.add_(tensor.detach())
        else:
            self._kept.append([tensor.detach().clone() for tensor in tensors])

    def _check(self, structure: Structure, tensors: list[Tensor], earlier: Structure) -> None:
        if len(tensors) != len(self._kept[0]) or structure.kind is not earlier.kind:
            raise Error(
                f"a micro batch gave a result of {len(tensors)} tensors, and an earlier one of "
                f"{len(self._kept[0])}: all must give the same structure"
            )
        for before, tensor in zip(self._kept[0], tensors, strict=True):
            if tensor.shape != before.shape or tensor.dtype is not before.dtype:
                raise Error(
                    f"a micro batch gave {tensor.dtype} {list(tensor.shape)}, and an earlier one {before.dtype} "
                    f"{list(before.shape)}: results of different shapes cannot be put together"
                )

    def result(self) -> Any:
        """The result for the user, in the structure of a micro batch's result, on the CPU."""
        if self._structure is None:
            return None
        return unflatten(self._structure, map(_joined, zip(*self._kept, strict=True)))


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    joined = parts[0]
    if len(parts) > 1:
        joined = torch.cat(parts) if joined.dim() else torch.stack(parts)
    if not joined.is_cpu:
        joined = joined.cpu()
    joined.backward = REFUSED_BACKWARD  # type: ignore[method-assign] # on this one alone
    return joined


_GRADIENT: Final = "Gradient___"
_UPDATED: Final = "UpdatedVar___"
_LOSS_SCALE: Final = "finalLossScale"


class AnchoredTensors:
    """The anchored tensors: a parameter by its name, its gradient, or the loss scaling, after each step."""

    def __init__(self, anchored: Mapping[str, list[Any]], parameters: Mapping[str, nn.Parameter]) -> None:
        self._anchored = dict(anchored)
        self._parameters = dict(parameters)
        self.kept: dict[str, list[Tensor]] = {}  # by short name, a value for each step of the last call
        for short, (long, *_) in anchored.items():
            if long != _LOSS_SCALE and _parameter_name(long) not in parameters:
                raise Error(
                    f"anchorTensor({short!r}, {long!r}): there is no tensor {long}. {_LOSS_SCALE} can be "
                    f"anchored, and for each parameter NAME its value NAME or {_UPDATED}NAME, and its gradient "
                    f"{_GRADIENT}NAME. The parameters are {', '.join(parameters)}"
                )

    @staticmethod
    def names(parameters: Iterable[str]) -> list[str]:
        """What can be anchored in a model of these ``parameters``."""
        return [_LOSS_SCALE, *(prefix + name for prefix in ("", _UPDATED, _GRADIENT) for name in parameters)]

    def add_step(self, loss_scaling: float) -> None:
        """Keep the values of a step that has ended, while its gradients are still there."""
        for short, (long, *_) in self._anchored.items():
            if long == _LOSS_SCALE:
                value = torch.tensor(loss_scaling, dtype=torch.float32, device="cpu")
            else:
                parameter = self._parameters[_parameter_name(long)]
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                value = (gradient if long.startswith(_GRADIENT) else parameter).detach().clone().cpu()
            self.kept.setdefault(short, []).append(value)

    def get(self, short: str) -> Tensor:
        """The values anchored under that name in the last call: one for each step that its mode keeps."""
        if short not in self._anchored:
            raise Error(
                f"{short!r} is not the name of an anchored tensor: {', '.join(self._anchored) or 'none is'}"
            )
        if short not in self.kept:
            raise Error(f"there is no value of {short!r} yet: run the model at least once")
        values, (_, mode, period) = self.kept[short], self._anchored[short]
        if mode is OutputMode.Sum:
            return torch.stack(values).sum(0)
        if mode is OutputMode.EveryN:
            values = values[period - 1 :: period]
        elif mode is OutputMode.Final:
            values = values[-1:]
        return values[0] if len(values) == 1 else torch.stack(values)


def _parameter_name(long: str) -> str:
    return long.removeprefix(_GRADIENT).removeprefix(_UPDATED).removeprefix("model.")
