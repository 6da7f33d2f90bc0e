"""Operations that pass tensors on: what a compiler is told of memory, plans and names, and what is printed."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from popdist.errors import whole_number
from poptorch.enums import MatMulSerializationMode, MultiConvPartialsType, MultiConvPlanType, OverlapMode
from poptorch.errors import Error, check_arguments
from poptorch.options.option_values import one_of

T = TypeVar("T")

_in_multi_conv: Final[ContextVar[bool]] = ContextVar("in_multi_conv", default=False)


def serializedMatMul(
    lhs: Tensor,
    rhs: Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> Tensor:
    """``torch.matmul(lhs, rhs)``. No effect: the product is not cut in parts.

    Args:
        lhs: Of shape (..., input channels, reducing dimension).
        rhs: Of shape (..., reducing dimension, output channels).
        mode: The dimension along which it would be cut.
        factor: Into how many parts, which divide that dimension; 0 and 1 for none.
        keep_precision: Whether the parts would be added in their own dtype.

    Raises:
        AssertionError: If an argument has another type.
        Error: If ``factor`` does not divide the dimension, or something else than tensors is multiplied.
    """
    del keep_precision
    one_of("serializedMatMul: mode", mode, MatMulSerializationMode)
    whole_number("serializedMatMul: factor", factor, AssertionError, minimum=0)
    check_arguments("serializedMatMul", "a tensor", lhs=lhs, rhs=rhs)
    sizes = {
        MatMulSerializationMode.InputChannels: lhs.shape[-2] if lhs.dim() > 1 else 1,
        MatMulSerializationMode.ReducingDim: lhs.shape[-1],
        MatMulSerializationMode.OutputChannels: rhs.shape[-1],
    }
    if factor > 1 and sizes.get(mode, 0) % factor:
        raise Error(f"serializedMatMul: {mode.name} has {sizes[mode]} elements, which {factor} does not divide")
    return torch.matmul(lhs, rhs)


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """``tensor``; the proportion lies between 0 and 1. No effect: torch gives products the memory they take."""
    _check_proportion("set_available_memory", available_memory_proportion)
    return tensor


def set_overlap_for_input(input_tensors: T, mode: OverlapMode) -> T:
    """``input_tensors``: a tensor, or a nest of them. No effect: `DataLoaderMode.Async` reads ahead."""
    return _with_overlap("set_overlap_for_input", input_tensors, mode)


def set_overlap_for_output(output_tensors: T, mode: OverlapMode) -> T:
    """``output_tensors``: a tensor, or a nest of them. No effect: outputs are there when a call returns."""
    return _with_overlap("set_overlap_for_output", output_tensors, mode)


class _Scope(ContextDecorator):
    """A context that changes nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


class NameScope(_Scope):
    """``with poptorch.NameScope("encoder"): ...``. No effect: there is no graph that would show the name."""

    def __init__(self, name: str) -> None:
        self.name = name


class Attribute(_Scope):
    """``with poptorch.Attribute(__outline={"layer": "embedding"}): ...``. No effect: there is no graph."""

    def __init__(self, **attributes: Mapping[str, Any]) -> None:
        self.attributes = attributes


