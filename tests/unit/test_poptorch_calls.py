"""What a call of a poptorch model takes and gives: arguments fixed by the first call, split, and put together.

Holds poptorch.custom_types, poptorch.enums, poptorch.errors and poptorch.options.combined_batch.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import poptorch
from poptorch import CommGroupType, OutputMode
from poptorch.custom_types import PARSERS, flattened
from poptorch.executor.arguments import CallArguments
from poptorch.executor.outputs import Outputs
from poptorch.options.combined_batch import parts_of_micro_batches


class Pair(NamedTuple):
    """A tuple with names."""

    first: object
    second: object


@dataclass
class Boxes:
    """A program's own type."""

    corners: Tensor
    label: str
    scores: Tensor


class BoxesParser(poptorch.ICustomArgParser):
    """Its parser, which reads the original for what is no tensor."""

    def yieldTensors(self, struct: Boxes) -> Iterator[Tensor]:  # noqa: N802 - PopTorch's
        """Both."""
        yield struct.corners
        yield struct.scores

    def reconstruct(self, original_structure: Boxes, tensor_iterator: Iterator[Tensor]) -> Boxes:
        """With the label of the original."""
        return Boxes(next(tensor_iterator), original_structure.label, next(tensor_iterator))


@pytest.fixture(autouse=True)
def _types() -> Iterator[None]:
    poptorch.registerCustomArgParser(Boxes, BoxesParser())
    yield
    PARSERS.pop(Boxes)


def options(iterations: int = 1, accumulations: int = 1, replicas: int = 1) -> poptorch.Options:
    """Of a combined batch."""
    made = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    made.Training.gradientAccumulation(accumulations)
    return made


def starred(*args: object, **kwargs: object) -> None:
    """Takes anything."""


def plain(x: object) -> None:
    """Takes one."""


def with_defaults(x: object, y: object, z: object = None, u: object = 5) -> None:
    """Takes two to four."""


ONE = torch.ones(1)


def test_only_the_values_of_tensors_may_change() -> None:
    """The fragments of PopTorch's messages."""
    for first, later, message in (
        (((ONE,), {}), ((torch.ones(1, dtype=torch.int64),), {}), "x: expected torch.float32 but got torch.int64"),
        (((ONE,), {}), ((torch.ones(2),), {}), r"x: expected torch.Size\(\[1\]\) but got torch.Size\(\[2\]\)"),
        (((ONE,), {}), ((ONE.half(),), {}), "expected torch.float32 but got torch.float16"),
        (((ONE,), {}), ((ONE[0],), {}), r"expected torch.Size\(\[1\]\) but got torch.Size\(\[\]\)"),
        (((ONE, ONE, ONE), {}), ((ONE, ONE, None), {}), "Type mismatch for z: expected .*Tensor.* but got .*None"),
        (((ONE, ONE, ONE), {}), ((ONE, ONE), {}), "Missing arguments: z. Type mismatch for z: expected .*Tensor"),
        (
            ((ONE, ONE), {}),
            ((ONE, ONE), {"z": ONE}),
            "Unexpected arguments: z. Type mismatch for z: expected .*None",
        ),
        (((ONE, ONE), {"u": 5}), ((ONE, ONE), {"u": 3}), "mismatch for u: expected 5 but got 3"),
        (((ONE, ONE), {}), ((ONE, ONE), {"u": 3}), "mismatch for u: expected 5 but got 3"),
        (((ONE, ONE), {"u": 5}), ((ONE, ONE), {"u": True}), "Type mismatch for u"),
        (
            ((ONE, [ONE, ONE]), {}),
            ((ONE, [ONE]), {}),
            r"Missing arguments: y\[1\]. Value mismatch for y: expected 2",
        ),
        (
            ((ONE, {"a": 1}), {}),
            ((ONE, {"b": 1}), {}),
            r"Missing arguments: y\['a'\]. Unexpected arguments: y\['b'\]",
        ),
        (((ONE, (ONE, 2)), {}), ((ONE, (ONE, 3)), {}), r"mismatch for y\[1\]: expected 2 but got 3"),
        (((ONE, (ONE,)), {}), ((ONE, [ONE]), {}), "Type mismatch for y: expected .*tuple.* but got .*list"),
    ):
        args, kwargs = first
        forward = with_defaults if len(args) > 1 else plain
        fixed = CallArguments(forward, args, kwargs, options())
        fixed.micro_batches(*first)
        with pytest.raises(poptorch.Error, match=message):
            fixed.micro_batches(*later)


def test_starred_arguments_are_fixed_too() -> None:
    """By position and by name."""
    fixed = CallArguments(starred, (ONE,) * 5, {"x": ONE, "y": 1}, options())

    fixed.micro_batches((ONE,) * 5, {"y": 1, "x": ONE})
    for args, kwargs, message in (
        ((ONE,) * 4, {"x": ONE, "y": 1}, "positional arguments mismatch: expected 5 arguments but got 4"),
        ((ONE,) * 5, {"y": 1}, "Missing arguments: x."),
        ((ONE,) * 5, {"x": ONE, "y": 1, "z": 2}, "Unexpected arguments: z."),
    ):
        with pytest.raises(poptorch.Error, match=message):
            fixed.micro_batches(args, kwargs)


