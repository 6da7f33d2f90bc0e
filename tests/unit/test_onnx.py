"""ONNX files compute in torch what onnxruntime computes, train, are written back, and are refused with a reason.

Holds popdist.onnx and popdist.onnx.operators.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import popdist.onnx
from popdist.errors import OnnxError
from popdist.onnx import OPERATORS, OnnxModule

IMAGES = """
images (float[N, 3, 9, 8] x) => (float[N, M] y) {
    c = Conv <pads = [1, 1, 1, 1], strides = [2, 1]> (x, "conv.0.weight", "conv.0.bias")
    n = BatchNormalization (c, scale, bias, mean, variance)
    d = Conv <pads = [0, 1, 1, 0], group = 2, kernel_shape = [2, 2]> (n, "conv.1.weight")
    e = Elu (d)
    p = MaxPool <kernel_shape = [2, 2], pads = [0, 0, 1, 1], strides = [1, 2]> (e)
    q = AveragePool <kernel_shape = [2, 2], pads = [1, 1, 1, 1], auto_pad = "NOTSET"> (p)
    r = LeakyRelu <alpha = 0.2> (q)
    h = HardSigmoid (r)
    s = HardSwish (r)
    hs = Add (h, s)
    padding = Constant <value_ints = [0, 0, 1, 0, 0, 0, 0, 2]> ()
    padded = Pad (hs, padding)
    g = GlobalAveragePool (padded)
    f = Flatten (g)
    y = Gemm <transB = 1, alpha = 0.5> (f, "head.weight", "head.bias")
}
"""
TEXT = """
text (int64[N, T] x) => (float[N, T, 4] y, int64[N] best) {
    embedded = Gather (table, x)
    normal = LayerNormalization <axis = -1, stash_type = 1> (embedded, scale, bias)
    both = MatMul (normal, weight)
    size = Shape (x)
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    length = Gather (size, one)
    keys, values = Split <axis = 2, num_outputs = 2> (both)
    turned = Transpose <perm = [0, 2, 1]> (keys)
    products = MatMul (keys, turned)
    scaled = Div (products, root)
    square = Concat <axis = 0> (length, length)
    ones = ConstantOfShape <value = float[1] {1.0}> (square)
    lower = Trilu <upper = 0> (ones)
    open = Greater (lower, zero)
    closed = Not (open)
    low = Constant <value_float = -10000.0> ()
    masked = Where (closed, low, scaled)
    shares = Softmax (masked)
    mixed = MatMul (shares, values)
    active = Gelu <approximate = "tanh"> (mixed)
    wide = Unsqueeze (active, one)
    narrow = Squeeze (wide, one)
    shape = Constant <value_ints = [0, -1, 4]> ()
    same = Reshape (narrow, shape)
    back = Constant <value_ints = [-3]> ()
    far = Constant <value_ints = [9223372036854775807]> ()
    ends = Slice (same, back, far, one, two)
    total = ReduceSum <keepdims = 0> (ends, one)
    y = Sub (same, zero)
    best = ArgMax <axis = 1, keepdims = 0> (total)
}
"""
NUMBERS = """
numbers (float[3, 4] x) => (float[3, 4] y, int64[L] places, float[3] top) {
    a = Abs (x)
    b = Sqrt (a)
    c = Exp (x)
    d = Log (c)
    e = Erf (d)
    f = Sin (e)
    g = Cos (f)
    h = Tanh (g)
    i = Sigmoid (h)
    j = Softplus (i)
    k = Reciprocal (j)
    l = Neg (k)
    m = Mul (l, b)
    n = Pow (m, square)
    o = Clip (n, , one)
    p = LogSoftmax <axis = 0> (o)
    q = Sum (p, a, x)
    r = Identity (q)
    s = Relu (r)
    t = Dropout (s)
    less = Less (x, one)
    equal = Equal (x, one)
    either = Or (less, equal)
    both = And (either, less)
    cast = Cast <to = 6> (both)
    u = CastLike (cast, x)
    shape = Shape (x)
    v = Expand (one, shape)
    w = Add (u, v)
    y = Add (t, w)
    start = Constant <value_int = 7> ()
    step = Constant <value_int = 2> ()
    limit = Div (start, step)
    zero = Constant <value_int = 0> ()
    increment = Constant <value_int = 1> ()
    places = Range (zero, limit, increment)
    over = Constant <value_ints = [1]> ()
    most = ReduceMax <keepdims = 0> (y, over)
    mean = ReduceMean <keepdims = 0> (y)
    top = Sub (most, mean)
}
"""
RANDOM = np.random.default_rng(0)


def values(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Random numbers above zero."""
    return RANDOM.uniform(0.1, 1, shape).astype(np.float32)


