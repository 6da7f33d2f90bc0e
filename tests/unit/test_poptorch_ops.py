"""Operations of poptorch: what each gives, that gradients pass through it, and what it refuses.

Holds poptorch.ops.program_functions, poptorch.ops.selection, poptorch.ops.hints, poptorch.ops.beam_search and
poptorch.ops.torch_operators.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import poptorch
from tests.unit.poptorch_models import Forward

SERIAL = poptorch.MatMulSerializationMode


def _numbers(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape).requires_grad_()


def test_a_loop_feeds_a_function_its_results() -> None:
    """As often as it says, with gradients, and without touching its inputs."""
    x, y = _numbers(3), _numbers(3)

    def body(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a += b
        return a, b * 2

    first, second = poptorch.for_loop(3, body, [x, y])
    assert torch.equal(first, x + 7 * y)
    assert torch.equal(second, 8 * y)
    first.sum().backward()
    assert y.grad is not None
    assert y.grad.tolist() == [7.0] * 3
    assert torch.equal(x, torch.arange(1.0, 4.0))
    assert torch.equal(poptorch.for_loop(0, body, [x])[0], x)
    assert torch.equal(poptorch.for_loop(2, lambda a: a + 1, [x])[0], x + 2)


@pytest.mark.parametrize("is_true", [True, False])
def test_a_condition_calls_one_function(is_true: bool) -> None:  # noqa: FBT001 - a case
    """And gives its results in a list, also one alone."""
    x = _numbers(2)
    called: list[str] = []

    def then(a: Tensor) -> Tensor:
        called.append("then")
        return a * 2

    def otherwise(a: Tensor, b: Tensor) -> tuple[Tensor]:
        called.append("else")
        return (a + b,)

    (result,) = poptorch.cond(torch.tensor([is_true]), then, [x], otherwise, [x, torch.ones(2)])
    result.sum().backward()
    assert called == (["then"] if is_true else ["else"])
    assert x.grad is not None
    assert x.grad.tolist() == [2.0 if is_true else 1.0] * 2


def test_what_passes_tensors_on_changes_nothing() -> None:
    """Gradients are those of the tensors themselves."""
    x, y = _numbers(2, 3), _numbers(2, 3)

    assert poptorch.nop(x) is x
    assert poptorch.recomputationCheckpoint(x) is x
    assert poptorch.recomputationCheckpoint(x, y) == (x, y)
    assert poptorch.set_available_memory(x, 0.3) is x
    nest = {"a": [x, (y,)]}
    assert poptorch.set_overlap_for_input(nest, poptorch.OverlapMode.OverlapAccumulationLoop) is nest
    assert poptorch.set_overlap_for_output(x, poptorch.OverlapMode.NoOverlap) is x


@pytest.mark.parametrize("mode", list(SERIAL))
def test_a_serialized_product_is_the_product(mode: poptorch.MatMulSerializationMode) -> None:
    """To the bit, whatever the mode."""
    lhs, rhs = torch.randn(2, 4, 6), torch.randn(6, 8)

    assert torch.equal(poptorch.serializedMatMul(lhs, rhs, mode, factor=2, keep_precision=True), lhs @ rhs)
    if mode is not SERIAL.Disabled:
        with pytest.raises(poptorch.Error, match="which 5 does not divide"):
            poptorch.serializedMatMul(lhs, rhs, mode, factor=5)


def test_scopes_are_only_names() -> None:
    """They can be nested; convolutions cannot."""
    with (
        poptorch.NameScope("a") as scope,
        poptorch.NameScope("b"),
        poptorch.Attribute(__outline={"layer": "c"}) as kept,
    ):
        assert (scope.name, kept.attributes) == ("a", {"__outline": {"layer": "c"}})
    plan = poptorch.MultiConv().availableMemoryProportions([0.1, 0.2]).partialsTypes(torch.half)
    plan.planType(poptorch.MultiConvPlanType.Serial).perConvReservedTiles(10).cycleBackOff(0.5)
    with plan:
        assert plan.settings["availableMemoryProportions"] == [0.1, 0.2]
        assert plan.settings["partialsTypes"] == [poptorch.MultiConvPartialsType.Half]
        with pytest.raises(poptorch.Error, match="within another one"), poptorch.MultiConv():
            pass
    with plan.enableConvDithering(True):  # noqa: FBT003 - PopTorch's
        assert (plan.settings["cycleBackOff"], plan.settings["enableConvDithering"]) == (0.5, [True])


def test_an_example_may_slice_over_the_end() -> None:
    """When a model is compiled; a run with such values is refused."""

    def forward(_: Forward, x: Tensor) -> Tensor:
        return poptorch.dynamic_update(x, poptorch.dynamic_slice(x, 0, x[0].long(), 2), 0, x[0].long(), 2)

    def uneven(_: Forward, x: Tensor) -> Tensor:
        return poptorch.dynamic_slice(x, 0, 0, 3, 2)

    x = torch.arange(4.0)
    model = poptorch.inferenceModel(Forward(forward))
    model.compile(x + 3)
    assert torch.equal(model(x), x)
    with pytest.raises(poptorch.Error, match="2 elements from 3 on"):
        model(x + 3)
    other = poptorch.inferenceModel(Forward(uneven))
    other.compile(x)
    with pytest.raises(poptorch.Error, match="step 2 must divide size 3"):
        other(x)


def test_operators_of_torch_do_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """They are differentiated; the loss is found, and the block."""
    ops = torch.ops.poptorch

    def forward(m: Forward, x: Tensor) -> Tensor:
        ops.push_name_scope("part")
        ops.begin_ipu_block(0, 0, 1)
        y = ops.nop(ops.ipu_print_tensor(ops.set_available_memory(x * m.weight, 0.1), "y"))
        ops.end_ipu_block()
        ops.pop_name_scope()
        loss: Tensor = ops.identity_loss(
            ops.set_overlap_for_output(ops.recomputation_checkpoint(y), "no_overlap"), 1
        )
        return loss

    model = Forward(forward)
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    assert training(torch.full((2,), 3.0)).item() == 3
    assert model.weight.tolist() == [-0.5, -0.5]
    assert capsys.readouterr().err.splitlines()[-1] == "y_gradient: (0.5, 0.5)"
    with pytest.raises(poptorch.Error, match=r"number of pipeline stages \(3\)"):
        poptorch.trainingModel(Forward(forward))(torch.ones(2))


def test_a_custom_op_runs_what_was_registered() -> None:
    """With its attributes and gradients; it gives what its example outputs say."""

    @poptorch.registerCustomOp("LeakyRelu", "tests")
    def leaky(x: Tensor, alpha: float) -> Tensor:
        return torch.nn.functional.leaky_relu(x, alpha)

    x = torch.tensor([-2.0, 4.0], requires_grad=True)
    (y,) = poptorch.custom_op([x], "LeakyRelu", "tests", 1, example_outputs=[x], attributes={"alpha": 0.5})
    y.sum().backward()
    assert y.tolist() == [-1.0, 4.0]
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 1.0]
    assert leaky(x, 1.0).tolist() == [-2.0, 4.0]
    with pytest.raises(
        poptorch.Error, match=r"no implementation of the custom op tests\.Cube: .* tests\.LeakyRelu"
    ):
        poptorch.custom_op([x], "Cube", "tests", 1, example_outputs=[x])
    with pytest.raises(poptorch.Error, match=r"LeakyRelu must give"):
        poptorch.custom_op([x], "LeakyRelu", "tests", 1, [torch.zeros(3)], {"alpha": 1.0})


def test_a_function_on_the_host_is_called() -> None:
    """With its arguments, and again with those of its last call."""
    on_host = poptorch.CPU(lambda x, scale: x * scale, "mine")
    on_host.registerPersistentData()
    with pytest.raises(poptorch.Error, match="'mine' has not been called"):
        on_host.execute()

    assert on_host(torch.ones(2), scale=3).tolist() == on_host.execute().tolist() == [3.0, 3.0]


@given(
    dim=st.integers(-2, 1), start=st.integers(0, 6), size=st.sampled_from([1, 2, 4]), step=st.sampled_from([1, 2])
)
def test_slices_are_those_of_torch(dim: int, start: int, size: int, step: int) -> None:
    """Of any dimension; an update puts a slice back, with the gradients of both parts."""
    x = _numbers(10, 10)
    index = [slice(None)] * 2
    index[dim] = slice(start, start + size, step)
    if size % step == 0:
        found = poptorch.dynamic_slice(x, dim, torch.tensor([start], dtype=torch.int32), size, step)
        assert torch.equal(found, x[tuple(index)])
    index[dim] = slice(start, start + size)
    new = torch.zeros_like(x[tuple(index)]).requires_grad_()
    updated = poptorch.dynamic_update(x, new, dim, torch.tensor(start), size)
    assert torch.equal(poptorch.dynamic_slice(updated, dim, start, size), new)
    updated.sum().backward()
    assert x.grad is not None
    assert new.grad is not None
    assert x.grad.sum() + new.grad.sum() == 100


def test_a_tensor_is_printed_with_its_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, in the form that was asked for; what is returned is the same tensor to compute with."""
    x = torch.tensor([[1.0, 2.5]], requires_grad=True)
    printed = poptorch.ipu_print_tensor(x, "x", float_format="fixed", digits=2, separator="; ")
    (printed * 3).sum().backward()
    poptorch.ipu_print_tensor(torch.tensor([7], dtype=torch.int32), "n")
    poptorch.ipu_print_tensor(x.bfloat16(), "half", print_gradient=False, float_format="scientific", digits=1)
    poptorch.ipu_print_tensor(torch.zeros(9), "long", summarise_threshold=4, edge_items=1, float_format="none")

    assert capsys.readouterr().err.splitlines() == [
        "x: ((1.00; 2.50))",
        "x_gradient: ((3.00; 3.00))",
        "n: (7)",
        "half: ((1.0e+00, 2.5e+00))",
        "long: (0.0, ..., 0.0)",
    ]
    assert x.grad is not None
    assert x.grad.tolist() == [[3.0, 3.0]]