def test_the_first_call_is_one_that_forward_takes() -> None:
    """Python says so itself where forward takes whatever is given."""

    def forward(a: object, b: object, *, c: object = 1) -> None: ...

    def open_forward(a: object, *args: object) -> None: ...

    for args, kwargs, message in (
        ((ONE,), {}, "Mandatory parameter b missing"),
        ((ONE,) * 3, {}, "Too many arguments"),
        ((ONE,) * 2, {"d": 1}, "Unexpected arguments: d."),
        ((ONE,) * 2, {"b": ONE}, "given by position and by name: b"),
        ((ONE, torch.ones(2, 0)), {}, r"Zero-sized tensors are unsupported \(Got shape \[2, 0\]"),
        ((ONE, np.ones(2)), {}, "numpy"),
    ):
        with pytest.raises(poptorch.Error, match=message):
            CallArguments(forward, args, kwargs, options())
    assert CallArguments(open_forward, (), {}, options()).micro_batches((), {}) == [((), {})]


def test_a_combined_batch_must_divide() -> None:
    """The message lists what it must be a multiple of; a tensor without dims is passed whole."""
    made = options(2, 3, 4).inputReplicaGrouping(2, CommGroupType.Consecutive)
    with pytest.raises(AssertionError, match=r"\(7\).*deviceIterations\(2\).*replicationFactor\(4\)") as caught:
        CallArguments(plain, (torch.ones(7),), {}, made)
    assert "inputReplicaGrouping(2)" in str(caught.value)
    assert "gradientAccumulation(3) = 12" in str(caught.value)
    whole = CallArguments(plain, (ONE[0],), {}, made).micro_batches((ONE[0],), {})
    assert [args[0].shape for args, _ in whole] == [torch.Size([])] * 24


def test_replicas_of_a_group_get_the_same_samples() -> None:
    """Consecutive ones, or every so many."""
    for kind, expected in (
        (CommGroupType.Consecutive, [0, 0, 1, 1, 2, 2, 3, 3]),
        (CommGroupType.Orthogonal, [0, 1, 0, 1, 2, 3, 2, 3]),
    ):
        made = options(iterations=2, replicas=4).inputReplicaGrouping(2, kind)
        numbers = torch.arange(4)
        found = CallArguments(plain, (numbers,), {}, made).micro_batches((numbers,), {})
        assert [args[0].item() for args, _ in found] == expected == list(parts_of_micro_batches(made))


def test_lists_are_lists() -> None:
    """And dicts have the order of the first call, and registered objects what the call's own have."""

    def forward(x: object, y: object, z: object) -> None: ...

    boxes = Boxes(ONE, "first", ONE)
    given = ([ONE], [ONE, [1]], {"a": boxes, "b": 1})
    fixed = CallArguments(forward, given, {}, options())
    later = ([ONE], [ONE, [1]], {"b": 1, "a": Boxes(ONE, "second", ONE)})
    ((args, kwargs),) = fixed.micro_batches(later[:2], {"z": later[2]})

    assert type(args[0]) is list
    assert type(args[1]) is type(args[1][1]) is list
    assert list(kwargs["z"]) == ["a", "b"]
    assert kwargs["z"]["a"].label == "second"


def test_a_default_tensor_may_be_given_later() -> None:
    """In any call, by position or by name, and split; of its own shape and dtype in a micro batch."""

    def forward(x: Tensor, y: Tensor = ONE, z: Tensor | None = None) -> None: ...

    fixed = CallArguments(forward, (torch.ones(4),), {}, options(2))
    late = torch.tensor([1.0, 2.0])
    for args, kwargs in (((torch.ones(4), late), {}), ((torch.ones(4),), {"y": late}), ((torch.ones(4),), {})):
        found = fixed.micro_batches(args, kwargs)
        assert [len(own) for own, _ in found] == [1, 1]
        assert [named.get("y") for _, named in found] == ([1, 2] if len(args) + len(kwargs) == 2 else [None] * 2)
    for wrong, words in (
        (late.half(), "Type mismatch for y: expected torch.float32 but got torch.float16"),
        (torch.ones(4), r"Shape mismatch for y: expected torch.Size\(\[2\]\) but got torch.Size\(\[4\]\)"),
        (3.0, "Type mismatch for y"),
    ):
        with pytest.raises(poptorch.Error, match=words):
            fixed.micro_batches((torch.ones(4), wrong), {})


