"""Tensors of a running model, printed on stderr."""

import sys
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_FORMATS: Final = {"auto": "", "fixed": "f", "scientific": "e", "none": ""}
"""Python's letter of each format; ``auto`` is numpy's own, and ``none`` shows as many digits as a number has."""


def ipu_print_tensor(
    tensor: Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = " ",
    open_bracket: str = "[",
    close_bracket: str = "]",
) -> Tensor:
    """Print ``tensor`` on stderr, and its gradient when that is known.

    Args:
        tensor: What is printed.
        title: Stands before it; the gradient's has ``_gradient`` after it.
        print_gradient: Whether the gradient of what is returned is printed, too.
        summarise_threshold: Of larger tensors only the edges are printed.
        edge_items: How many elements there.
        max_line_width: Columns of a line.
        digits: After the point.
        float_format: One of auto, fixed, scientific and none.
        separator: Between elements.
        open_bracket: Before those of a dimension.
        close_bracket: After them.

    Returns:
        ``tensor``, to compute with.

    Raises:
        ValueError: If there is no such ``float_format``.
    """
    if float_format not in _FORMATS:
        raise ValueError(f"ipu_print_tensor: float_format must be one of {', '.join(_FORMATS)}: {float_format!r}")

    letter = _FORMATS[float_format]
    one_value = f"{{:.{digits}{letter}}}".format if letter else str
    text_of = partial(
        np.array2string,
        max_line_width=max_line_width,
        precision=digits,
        separator=separator,
        threshold=summarise_threshold,
        edgeitems=edge_items,
        formatter=None if float_format == "auto" else {"float_kind": one_value},
    )
    brackets = str.maketrans({"[": open_bracket, "]": close_bracket})

    def show(value: Tensor, heading: str) -> None:
        sys.stderr.write(f"{heading}: {text_of(_array(value)).translate(brackets)}\n")

    show(tensor, title)
    if not (print_gradient and tensor.requires_grad):
        return tensor
    passed = tensor.view_as(tensor)
    if passed.requires_grad:
        passed.register_hook(lambda gradient: show(gradient, f"{title}_gradient"))
    return passed


def _array(value: Tensor) -> NDArray[Any]:
    values = value.detach().cpu()
    return (values.float() if values.is_floating_point() else values).numpy()  # numpy has no bfloat16
