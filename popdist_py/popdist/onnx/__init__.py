"""ONNX files as torch modules, which can be trained and written as ONNX files again.

>>> from popdist.onnx import load
"""

from popdist.ground.installation import needs_torch as needs_torch  # so that a missing torch is named first

# isort: split

import inspect
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx
import torch
from google.protobuf.message import Error as ProtobufError
from onnx import AttributeProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from torch import Tensor, nn

from popdist.errors import OnnxError
from popdist.onnx.operators import OPERATORS, Operator

__all__ = ["OPERATORS", "OnnxModule", "load"]

_LOWEST_OPSET: Final = 13
_OWN_DOMAINS: Final = ("", "ai.onnx")
_IS_TRAINING: Final = "is_training"
_NUMBERS: Final = ("value_float", "value_floats", "value_int", "value_ints")
_DENSE: Final = "export the model with dense tensors of numbers"


def load(path: str | os.PathLike[str]) -> "OnnxModule":
    """Read the ONNX file ``path``, and return a torch module that computes the graph of the file.

    Args:
        path: The file; tensors that the file keeps in other files are read from the same directory.

    Raises:
        OnnxError: If there is no such file, it is damaged, or torch cannot compute it: see :class:`OnnxModule`.
    """
    try:
        model = onnx.load(path)
        onnx.checker.check_model(model)  # also finds operators that the opset does not have
    except (OSError, ProtobufError, onnx.checker.ValidationError) as error:
        raise OnnxError(f"{os.fspath(path)} cannot be read as an ONNX model: {error}") from error
    return OnnxModule(model)


