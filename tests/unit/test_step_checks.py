"""The schedule of the checks that cost time, and the checksums of parameters.

Holds popdist.step.checks.tensor_changes.
"""

import pytest
import torch
from torch import Tensor, nn

import popdist
from popdist.job.context import Checks
from popdist.phases.phased_layers import make_absent
from popdist.step.checks.step_checks import is_checked
from popdist.step.checks.tensor_changes import sum_parameters

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int32,
    torch.bool,
)


def test_the_first_steps_and_every_100th_are_checked() -> None:
    """Counted from 1."""
    assert [number for number in range(1, 301) if is_checked(number)] == [1, 2, 3, 100, 200, 300]


@pytest.mark.filterwarnings("ignore:this step has no gradient")
@pytest.mark.parametrize(("checks", "numbers"), [("full", [1, 2, 3, 100]), ("off", [])])
def test_a_model_counts_its_own_steps(checks: Checks, numbers: list[int]) -> None:
    """Those that ended with a gradient; one that was left does not count, and no step of another model."""
    popdist.init(checks=checks)
    model, other = (popdist.ReplicatedModel(nn.Linear(2, 1)) for _ in range(2))
    found = []
    try:
        for number in range(1, 101):
            with pytest.raises(KeyError), model.micro_batch(0):
                raise KeyError
            other.reduce_gradients(reduction="sum")
            with model.micro_batch(0):
                step = model._model_steps.step
                found += [number] if step is not None and step.checks.is_on else []
            model.reduce_gradients()
    finally:
        popdist.finalize()
    assert found == numbers


def module_of(*tensors: Tensor) -> nn.Module:
    """A module with nothing but parameters."""
    return nn.ParameterList([nn.Parameter(tensor, requires_grad=False) for tensor in tensors])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_sees_each_bit(dtype: torch.dtype) -> None:
    """Of tensors of any length; a change has the name of the parameter."""
    for length in range(1, 18):
        module = module_of(torch.zeros(2), torch.zeros(length).to(dtype))
        before = sum_parameters(module)
        data = module.get_parameter("1").data.view(torch.uint8)
        for place in range(len(data)):
            data[place] ^= 1
            assert before.first_change() == "1"
            assert sum_parameters(module).word != before.word
            data[place] ^= 1
        assert before.first_change() is None


def test_a_checksum_is_of_numbers_and_not_of_memory() -> None:
    """Strides and places in memory play no part; neither does a parameter without numbers."""
    rows = torch.randn(3, 5)
    places = torch.empty(16)
    places[1:] = rows.flatten()
    expected = sum_parameters(module_of(rows)).word
    assert sum_parameters(module_of(rows.t().contiguous().t())).word == expected
    assert sum_parameters(module_of(places[1:])).word == expected
    one, stored = torch.ones(()).expand(1), module_of(rows, torch.zeros(4, 4))
    make_absent([*stored.parameters()][1], torch.device("cpu"))
    assert sum_parameters(module_of(one)).word == sum_parameters(module_of(torch.ones(1))).word
    assert sum_parameters(stored).word == expected  # a weight that waits in a store
    lazy = nn.ModuleList([module_of(rows), nn.LazyLinear(3), nn.Linear(2, 2, device="meta")])
    assert sum_parameters(lazy).word == expected
    assert sum_parameters(module_of(torch.zeros(0))).sums == [0]
    assert sum_parameters(nn.Identity()).word != 0