NORMS = ("scale", "bias", "mean", "variance")
SCALARS = {"root": 2.0, "zero": 0.0, "one": 0.8, "square": 2.0}
WEIGHTS = {
    "conv.0.weight": (4, 3, 3, 3),
    "conv.0.bias": (4,),
    "conv.1.weight": (6, 2, 2, 2),
    "head.weight": (5, 6),
    "head.bias": (5,),
    "table": (11, 8),
    "weight": (8, 8),
    "type": (4,),
}


def model_of(text: str, opset: int = 20, *, norm: int = 4) -> onnx.ModelProto:
    """The model that ``text`` says, with random weights in its initializers."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>{text}')
    asked = {name for node in model.graph.node for name in node.input}
    for name, shape in {**WEIGHTS, **dict.fromkeys(NORMS, (norm,)), **dict.fromkeys(SCALARS, ())}.items():
        if name in asked - {output for node in model.graph.node for output in node.output}:
            array = values(*shape) if name not in SCALARS else np.array(SCALARS[name], np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def outputs_of(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """What the module gives, as a list."""
    with torch.no_grad():
        outputs = module(*inputs)
    return [outputs] if isinstance(outputs, Tensor) else [*outputs]


def same_as_onnxruntime(model: bytes, module: OnnxModule, x: Tensor) -> None:
    """The module gives for ``x`` what onnxruntime computes, with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    expected = [torch.from_numpy(np.asarray(array)) for array in session.run(None, {"x": x.numpy()})]
    torch.testing.assert_close(outputs_of(module.eval(), x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (model_of(IMAGES), torch.from_numpy(values(2, 3, 9, 8))),
        (model_of(TEXT, norm=8), torch.tensor([[1, 0, 5, 10], [-1, 3, 3, 2]])),
        (model_of(NUMBERS), torch.from_numpy(values(3, 4)) - 0.5),
    ],
    ids=["images", "text", "numbers"],
)
def test_a_model_computes_what_onnxruntime_computes(model: onnx.ModelProto, x: Tensor) -> None:
    """Every operator; and again from the file that it writes after its weights have changed."""
    module = OnnxModule(model)
    same_as_onnxruntime(model.SerializeToString(), module, x)


def test_every_operator_is_compared() -> None:
    """The three models have all that is supported."""
    nodes = [node for text in (IMAGES, TEXT, NUMBERS) for node in model_of(text).graph.node]

    assert {node.op_type for node in nodes} - {"Constant"} == {*OPERATORS}


def test_before_opset_18_axes_and_parts_are_said_otherwise() -> None:
    """By an attribute, and by the number of outputs."""
    text = (
        "g (float[N, 6] x) => (float[N] y) { a, b = Split <axis = 1> (x) c = Sub (a, b) "
        "y = ReduceMean <axes = [1], keepdims = 0> (c) }"
    )
    model = model_of(text, 13)

    same_as_onnxruntime(model.SerializeToString(), OnnxModule(model), torch.from_numpy(values(2, 6)))


@pytest.mark.parametrize(
    ("starts", "ends", "steps"),
    [
        ([-1], [-100], [-1]),
        ([5], [0], [-2]),
        ([100], [-(2**63)], [-3]),
        ([-2], [1], [-1]),
        ([1], [4], [-1]),
        ([-100], [-100], [-1]),
        ([-100, 3], [4, 0], [2, -1]),
    ],
)
def test_slices_go_backwards(starts: list[int], ends: list[int], steps: list[int]) -> None:
    """From the last to the first, with ends that lie outside, and with none between them."""
    axes = [1, 0][: len(starts)]
    constants = {"s": starts, "e": ends, "a": axes, "t": steps}
    lines = " ".join(f"{name} = Constant <value_ints = {value}> ()" for name, value in constants.items())
    model = model_of(f"g (float[4, 7] x) => (float[N, M] y) {{ {lines} y = Slice (x, s, e, a, t) }}")

    same_as_onnxruntime(model.SerializeToString(), OnnxModule(model), torch.from_numpy(values(4, 7)))


@pytest.mark.parametrize(("pads", "axes"), [([1, 2], [1]), ([1, -1, 0, 3], [-1, 0]), ([0, 2, 1, 1, 0, -1], None)])
def test_pads_are_those_of_the_axes(pads: list[int], axes: list[int] | None) -> None:
    """In the order of the axes, also of those that are counted from the end, or of all."""
    given = "" if axes is None else f"a = Constant <value_ints = {axes}> ()"
    lines = f"p = Constant <value_ints = {pads}> () v = Constant <value_float = 0.5> () {given}"
    model = model_of(
        f"g (float[3, 4, 5] x) => (float[N, M, K] y) {{ {lines} y = Pad (x, p, v{', a' if axes else ''}) }}"
    )

    same_as_onnxruntime(model.SerializeToString(), OnnxModule(model), torch.from_numpy(values(3, 4, 5)))