class OnnxModule(nn.Module):
    """A torch module that computes an ONNX graph; its inputs are the inputs of the graph, in the same order.

    The parameters are the initializers of floats with at least one dimension, with their own names; means and
    variances of batch normalization are buffers. Scalars, integers and ``Constant`` nodes are not trained. In
    training mode, batch normalization and dropout do what torch's layers do.

    Args:
        model: A model of opset 13 or newer. The model is kept for :meth:`save`, and not changed.

    Raises:
        OnnxError: If the opset is older, an operator or its attribute is not in ``popdist.onnx.OPERATORS``, or an
            initializer is sparse or of a type that torch does not have.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__()
        if model.graph.sparse_initializer:
            names = ", ".join(repr(sparse.values.name) for sparse in model.graph.sparse_initializer)
            raise OnnxError(f"the initializers {names} are sparse, which is not understood: {_DENSE}")
        self._model = model
        self._constants: dict[str, Tensor] = {}
        nodes = [node for node in model.graph.node if node.op_type != "Constant"]
        self._nodes = _read_nodes(nodes, _opset_of(model))
        statistics = {name for node in nodes if node.op_type == "BatchNormalization" for name in node.input[3:]}
        for initializer in model.graph.initializer:
            self._add(initializer.name, _read_tensor(initializer), is_trained=initializer.name not in statistics)
        for node in model.graph.node:
            if node.op_type == "Constant":
                self._add(node.output[0], _constant(node), is_trained=False, persistent=False)
        initialized = {initializer.name for initializer in model.graph.initializer}
        self._inputs = [value for value in model.graph.input if value.name not in initialized]

    def _add(self, name: str, tensor: Tensor, *, is_trained: bool, persistent: bool = True) -> None:
        """Register ``tensor`` as the parameter or buffer ``name``; keep an integer or a scalar as a constant."""
        if not tensor.is_floating_point() or not tensor.ndim:
            self._constants[name] = tensor
            return
        *path, last = name.split(".")
        owner: nn.Module = self
        try:
            for part in path:  # a module for each part, because torch allows no dots in names
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            if is_trained:
                owner.register_parameter(last, nn.Parameter(tensor))
            else:
                owner.register_buffer(last, tensor, persistent=persistent)
        except KeyError as error:
            raise OnnxError(f"torch cannot have a parameter called {name!r}: rename it in the file") from error

    def _weights(self) -> dict[str, Tensor]:
        """Return all parameters and buffers by their names in the graph; a tied tensor occurs under each name."""
        return {
            **dict(self.named_buffers(remove_duplicate=False)),
            **dict(self.named_parameters(remove_duplicate=False)),
        }

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the output of the ONNX graph for ``inputs``, or a tuple if the graph has several outputs.

        Raises:
            OnnxError: If the file has another number of inputs, or an input has another shape in the file.
        """
        _check_inputs(self._inputs, inputs)
        values = {**self._constants, **self._weights()}
        values |= {value.name: tensor for value, tensor in zip(self._inputs, inputs, strict=True)}
        for node in self._nodes:
            values |= node.compute(values, is_training=self.training)
        outputs = tuple(values[value.name] for value in self._model.graph.output)
        return outputs if len(outputs) > 1 else outputs[0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as an ONNX file, with the present parameters and buffers as initializers.

        Only one instance should call the method, because all instances have the same weights.

        Args:
            path: The new file, which appears when it is complete.

        Raises:
            OnnxError: If the file cannot be written, or has 2 GB, the most that an ONNX file can have.
        """
        model, part = onnx.ModelProto(), f"{os.fspath(path)}.part"
        model.CopyFrom(self._model)
        weights = self._weights()
        for initializer in model.graph.initializer:
            if initializer.name in weights:
                array = weights[initializer.name].detach().cpu().numpy()
                array = array.astype(helper.tensor_dtype_to_np_dtype(initializer.data_type))
                initializer.CopyFrom(numpy_helper.from_array(array, initializer.name))
        try:
            onnx.save(model, part)
            Path(part).replace(path)
        except (OSError, ValueError, ProtobufError) as error:
            raise OnnxError(f"{os.fspath(path)} cannot be written as an ONNX model: {error}") from error
        finally:
            with suppress(OSError):
                Path(part).unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxNode:
    """A node of an ONNX graph, with the torch function and the attributes that compute the node."""

    text: str
    operator: Operator
    attributes: Mapping[str, Any]
    knows_training: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def compute(self, values: Mapping[str, Tensor | None], *, is_training: bool) -> dict[str, Tensor]:
        """Compute the node from its inputs in ``values``, tensors by name, and return its outputs by name."""
        keywords = {**self.attributes, _IS_TRAINING: is_training} if self.knows_training else self.attributes
        try:
            results = self.operator(*[values[name] if name else None for name in self.inputs], **keywords)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            error.add_note(f"This happened in {self.text}.")
            raise
        tensors = (results,) if isinstance(results, Tensor) else tuple(results)
        if len(tensors) != len(self.outputs):
            raise OnnxError(f"{self.text}, has {len(self.outputs)} outputs, and its function gives {len(tensors)}")
        return dict(zip(self.outputs, tensors, strict=True))


def _opset_of(model: onnx.ModelProto) -> int:
    """Return the version (opset) of ONNX's operators in ``model``. Raise OnnxError if the version is below 13."""
    opset = max((it.version for it in model.opset_import if it.domain in _OWN_DOMAINS), default=_LOWEST_OPSET)
    if opset < _LOWEST_OPSET:
        raise OnnxError(
            f"the model has opset {opset}, and opsets from {_LOWEST_OPSET} on are understood: "
            f"convert it with onnx.version_converter.convert_version(model, {_LOWEST_OPSET})"
        )
    return opset


def _read_nodes(nodes: list[NodeProto], opset: int) -> list[OnnxNode]:
    """Return the graph's nodes with their torch functions. Raise OnnxError if ``OPERATORS`` lacks an operator."""
    unknown = {_operator_of(node): node for node in reversed(nodes) if _operator_of(node) not in OPERATORS}
    if unknown:
        named = ", ".join(f"{operator} ({_describe(node)})" for operator, node in sorted(unknown.items()))
        raise OnnxError(
            f"nothing in torch is known for the operators {named}: set popdist.onnx.OPERATORS[name] to a function "
            "of the inputs and, as keywords, the attributes; or export the model with other operators"
        )
    return [_read_node(node, opset) for node in nodes]


def _operator_of(node: NodeProto) -> str:
    return node.op_type if node.domain in _OWN_DOMAINS else f"{node.domain}.{node.op_type}"


def _describe(node: NodeProto) -> str:
    return f"node {node.name!r}" if node.name else f"the node of {node.output[0]!r}"


def _read_node(node: NodeProto, opset: int) -> OnnxNode:
    """Return one node with its torch function. Raise OnnxError if the function does not know an attribute, unless
    the attribute has ONNX's default.
    """
    name = _operator_of(node)
    keywords = _keywords_of(OPERATORS[name])
    defaults = _defaults_of(node, opset)
    attributes = {it.name: _value_of(it) for it in node.attribute}
    strange = {key: it for key, it in attributes.items() if key not in keywords and it != defaults.get(key)}
    if strange:
        raise OnnxError(
            f"{_describe(node)}, of the operator {name}, has {strange}, which is not understood: export the model "
            f"without it, or set popdist.onnx.OPERATORS[{name!r}] to a function with such a keyword"
        )
    if name == "Split" and len(node.input) == 1:
        attributes["num_outputs"] = len(node.output)
    return OnnxNode(
        text=f"{name}, {_describe(node)}",
        operator=OPERATORS[name],
        attributes={key: it for key, it in attributes.items() if key in keywords},
        knows_training=_IS_TRAINING in keywords,
        inputs=tuple(node.input),
        outputs=tuple(node.output),
    )


def _keywords_of(operator: Operator) -> set[str]:
    """Return the names of the keyword-only arguments of ``operator``; an empty set if it has no signature."""
    try:
        parameters = inspect.signature(operator).parameters.values()
    except ValueError:
        return set()
    return {it.name for it in parameters if it.kind is it.KEYWORD_ONLY}


def _defaults_of(node: NodeProto, opset: int) -> dict[str, object]:
    """Return the defaults of a node's attributes, by name; an empty dict if the operator is not of ONNX itself."""
    if node.domain not in _OWN_DOMAINS:
        return {}
    attributes = onnx.defs.get_schema(node.op_type, opset).attributes
    return {name: _value_of(it.default_value) for name, it in attributes.items() if it.default_value.type}


def _value_of(attribute: AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        return _read_tensor(value)
    return value.decode() if isinstance(value, bytes) else value


def _read_tensor(tensor: TensorProto) -> Tensor:
    """Return the values of an ONNX tensor as a torch tensor that may be changed in place."""
    try:
        return torch.from_numpy(numpy_helper.to_array(tensor).copy())
    except TypeError as error:
        raise OnnxError(
            f"the tensor {tensor.name!r} is of {TensorProto.DataType.Name(tensor.data_type)}, which cannot be "
            "read into torch: export the model with float32"
        ) from error


def _constant(node: NodeProto) -> Tensor:
    """Return the value of an ONNX ``Constant`` node, which is a tensor, a number or numbers, as a tensor."""
    value = _value_of(node.attribute[0])
    if isinstance(value, Tensor):
        return value
    if node.attribute[0].name not in _NUMBERS:
        raise OnnxError(f"{_describe(node)} is a Constant with a {node.attribute[0].name}: {_DENSE}")
    is_float = "float" in node.attribute[0].name
    return torch.tensor(value, dtype=torch.float32 if is_float else torch.int64, device="cpu")


def _check_inputs(wanted: list[ValueInfoProto], given: tuple[Tensor, ...]) -> None:
    """Raise OnnxError unless the tensors ``given`` have the number and the shapes of the inputs ``wanted``."""
    names = [value.name for value in wanted]
    if len(given) != len(wanted):
        raise OnnxError(f"the model has the inputs {', '.join(names)}, and was called with {len(given)}")
    for name, value, tensor in zip(names, wanted, given, strict=True):
        if not value.type.tensor_type.HasField("shape"):
            continue
        lengths = [it.dim_value or "any" for it in value.type.tensor_type.shape.dim]
        fits = [wanted in ("any", has) for wanted, has in zip(lengths, tensor.shape, strict=False)]
        if len(lengths) != tensor.ndim or not all(fits):
            raise OnnxError(
                f"the input {name!r} has the shape ({', '.join(map(str, lengths))}) in the file, and was given "
                f"{tuple(tensor.shape)}; where the file fixes the batch size, take whole micro batches of that "
                "size (drop_last=True), or export it with a dynamic one"
            )
