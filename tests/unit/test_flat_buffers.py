"""Gradients are moved to the slots of flat buffers and back, and what an instance wants is sent in rounds."""

from collections.abc import Callable
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from popdist.gradients.flat_buffers import NEAR, GradientLayout, joined
from popdist.gradients.optimizer_steps import is_reduced
from popdist.gradients.shards import in_rounds

KINDS_OF_GRADIENTS: tuple[Callable[[], tuple[Parameter, torch.Tensor | None]], ...] = (
    lambda: (Parameter(torch.ones(3, 5)), torch.randn(3, 5)),
    lambda: (Parameter(torch.ones(3, 5)), torch.randn(5, 3).t()),
    lambda: (Parameter(torch.ones(5, 3).t()), torch.randn(5, 3).t()),
    lambda: (Parameter(torch.ones(1, 5)), torch.randn(5, 1).t()),
    lambda: (Parameter(torch.ones(3)), torch._neg_view(torch.randn(3))),
    lambda: (Parameter(torch.ones(3)), torch.randn(3, requires_grad=True) * 2),
    lambda: (Parameter(torch.ones(3)), None),
    lambda: (Parameter(torch.ones(3)), Parameter(torch.randn(3))),
    lambda: (Parameter(torch.ones(())), torch.randn(())),
    lambda: (Parameter(torch.ones(0, 2)), torch.randn(0, 2)),
    lambda: (Parameter(torch.ones(2, dtype=torch.float64)), torch.randn(2, dtype=torch.float64)),
    lambda: (Parameter(torch.ones(2, dtype=torch.float64)), None),
    lambda: (Parameter(torch.ones(2, dtype=torch.bfloat16)), torch.randn(2, dtype=torch.bfloat16)),
    lambda: (Parameter(torch.ones(2, dtype=torch.complex64)), torch.randn(2, dtype=torch.complex64).conj()),
    lambda: (Parameter(torch.ones(300, 300)), torch.randn(300, 300)),
    lambda: (Parameter(torch.ones(2, 2, 3, 3).to(memory_format=torch.channels_last)), torch.randn(2, 2, 3, 3)),
)


@given(st.lists(st.sampled_from(KINDS_OF_GRADIENTS), max_size=70), st.booleans())
def test_gradients_of_every_kind_fill_their_slots(
    kinds: list[Callable[[], tuple[Parameter, torch.Tensor | None]]],
    clears: bool,  # noqa: FBT001 - drawn
) -> None:
    """Slots hold their numbers or zeros, and torch has counted a write."""
    pairs = [kind() for kind in kinds]
    layout = GradientLayout((str(i), parameter) for i, (parameter, _) in enumerate(pairs))
    room = layout.make_wide()
    versions = [flat._version for flat in room.tensors]
    for flat in room.tensors:
        flat.fill_(7)
    for parameter, gradient in pairs:
        parameter.grad = gradient

    used = layout.fill(room, clears=clears)

    assert used == sum(1 << i for i, (_, gradient) in enumerate(pairs) if gradient is not None)
    for slot, (parameter, gradient) in zip(room.slots, pairs, strict=True):
        expected = torch.zeros_like(parameter) if gradient is None else gradient
        assert torch.equal(slot, expected.to(slot.dtype))
        assert parameter.grad is (None if clears else gradient)
        assert slot.stride() == torch.empty_like(parameter).stride()
    written = zip(room.tensors, versions, strict=True)
    assert all(flat._version > 1 + version for flat, version in written if flat.numel())


def test_slots_become_gradients_that_popdist_has_made() -> None:
    """Views of the slots; parameters that no replica has used get none."""
    parameters = [Parameter(torch.ones(2)) for _ in range(3)]
    layout = GradientLayout((str(i), parameter) for i, parameter in enumerate(parameters))
    room = layout.make_wide()
    parameters[2].grad = torch.ones(2)

    layout.set_gradients(room, 0b011)

    for parameter, slot in zip(parameters[:2], room.slots[:2], strict=True):
        assert parameter.grad is not None
        assert parameter.grad is not slot
        assert parameter.grad.data_ptr() == slot.data_ptr()
        assert is_reduced(parameter.grad)
    assert parameters[2].grad is None


@st.composite
def apart(draw: st.DrawFn) -> list[range]:
    """Runs of numbers without overlap, some of them empty, in any order."""
    runs, start = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50)))):
        runs.append(range(start + gap, start + gap + length))
        start += gap + length
    return draw(st.permutations(runs))


@given(apart())
def test_joined_runs_hold_all_numbers_and_gaps_that_are_small(runs: list[range]) -> None:
    """Each number once, in order; what else they hold lies between two runs that are near each other."""
    found = joined(runs)
    wanted = {number for run in runs for number in run}
    held = [number for run in found for number in run]
    assert held == sorted(set(held))
    assert wanted <= set(held)
    assert all(after.start - before.stop >= NEAR for before, after in pairwise(found))
    for number in set(held) - wanted:
        below, above = max(it for it in wanted if it < number), min(it for it in wanted if it > number)
        assert above - below <= NEAR


@given(apart(), st.integers(1, 30))
def test_rounds_are_full_and_in_order(runs: list[range], width: int) -> None:
    """Every round but the last has ``width`` numbers, and one after the other they are the runs."""
    rounds = in_rounds(runs, width)
    lengths = [sum(map(len, it)) for it in rounds]
    assert [number for it in rounds for run in it for number in run] == [number for run in runs for number in run]
    assert all(length == width for length in lengths[:-1])
    assert all(length > 0 for length in lengths)