class MultiConv:
    """Convolutions that could run at once: ``with poptorch.MultiConv(): ...``. No effect: each runs by itself.

    Setters return the object, take one value for all convolutions or one each, and refuse what cannot be.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}  # by the names of their setters

    def availableMemoryProportions(self, value: float | Sequence[float]) -> Self:
        """Memory for each convolution, from 0 to 1."""
        proportions = list(value) if isinstance(value, Sequence) else [value]
        for proportion in proportions:
            _check_proportion("MultiConv.availableMemoryProportions", proportion)
        return self._set(availableMemoryProportions=proportions)

    def partialsTypes(self, value: torch.dtype | Sequence[torch.dtype]) -> Self:
        """The dtype of sums within each convolution, float or half."""
        kinds = {torch.float: MultiConvPartialsType.Float, torch.half: MultiConvPartialsType.Half}
        values = [kinds.get(one, one) for one in (value if isinstance(value, Sequence) else [value])]
        if not all(isinstance(one, MultiConvPartialsType) for one in values):
            raise AssertionError(f"MultiConv.partialsTypes takes torch.float or torch.half, and was given {value}")
        return self._set(partialsTypes=values)

    def enableConvDithering(self, value: bool | Sequence[bool]) -> Self:
        """Whether each convolution lies on other tiles."""
        return self._set(enableConvDithering=list(value) if isinstance(value, Sequence) else [value])

    def planType(self, value: MultiConvPlanType) -> Self:
        """Whether they are planned to run at once or in turn."""
        return self._set(planType=one_of("MultiConv.planType", value, MultiConvPlanType))

    def perConvReservedTiles(self, value: int) -> Self:
        """Tiles that are kept for each convolution, from 0."""
        tiles = whole_number("MultiConv.perConvReservedTiles", value, AssertionError, minimum=0)
        return self._set(perConvReservedTiles=tiles)

    def cycleBackOff(self, value: float) -> Self:
        """How much slower than the fastest plan a convolution may be, from 0 to 1."""
        _check_proportion("MultiConv.cycleBackOff", value)
        return self._set(cycleBackOff=value)

    def _set(self, **settings: Any) -> Self:
        self.settings |= settings
        return self

    def __enter__(self) -> Self:
        if _in_multi_conv.get():
            raise Error("a poptorch.MultiConv within another one is not supported")
        self._token = _in_multi_conv.set(True)
        return self

    def __exit__(self, *_error: object) -> None:
        _in_multi_conv.reset(self._token)


def _with_overlap(name: str, value: T, mode: OverlapMode) -> T:
    if not isinstance(mode, OverlapMode):
        raise Error(f"poptorch.{name}: mode must be a member of poptorch.OverlapMode, and is {mode!r}")
    return value


def _check_proportion(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise Error(f"poptorch.{name}: a proportion must be between 0 and 1, and is {value!r}")


_FORMATS: Final = {"auto": "", "fixed": "f", "scientific": "e", "none": ""}
"""Python's letter of each format; ``auto`` is numpy's own, and ``none`` shows as many digits as a number has."""


def _formatter(float_format: str, digits: int) -> Any:
    """The formatter with which numpy writes a number; None for its own."""
    if float_format not in _FORMATS:
        raise ValueError(f"ipu_print_tensor: float_format must be one of {', '.join(_FORMATS)}: {float_format!r}")
    letter = _FORMATS[float_format]
    one_value: Callable[[float], str] = f"{{:.{digits}{letter}}}".format if letter else str
    return None if float_format == "auto" else {"float_kind": one_value}


def ipu_print_tensor(
    tensor: Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> Tensor:
    """Print ``tensor`` on stderr, and its gradient when that is known; ``tensor`` is returned, to compute with.

    Args:
        tensor: What is printed.
        title: Stands before it; the gradient's has ``_gradient`` after it.
        print_gradient: Whether the gradient of what is returned is printed, too.
        summarise_threshold: Of larger tensors only ``edge_items`` elements at each edge are printed.
        edge_items: See above.
        max_line_width: Columns of a line.
        digits: After the point.
        float_format: One of auto, fixed, scientific and none.
        separator: Between elements.
        open_bracket: Before those of a dimension.
        close_bracket: After them.
    """
    check_arguments("ipu_print_tensor", "a tensor", tensor=tensor)
    check_arguments("ipu_print_tensor", "a text", float_format=float_format, separator=separator)
    text_of = partial(
        np.array2string,
        max_line_width=max_line_width,
        precision=digits,
        separator=separator,
        threshold=summarise_threshold,
        edgeitems=edge_items,
        formatter=_formatter(float_format, digits),
    )
    brackets = str.maketrans({"[": open_bracket, "]": close_bracket})

    def show(value: Tensor, heading: str) -> None:
        values = value.detach().cpu()
        array = (values.float() if values.is_floating_point() else values).numpy()  # numpy has no bfloat16
        sys.stderr.write(f"{heading}: {text_of(array).translate(brackets)}\n")

    show(tensor, title)
    if not (print_gradient and tensor.requires_grad):
        return tensor
    passed = tensor.view_as(tensor)
    if passed.requires_grad:
        passed.register_hook(lambda gradient: show(gradient, f"{title}_gradient"))
    return passed
