"""Torch functions that compute the operators of ONNX, as ONNX defines these operators from opset 13 on.

The keywords of a function are the attributes of its operator, with ONNX's names and defaults. An attribute that is
no keyword here must have ONNX's default.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Final

import torch
from onnx import TensorProto
from torch import Tensor
from torch.nn import functional as f

Operator = Callable[..., Any]
"""A function of tensors (None for an input that is left out) and attributes; it returns one or several tensors."""

Ints = Sequence[int] | None
"""An attribute of an operator with a number for each axis; None if the attribute is left out."""


def _numbers(given: Tensor | Ints) -> list[int]:
    """Return the numbers in ``given``, a tensor or an attribute of an ONNX node; [] if ``given`` is None."""
    return given.tolist() if isinstance(given, Tensor) else list(given or ())


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    x = x if low is None else torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


def _dropout(x: Tensor, ratio: Tensor | None = None, _mode: Tensor | None = None, *, is_training: bool) -> Tensor:
    return f.dropout(x, 0.5 if ratio is None else float(ratio), is_training)


def _gemm(  # noqa: PLR0913 - the inputs and attributes of ONNX's Gemm
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803 - ONNX's name of the attribute
    transB: int = 0,  # noqa: N803 - ONNX's name of the attribute
) -> Tensor:
    a, b = a.T if transA else a, b.T if transB else b
    return alpha * (a @ b) if c is None else torch.addmm(c, a, b, beta=beta, alpha=alpha)


def _in_torchs_order(pads: Sequence[int]) -> list[int]:
    """Return ONNX's padding sizes (all begins, then all ends) in torch's order: by axis from the last axis."""
    half = len(pads) // 2
    return [pads[place] for axis in reversed(range(half)) for place in (axis, axis + half)]


def _padding(x: Tensor, pads: Ints, value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Pad ``x`` if an axis needs different padding at begin and end; return ``x`` and the padding still to add."""
    half = x.ndim - 2
    if not pads or pads[:half] == pads[half:]:
        return x, list(pads[:half]) if pads else [0] * half
    return f.pad(x, _in_torchs_order(pads), value=value), [0] * half


def _conv(  # noqa: PLR0913 - the inputs and attributes of ONNX's Conv
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dilations: Ints = None,
    group: int = 1,
    kernel_shape: Ints = None,  # noqa: ARG001 - the shape of the weight has the same numbers
    pads: Ints = None,
    strides: Ints = None,
) -> Any:
    x, padding = _padding(x, pads)
    convolve = (f.conv1d, f.conv2d, f.conv3d)[weight.ndim - 3]
    return convolve(x, weight, bias, strides or 1, padding, dilations or 1, group)


def _max_pool(
    x: Tensor,
    *,
    kernel_shape: Ints,
    ceil_mode: int = 0,
    dilations: Ints = None,
    pads: Ints = None,
    strides: Ints = None,
) -> Any:
    x, padding = _padding(x, pads, -math.inf)
    pool: Operator = (f.max_pool1d, f.max_pool2d, f.max_pool3d)[x.ndim - 3]
    return pool(x, kernel_shape, strides or 1, padding, dilations or 1, bool(ceil_mode))


def _average_pool(
    x: Tensor,
    *,
    kernel_shape: Ints,
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    pads: Ints = None,
    strides: Ints = None,
) -> Any:
    padded, padding = _padding(x, pads)
    if padded is not x and not count_include_pad:
        raise ValueError(f"torch's pools cannot leave out unequal pads, here {pads}")
    pool: Operator = (f.avg_pool1d, f.avg_pool2d, f.avg_pool3d)[x.ndim - 3]
    return pool(padded, kernel_shape, strides or 1, padding, bool(ceil_mode), bool(count_include_pad))


def _batch_norm(  # noqa: PLR0913 - the inputs and attributes of ONNX's BatchNormalization
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    is_training: bool,
) -> Tensor:
    return f.batch_norm(x, mean, variance, scale, bias, is_training, 1 - momentum, epsilon)


def _layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5
) -> Tensor:
    return f.layer_norm(x, x.shape[axis:], scale, bias, epsilon)