def test_sampled_points_are_far_apart() -> None:
    """Each the farthest from those before it, in each cloud by itself; at random only where that is asked for."""
    points = torch.tensor([[0.0], [1.0], [10.0], [4.0], [5.0], [5.0]])

    assert poptorch.fps(points, [0, 4, 6], ratio=0.75).tolist() == [0, 2, 3, 4, 5]
    assert poptorch.fps(points, torch.tensor([0, 4, 4, 6])).tolist() == [0, 2, 4]
    assert set(poptorch.fps(points, [0, 6], 1.0, random_start=True).tolist()) <= set(range(6))
    assert poptorch.fps(torch.zeros(0, 3), [0, 0]).tolist() == []


def test_the_nearest_point_is_of_the_same_cloud() -> None:
    """The first one of several."""
    x, y = torch.tensor([[0.0, 0.0], [9.0, 9.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [8.0, 8.0]])

    assert poptorch.nearest(x, y).tolist() == [0, 2]
    assert poptorch.nearest(x, y, torch.tensor([0, 1]), torch.tensor([1, 0, 0])).tolist() == [1, 0]
    assert poptorch.nearest(x[:0], y).tolist() == []


@given(seed=st.integers(0, 2**20), time=st.integers(1, 5), blank=st.integers(0, 2))
def test_a_wide_beam_finds_the_most_probable_labels(seed: int, time: int, blank: int) -> None:
    """Its probabilities are those that torch's CTC loss has, and together not above 1."""
    logs = torch.randn(time, 1, 3, generator=torch.Generator().manual_seed(seed)).double().log_softmax(-1)
    decoder = poptorch.CTCBeamSearchDecoder(blank=blank, beam_width=200, top_paths=200)
    values, counts, labels = decoder(logs, torch.tensor([time]))

    assert [values.dtype, counts.dtype, labels.dtype] == [torch.float64, torch.int32, torch.int32]
    found = values[0].isfinite()
    assert values[0][found].exp().sum() == pytest.approx(1.0)
    assert torch.equal(values[0], values[0].sort(descending=True).values)
    for value, count, sequence in list(zip(values[0][found], counts[0], labels[0], strict=False))[:8]:
        targets, length = sequence[:count].long(), count.long().view(1)
        loss = torch.nn.functional.ctc_loss(
            logs, targets.view(1, -1), torch.tensor([time]), length, blank=blank, reduction="sum"
        )
        assert loss.item() == pytest.approx(-value.item(), abs=1e-9)
        assert (sequence[count:] == blank).all()


def test_a_beam_search_is_of_each_sample() -> None:
    """Each with its own length; a narrow beam finds what is certain, with a blank between equal labels."""
    certain = torch.full((5, 2, 3), -torch.inf)
    for moment, label in enumerate([1, 0, 1, 2, 2]):
        certain[moment, :, label] = 0.0
    values, counts, labels = poptorch.ctc_beam_search_decoder(
        certain, torch.tensor([5, 2]), beam_width=2, top_paths=2
    )

    assert counts.tolist() == [[3, 0], [1, 0]]
    assert labels[:, 0].tolist() == [[1, 1, 2, 0, 0], [1, 0, 0, 0, 0]]
    assert values.tolist() == [[0.0, -torch.inf], [0.0, -torch.inf]]


def _decode(probs: Sequence[int], lengths: list[int], **kwargs: int) -> Callable[[], object]:
    return lambda: poptorch.ctc_beam_search_decoder(torch.zeros(*probs), torch.tensor(lengths), **kwargs)


X = torch.ones(4)
WRONG: Any = poptorch
"""The library as a program without types sees it."""

REFUSED: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (ValueError, "inputs must be a list", lambda: poptorch.for_loop(1, abs, X)),  # type: ignore[arg-type]
    (ValueError, "its element 1 is int", lambda: poptorch.for_loop(1, abs, [X, 1])),  # type: ignore[list-item]
    (ValueError, "count must be", lambda: poptorch.for_loop(-1, abs, [X])),
    (poptorch.Error, "body must return what", lambda: poptorch.for_loop(1, lambda x: x[:2], [X])),
    (poptorch.Error, "body must return tensors", lambda: poptorch.for_loop(1, lambda _: 3, [X])),
    (ValueError, "of one element", lambda: poptorch.cond(X, abs, [X], abs, [X])),
    (ValueError, "is 1.5", lambda: poptorch.cond(1.5, abs, [X], abs, [X])),  # type: ignore[arg-type]
    (ValueError, "else_inps", lambda: poptorch.cond(X[:1], abs, [X], abs, X)),  # type: ignore[arg-type]
    (poptorch.Error, "then_body must", lambda: poptorch.cond(X[:1], lambda _: None, [X], abs, [X])),
    (AssertionError, "MatMulSerializationMode", lambda: poptorch.serializedMatMul(X, X, "rows")),  # type: ignore[arg-type]
    (AssertionError, "factor", lambda: poptorch.serializedMatMul(X, X, SERIAL.Disabled, -1)),
    (poptorch.Error, "between 0 and 1", lambda: poptorch.set_available_memory(X, 1.5)),
    (poptorch.Error, "mode must be", lambda: poptorch.set_overlap_for_input(X, 1)),  # type: ignore[arg-type]
    (AssertionError, "planType", lambda: poptorch.MultiConv().planType("serial")),  # type: ignore[arg-type]
    (AssertionError, "Tiles", lambda: poptorch.MultiConv().perConvReservedTiles(-1)),
    (AssertionError, "partials", lambda: poptorch.MultiConv().partialsTypes(torch.int32)),
    (AssertionError, "can be called", lambda: poptorch.CPU(3, "id")),  # type: ignore[arg-type]
    (poptorch.Error, "do not lie", lambda: poptorch.dynamic_slice(X, 0, 3, 2)),
    (poptorch.Error, "do not lie", lambda: poptorch.dynamic_slice(X, 1, 0, 1)),
    (poptorch.Error, "must divide", lambda: poptorch.dynamic_slice(X, 0, 0, 3, 2)),
    (poptorch.Error, "whole number", lambda: poptorch.dynamic_slice(X, 0, torch.tensor(0.5), 1)),
    (poptorch.Error, "src must be", lambda: poptorch.dynamic_update(X, torch.ones(3), 0, 0, 2)),
    (ValueError, "float_format", lambda: poptorch.ipu_print_tensor(X, float_format="hex")),
    (poptorch.Error, "into clouds", lambda: poptorch.fps(X[:, None], [0, 3])),
    (poptorch.Error, "ratio", lambda: poptorch.fps(X[:, None], [0, 4], ratio=0)),
    (poptorch.Error, "do not match", lambda: poptorch.nearest(X[:, None], torch.ones(2, 2))),
    (poptorch.Error, "given together", lambda: poptorch.nearest(X[:, None], X[:, None], torch.zeros(4))),
    (poptorch.Error, "in its cloud", lambda: poptorch.nearest(X[:, None], X[:0, None])),
    (poptorch.Error, "time, samples, classes", _decode((2, 3), [2])),
    (poptorch.Error, "one of 3 classes", _decode((2, 1, 3), [2], blank=3)),
    (poptorch.Error, "from 0 to 2", _decode((2, 1, 3), [5])),
    (poptorch.Error, "tensor must be a tensor, and is None", lambda: WRONG.dynamic_slice(None, 0, 0, 1)),
    (poptorch.Error, "size must be a whole number, and is '3'", lambda: WRONG.dynamic_slice(X, 0, 0, "3")),
    (poptorch.Error, "start must be a whole number, and is 2.5", lambda: WRONG.dynamic_slice(X, 0, 2.5, 1)),
    (poptorch.Error, "src must be a tensor", lambda: WRONG.dynamic_update(X, [1.0], 0, 0, 1)),
    (poptorch.Error, "x must be a tensor, and is None", lambda: WRONG.identity_loss(None, "mean")),
    (poptorch.Error, "Unsupported reduction []", lambda: WRONG.identity_loss(X, [])),
    (poptorch.Error, "body must be a function", lambda: WRONG.for_loop(1, None, [X])),
    (poptorch.Error, "else_body must be a function", lambda: WRONG.cond(X[:1], abs, [X], None, [X])),
    (poptorch.Error, "blank must be a whole number", _decode((2, 1, 3), [2], blank=True)),
    (poptorch.Error, "lhs must be a tensor", lambda: WRONG.serializedMatMul([1.0], X, SERIAL.Disabled)),
    (poptorch.Error, "tensor must be a tensor", lambda: WRONG.ipu_print_tensor(1.0)),
    (poptorch.Error, "separator must be a text", lambda: WRONG.ipu_print_tensor(X, separator=None)),
    (poptorch.Error, "ptr must be whole numbers", lambda: WRONG.fps(X[:, None], None)),
    (poptorch.Error, "batch_x must be a tensor", lambda: WRONG.nearest(X[:, None], X[:, None], 1, 1)),
    (poptorch.Error, "name must be a text", lambda: WRONG.registerCustomOp(None, "domain")),
    (ValueError, "inputs must be a list", lambda: WRONG.custom_op(None, "op", "domain", 1, [X])),
    (poptorch.Error, "takes a type", lambda: WRONG.registerCustomArgParser(None, None)),
    (poptorch.Error, "ipu_id must be", lambda: WRONG.Block("a", -1)),
    (poptorch.Error, "ipu_id must be", lambda: WRONG.BeginBlock(torch.nn.Linear(1, 1), "a", "1")),
    (poptorch.Error, "module must be a module", lambda: WRONG.removeBlocks(None)),
    (AssertionError, "names of its blocks", lambda: WRONG.Phase(None)),
    (AssertionError, "names of its blocks", lambda: WRONG.SerialPhasedExecution(None)),
    (AssertionError, "from 0", lambda: WRONG.Stage("a").ipu("1")),
    (AssertionError, "list of names", lambda: WRONG.Options().updatableNamedBuffers("mean")),
    (AssertionError, "True or False", lambda: WRONG.TensorLocationSettings().useReplicatedTensorSharding("no")),
    (AssertionError, "to 2**64 - 1", lambda: WRONG.Options().randomSeed(2**64)),
    (AssertionError, "two names", lambda: WRONG.Options().anchorTensor("x", None)),
    (poptorch.Error, "takes a dataset", lambda: WRONG.DataLoader(WRONG.Options(), None)),
    (AssertionError, "DataLoaderMode", lambda: WRONG.DataLoader(WRONG.Options(), [X], mode="Async")),
    (poptorch.Error, "buffer_size='3'", lambda: WRONG.AsynchronousDataAccessor([X], buffer_size="3")),
    (poptorch.Error, "rebatched_size=0", lambda: WRONG.AsynchronousDataAccessor([X], rebatched_size=0)),
    (poptorch.Error, "betas must be two", lambda: poptorch.optim.Adam([X], betas=0.9)),
    (poptorch.Error, "betas must be two", lambda: poptorch.optim.LAMB([X], betas=(0.9,))),
    (poptorch.Error, "lr must be a finite", lambda: poptorch.optim.SGD([X], lr=torch.inf)),
    (poptorch.Error, "momentum must be", lambda: poptorch.optim.SGD([X], 0.1, "0.9")),
    (poptorch.Error, "above 0", lambda: poptorch.optim.SGD([X], 0.1, loss_scaling=torch.inf)),
]


@pytest.mark.parametrize(("kind", "text", "call"), REFUSED)
def test_what_cannot_be_is_refused(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """By name."""
    with pytest.raises(kind, match=re.escape(text)):
        call()