def test_sparse_tensors_are_refused() -> None:
    """By name, as initializers and as constants: the module would have a weight less."""
    dense = numpy_helper.from_array(np.ones(2, np.float32), "sparse weight")
    sparse = helper.make_sparse_tensor(dense, numpy_helper.from_array(np.array([1, 5])), [8])
    model = model_of("g (float[N, 8] x) => (float[N, 8] y) { y = Identity (x) }")
    model.graph.sparse_initializer.append(sparse)
    with pytest.raises(OnnxError, match=r"initializers 'sparse weight' are sparse.* export the model with dense"):
        OnnxModule(model)
    model.graph.ClearField("sparse_initializer")
    model.graph.node.append(helper.make_node("Constant", [], ["c"], sparse_value=sparse))
    with pytest.raises(OnnxError, match=r"the node of 'c' is a Constant with a sparse_value: export"):
        OnnxModule(model)


def test_a_model_trains_and_is_written_back(tmp_path: Path) -> None:
    """Its parameters have the initializers' names, batch normalization its statistics, and scalars stay."""
    model = model_of(IMAGES)
    module, x = OnnxModule(model), torch.from_numpy(values(2, 3, 9, 8))
    before = module(x).detach()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x).square().sum().backward()
    optimizer.step()
    module.save(tmp_path / "trained.onnx")
    written = popdist.onnx.load(tmp_path / "trained.onnx")

    assert {*dict(module.named_parameters())} == {*(name for name in WEIGHTS if "." in name), "scale", "bias"}
    assert {*dict(written.named_buffers())} >= {"mean", "variance"}
    assert not torch.equal(module.eval()(x), before)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), written.parameters(), strict=True))
    same_as_onnxruntime((tmp_path / "trained.onnx").read_bytes(), module, x)
    assert [file.name for file in tmp_path.iterdir()] == ["trained.onnx"]
    with pytest.raises(OnnxError, match=r"cannot be written as an ONNX model: .*No such file"):
        module.save(tmp_path / "missing" / "trained.onnx")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OnnxError, match=r"cannot be written as an ONNX model: .*directory"):
        module.save(tmp_path / "folder")
    assert {file.name for file in tmp_path.iterdir()} == {"folder", "trained.onnx"}


@pytest.mark.parametrize(
    ("text", "opset", "error"),
    [
        ("y = NonZero (x)", 20, r"operators NonZero \(the node of 'y'\): set popdist.onnx.OPERATORS"),
        ("y = com.example.Add (x)", 20, "operators com.example.Add"),
        (
            'y = Conv <auto_pad = "SAME_UPPER"> (x, weight)',
            20,
            "of the operator Conv, has {'auto_pad': 'SAME_UPPER'}",
        ),
        ("y = Relu (x)", 11, r"has opset 11, .*convert_version\(model, 13\)"),
        ("y = Identity (x) z = Add (y, type)", 20, "cannot have a parameter called 'type'"),
    ],
)
def test_what_torch_cannot_compute_is_refused(text: str, opset: int, error: str) -> None:
    """With the operator, attribute or initializer at fault, and what to do."""
    model = model_of(f"g (float[N, 1, 4] x) => (float[N, 1, 4] y) {{ {text} }}", opset)
    with pytest.raises(OnnxError, match=error):
        OnnxModule(model)


def test_programs_add_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of other domains."""
    monkeypatch.setitem(OPERATORS, "com.example.Scale", lambda x, *, by: x * by)
    module = OnnxModule(model_of("g (float[N] x) => (float[N] y) { y = com.example.Scale <by = 3.0> (x) }"))

    assert torch.equal(module(torch.ones(2)), torch.full((2,), 3.0))


def test_inputs_are_those_of_the_file() -> None:
    """Where it fixes the batch size, other batches are refused before they meet a shape in it."""
    module = OnnxModule(model_of("g (float[2, 3] x) => (float[3, 2] y) { y = Transpose (x) }"))

    assert module(torch.ones(2, 3)).shape == (3, 2)
    with pytest.raises(OnnxError, match=r"'x' has the shape \(2, 3\) in the file, and was given \(4, 3\)"):
        module(torch.ones(4, 3))
    with pytest.raises(OnnxError, match="has the inputs x, and was called with 2"):
        module(torch.ones(2, 3), torch.ones(2, 3))


def test_an_error_of_torch_says_in_which_node() -> None:
    """A shape that does not fit is torch's to find."""
    module = OnnxModule(model_of("g (float[N, 3] x) => (float[N, 3] y) { y = MatMul (x, weight) }"))
    with pytest.raises(RuntimeError) as raised:
        module(torch.ones(2, 3))

    assert raised.value.__notes__ == ["This happened in MatMul, the node of 'y'."]


@pytest.mark.parametrize("content", [None, b"", b"no model\xff", TensorProto(dims=[1]).SerializeToString()])
def test_a_file_that_is_no_model_is_refused(content: bytes | None, tmp_path: Path) -> None:
    """Missing, empty, damaged, or of something else."""
    file = tmp_path / "model.onnx"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OnnxError, match=r"model.onnx cannot be read as an ONNX model: "):
        popdist.onnx.load(file)