def _reduce(
    compute: Operator,
    x: Tensor,
    given: Tensor | None = None,
    *,
    axes: Ints = None,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Any:
    """Return ``x`` reduced by ``compute`` over the axes in ``given``, else in ``axes``, else over all axes."""
    over = _numbers(axes if given is None else given)
    if not over and noop_with_empty_axes:
        return x
    return compute(x, over or [*range(x.ndim)], keepdim=bool(keepdims))


def _gather(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis %= x.ndim
    places = indices.to(x.device).flatten()
    places = torch.where(places < 0, places + x.shape[axis], places)
    return x.index_select(axis, places).reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def _constant_of_shape(shape: Tensor, *, value: Tensor | None = None) -> Tensor:
    content = torch.zeros(1, dtype=torch.float32, device="cpu") if value is None else value
    return content.reshape(()).expand(_numbers(shape))


def _reshape(x: Tensor, shape: Tensor, *, allowzero: int = 0) -> Tensor:
    lengths = _numbers(shape)
    return x.reshape(lengths if allowzero else [length or x.shape[axis] for axis, length in enumerate(lengths)])


def _slice(
    x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None
) -> Tensor:
    parts, over = [slice(None)] * x.ndim, _numbers(axes) or [*range(len(starts))]
    turned = []
    for axis, start, end, step in zip(
        over, _numbers(starts), _numbers(ends), _numbers(steps) or [1] * len(over), strict=True
    ):
        length = x.shape[axis]
        places = range(*slice(max(start, -length), end, step).indices(length))
        if step < 0:  # torch allows only steps above 0
            turned.append(axis)
            places = places[::-1]
        parts[axis] = slice(places.start, places.stop, places.step) if places else slice(0)
    x = x[tuple(parts)]
    return x.flip(turned) if turned else x


def _pad(x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None) -> Tensor:
    given, over = _numbers(pads), range(x.ndim) if axes is None else [axis % x.ndim for axis in _numbers(axes)]
    ends = dict(zip(over, zip(given[: len(over)], given[len(over) :], strict=True), strict=True))
    in_order = [number for axis in reversed(range(x.ndim)) for number in ends.get(axis, (0, 0))]
    return f.pad(x, in_order, value=0.0 if value is None else value.item())


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    numbers = _numbers(axes)
    for axis in sorted(axis % (x.ndim + len(numbers)) for axis in numbers):
        x = x.unsqueeze(axis)
    return x


OPERATORS: Final[dict[str, Operator]] = {
    "Abs": torch.abs,
    "Add": torch.add,
    "And": torch.logical_and,
    "ArgMax": lambda x, *, axis=0, keepdims=1: x.argmax(axis, keepdim=bool(keepdims)),
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": lambda x, *, to: x.to(getattr(torch, TensorProto.DataType.Name(to).lower())),
    "CastLike": lambda x, like: x.to(like.dtype),
    "Clip": _clip,
    "Concat": lambda *parts, axis: torch.cat(parts, axis),
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "Cos": torch.cos,
    "Div": lambda x, y: torch.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc"),
    "Dropout": _dropout,
    "Elu": lambda x, *, alpha=1.0: f.elu(x, alpha),
    "Equal": torch.eq,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Expand": lambda x, shape: x.expand(torch.broadcast_shapes(x.shape, _numbers(shape))),
    "Flatten": lambda x, *, axis=1: x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])),
    "Gather": _gather,
    "Gelu": lambda x, *, approximate="none": f.gelu(x, approximate=approximate),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda x: x.mean([*range(2, x.ndim)], keepdim=True),
    "Greater": torch.gt,
    "HardSigmoid": lambda x, *, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1),
    "HardSwish": f.hardswish,
    "Identity": lambda x: x,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda x, *, alpha=0.01: f.leaky_relu(x, alpha),
    "Less": torch.lt,
    "Log": torch.log,
    "LogSoftmax": lambda x, *, axis=-1: f.log_softmax(x, axis),
    "MatMul": torch.matmul,
    "MaxPool": _max_pool,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "Pad": _pad,
    "Pow": lambda x, exponent: torch.pow(x, exponent).to(x.dtype),
    "Range": lambda start, limit, delta: torch.arange(start, limit, delta, dtype=start.dtype, device="cpu"),
    "Reciprocal": torch.reciprocal,
    "ReduceMax": partial(_reduce, torch.amax),
    "ReduceMean": partial(_reduce, torch.mean),
    "ReduceSum": partial(_reduce, torch.sum),
    "Relu": torch.relu,
    "Reshape": _reshape,
    "Shape": lambda x, *, start=0, end=None: torch.tensor(x.shape[start:end], dtype=torch.int64, device="cpu"),
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Slice": _slice,
    "Softmax": lambda x, *, axis=-1: f.softmax(x, axis),
    "Softplus": f.softplus,
    "Split": lambda x, lengths=None, *, axis=0, num_outputs=1: x.split(
        _numbers(lengths) or math.ceil(x.shape[axis] / num_outputs), axis
    ),
    "Sqrt": torch.sqrt,
    "Squeeze": lambda x, axes=None: x.squeeze() if axes is None else x.squeeze(tuple(_numbers(axes))),
    "Sub": torch.sub,
    "Sum": lambda *terms: reduce(torch.add, terms),
    "Tanh": torch.tanh,
    "Transpose": lambda x, *, perm=None: x.permute(perm or [*reversed(range(x.ndim))]),
    "Trilu": lambda x, diagonal=None, *, upper=1: (torch.triu if upper else torch.tril)(x, int(diagonal or 0)),
    "Unsqueeze": _unsqueeze,
    "Where": torch.where,
}
"""The function of each operator; an operator of another domain than ONNX's own has the key ``"domain.Name"``."""