def test_what_holds_tensors_unseen_is_refused() -> None:
    """It would be passed whole."""
    PARSERS.pop(Boxes)
    try:
        with pytest.raises(poptorch.Error, match=r"registerCustomArgParser\(Boxes"):
            CallArguments(plain, (Boxes(ONE, "", ONE),), {}, options())
    finally:
        poptorch.registerCustomArgParser(Boxes, BoxesParser())
    with pytest.raises(poptorch.Error, match=r"is no poptorch\.ICustomArgParser"):
        poptorch.registerCustomArgParser(Boxes, object())  # type: ignore[arg-type]


COUNTS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))


def nested(num_rows: int) -> st.SearchStrategy[Any]:
    """Structures of all kinds over tensors of ``num_rows`` rows, and constants."""
    tensors = st.builds(
        lambda width, seed: torch.arange(num_rows * width).reshape(num_rows, width) + seed,
        st.integers(1, 2),
        st.integers(0, 9),
    )
    return st.recursive(
        tensors | st.sampled_from([None, 1, "a", 0.5]),
        lambda part: st.one_of(
            st.lists(part, max_size=3),
            st.lists(part, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), part, max_size=3),
            st.dictionaries(st.sampled_from("abc"), part, max_size=3).map(OrderedDict),
            st.builds(Pair, part, part),
            st.builds(Boxes, tensors, st.sampled_from("xy"), tensors),
        ),
        max_leaves=6,
    )


def same(one: Any, other: Any) -> bool:
    """Equal in structure, type and every element."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, Boxes):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@settings(max_examples=60, deadline=None)
@given(st.data(), COUNTS, st.integers(1, 2))
def test_what_is_split_comes_back_whole(data: st.DataObject, counts: tuple[int, int, int], rows: int) -> None:
    """Splitting and putting together all of it change nothing, for every structure."""
    iterations, accumulations, replicas = counts
    num_parts = iterations * accumulations * replicas
    value = data.draw(nested(num_parts * rows))

    def forward(x: list[Any]) -> None: ...

    fixed = CallArguments(forward, (value,), {}, options(*counts))
    outputs = Outputs(OutputMode.All, 1, *counts)
    found = fixed.micro_batches((value,), {})
    for args, _ in found:
        outputs.add(flattened(args[0]))

    assert len(found) == num_parts
    assert same(outputs.result(), value)


@settings(max_examples=80, deadline=None)
@given(
    COUNTS, st.integers(0, 2), st.integers(1, 4), st.sampled_from([m for m in OutputMode if m.name != "Default"])
)
def test_the_mode_says_which_results_are_kept(
    counts: tuple[int, int, int], rows: int, period: int, mode: OutputMode
) -> None:
    """Against an array of all results: iterations by accumulations by replicas by rows. 0 rows: no dims."""
    iterations, accumulations, replicas = counts
    num_steps = iterations * accumulations
    assume(mode is not OutputMode.EveryN or period <= num_steps)
    outputs = Outputs(mode, period, *counts)
    everything = torch.arange(num_steps * replicas * max(rows, 1), dtype=torch.float64)
    everything = everything.reshape(num_steps, replicas, max(rows, 1))
    reused = torch.empty(max(rows, 1), dtype=torch.float64)
    for step in range(num_steps):
        for replica in range(replicas):
            reused.copy_(everything[step, replica])  # as a buffer of the model that changes
            outputs.add(flattened({"value": reused if rows else reused[0], "constant": "c"}))
    kept = {
        OutputMode.All: everything,
        OutputMode.Final: everything[-1:],
        OutputMode.EveryN: everything[period - 1 :: period],
        OutputMode.Sum: everything.sum(0, keepdim=True),
    }[mode].reshape(-1)
    found = outputs.result()

    assert found["constant"] == "c"
    assert found["value"].shape == (() if not rows and len(kept) == 1 else kept.shape)
    assert torch.equal(found["value"].reshape(-1), kept)


def test_results_that_do_not_fit_are_refused() -> None:
    """With what was found."""
    with pytest.raises(poptorch.Error, match="period of 3 keeps none of the 2"):
        Outputs(OutputMode.EveryN, 3, 2, 1, 1)
    with pytest.raises(poptorch.Error, match="say which"):
        Outputs(OutputMode.Default, 1, 2, 1, 1)
    for values, message in (
        ((ONE, torch.ones(2)), r"gave torch.float32 \[2\], and an earlier one torch.float32 \[1\]"),
        ((ONE, (ONE, ONE)), "a result of 2 tensors, and an earlier one of 1"),
        ((ONE, ONE.half()), "torch.float16"),
        ((ONE.bool(), ONE.bool()), "truth values"),
    ):
        outputs = Outputs(OutputMode.Sum, 1, 2, 1, 1)
        outputs.add(flattened(values[0]))
        with pytest.raises(poptorch.Error, match=message):
            outputs.add(flattened(values[1]))


def test_a_result_may_be_nothing() -> None:
    """None is None, and nothing at all is, too."""
    outputs = Outputs(OutputMode.All, 1, 1, 1, 1)
    assert outputs.result() is None
    outputs.add(flattened(None))
    assert outputs.result() is None
