"""LAMB and LARS are their papers' equations and torch's optimizers; their norms are added in one order.

Holds popdist.optim.trust_ratio and popdist.optim.pieces.
"""

import copy
import math
from collections.abc import Iterator
from operator import add
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.optim import Optimizer

import popdist
from popdist.ground.tree import Node, aligned_nodes, finish
from popdist.optim import LAMB, LARS, pieces
from popdist.optim.elementwise import check_elementwise
from popdist.optim.pieces import Piece
from tests.tree_sums import tree_sum

NUM_STEPS = 100


def gradients(shape: tuple[int, ...] = (19, 23), dtype: torch.dtype = torch.float64) -> Iterator[Tensor]:
    """The same in each call."""
    values = torch.Generator().manual_seed(1)
    for step in range(NUM_STEPS):
        yield torch.randn(shape, generator=values, dtype=torch.float64).to(dtype) * (1 + step % 7)


def start(shape: tuple[int, ...] = (19, 23), dtype: torch.dtype = torch.float64) -> Tensor:
    """Weights."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def trained(kind: type[Optimizer], **settings: Any) -> Tensor:
    """Weights after all steps."""
    parameter = nn.Parameter(start())
    optimizer = kind([parameter], **settings)
    for gradient in gradients():
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("max_weight_norm", [None, 10.0])
@pytest.mark.parametrize("decay", [0.0, 0.03])
def test_lamb_is_its_papers_equation(
    bias_correction: bool,  # noqa: FBT001 - a case
    max_weight_norm: float | None,
    decay: float,
) -> None:
    """Algorithm 2 of arXiv 1904.00962, written as it stands there."""
    w, m, v = start(), torch.zeros(19, 23, dtype=torch.float64), torch.zeros(19, 23, dtype=torch.float64)
    for t, g in enumerate(gradients(), 1):
        m = 0.8 * m + (1 - 0.8) * g
        v = 0.99 * v + (1 - 0.99) * g**2
        m_hat, v_hat = (m / (1 - 0.8**t), v / (1 - 0.99**t)) if bias_correction else (m, v)
        u = m_hat / (v_hat.sqrt() + 1e-6) + decay * w
        phi = w.norm() if max_weight_norm is None else w.norm().clamp(max=max_weight_norm)
        w = w - 0.05 * phi / u.norm() * u
    given_settings = {"bias_correction": bias_correction, "max_weight_norm": max_weight_norm}
    found = trained(LAMB, lr=0.05, betas=(0.8, 0.99), weight_decay=decay, **given_settings)
    assert (found - w).abs().max() < 1e-12


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.03])
def test_lars_is_its_papers_equation(nesterov: bool, decay: float) -> None:  # noqa: FBT001 - a case
    """Algorithm 1 of arXiv 1708.03888, and the step that looks ahead."""
    w, v = start(), torch.zeros(19, 23, dtype=torch.float64)
    for g in gradients():
        local = 0.02 * w.norm() / (g.norm() + decay * w.norm())
        move = 0.5 * local * (g + decay * w)
        v = 0.9 * v + move
        w = w - (0.9 * v + move if nesterov else v)
    found = trained(LARS, lr=0.5, trust_coefficient=0.02, weight_decay=decay, nesterov=nesterov)
    assert (found - w).abs().max() < 1e-12


def test_groups_without_a_trust_ratio_are_adamw_and_sgd() -> None:
    """To float64's rounding."""
    adam = trained(torch.optim.AdamW, lr=0.01, weight_decay=0.0, eps=1e-6)
    assert (trained(LAMB, lr=0.01, weight_decay=0.0, trust_ratio=False) - adam).abs().max() < 1e-12
    sgd = trained(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1)
    assert (trained(LARS, lr=0.01, weight_decay=0.1, trust_ratio=False) - sgd).abs().max() < 1e-12


@pytest.mark.parametrize("kind", [LAMB, LARS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_the_bits_are_the_same_for_any_foreach(kind: type[Optimizer], dtype: torch.dtype) -> None:
    """Parameters one by one, some at once, or all."""
    found = []
    for foreach in (None, False, True):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(300, 300), (7,), (), (5, 1, 3)]]
        optimizer = kind(parameters, foreach=foreach, weight_decay=0.1)  # type: ignore[call-arg] # both take them
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape).to(dtype)
            optimizer.step()
        found.append(popdist.checksum({str(i): it.detach() for i, it in enumerate(parameters)}))
    assert len(set(found)) == 1


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_they_have_the_habits_of_torchs_optimizers(kind: Any) -> None:
    """Groups, maximize, closures, schedules, states that load, copies, gradients of None, other memory orders."""
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's stubs lack this form
    other = copy.deepcopy(net)
    other.weight.data = other.weight.data.contiguous()
    unused = nn.Parameter(torch.ones(3))
    optimizer = kind([{"params": [net.weight, unused], "lr": 0.2}, {"params": [net.bias]}], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    upward = kind([{"params": [other.weight], "lr": 0.2}, {"params": [other.bias]}], lr=0.1, maximize=True)
    x = torch.randn(2, 3, 5, 5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward()
        return loss

    for step in range(3):
        before = net.weight.detach().clone()
        assert optimizer.step(closure) > 0
        assert not torch.equal(net.weight, before)
        if step == 0:
            (-other(x).square().mean()).backward()
            upward.step()
            assert torch.allclose(other.weight, net.weight, rtol=1e-5, atol=1e-7)
        schedule.step()
    assert (unused == 1).all()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.0125]
    twin_net = copy.deepcopy(net)
    twin = kind([{"params": [twin_net.weight, nn.Parameter(torch.ones(3))]}, {"params": [twin_net.bias]}])
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for it, model in ((optimizer, net), (twin, twin_net)):
        it.zero_grad()
        model(x).sum().backward()
        it.step()
    assert torch.equal(net.weight, twin_net.weight)
    assert copy.deepcopy(optimizer).state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_zeros_move_and_nan_is_not_hidden() -> None:
    """The ratio of a zero norm is 1, and that of NaN is NaN."""
    for kind in (LAMB, LARS):
        zero, bad = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.ones(5))
        optimizer: Optimizer = kind([zero, bad], lr=0.1)
        zero.grad, bad.grad = torch.ones(5), torch.tensor([1.0, math.nan, 1.0, 1.0, 1.0])
        optimizer.step()
        assert (zero < -0.09).all()
        assert bad.isnan().all()


@pytest.mark.parametrize(
    ("kind", "given_settings", "said"),
    [
        (LAMB, {"lr": -1.0}, r"lr=-1.0 must be a number of at least 0"),
        (LAMB, {"betas": (0.9, 1.0)}, r"betas\[1\]=1.0 must be a number of at least 0 and below 1"),
        (LAMB, {"max_weight_norm": 0.0}, "max_weight_norm=0.0"),
        (LAMB, {"eps": "small"}, "eps='small' must be a number"),
        (LARS, {"momentum": 1.0}, "momentum=1.0 must be a number of at least 0 and below 1"),
        (LARS, {"momentum": 0.0, "nesterov": True}, "nesterov=True needs a momentum above 0"),
        (LARS, {"trust_coefficient": math.nan}, "trust_coefficient=nan"),
    ],
)
def test_bad_settings_are_named(kind: Any, given_settings: dict[str, Any], said: str) -> None:
    """With what was asked and what may be."""
    with pytest.raises(popdist.OptimizerError, match=said):
        kind([nn.Parameter(torch.ones(2))], **given_settings)


def test_sparse_gradients_are_refused() -> None:
    """With what to do."""
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(popdist.OptimizerError, match="sparse=False"):
        LAMB(table.parameters()).step()


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_a_subclass_stays_refused(kind: type[Optimizer]) -> None:
    """It may do anything."""
    with pytest.raises(popdist.OptimizerError, match="cannot shard Mine: it scales each"):
        check_elementwise(type("Mine", (kind,), {}), {}, {}, torch.device("cpu"))


def sum_as_the_module_says(x: Tensor) -> float:
    """The squares of blocks halved, and their sums in the tree, in the plainest way."""
    blocks: list[float] = []
    for block in x.double().square().split(128):
        numbers = block.tolist() + [0.0] * (128 - len(block))
        while len(numbers) > 1:
            half = len(numbers) // 2
            numbers = [numbers[i] + numbers[i + half] for i in range(half)]
        blocks += numbers
    return tree_sum(blocks, add)


@given(length=some.integers(1, 1500), seed=some.integers(0, 5), data=some.data())
@settings(max_examples=40, deadline=None)
def test_a_sum_is_the_same_for_any_cut_with_and_without_c(length: int, seed: int, data: some.DataObject) -> None:
    """And for any dtype that holds the numbers."""
    x = torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    dtype = data.draw(some.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
    x = x.to(dtype)
    wanted = sum_as_the_module_says(x)
    assert pieces.square_sums([x]) == [wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "find_extension", lambda: None)
        assert pieces.square_sums([x, torch.complex(x.double(), 0 * x.double())]) == [wanted, wanted]
    num_blocks = math.ceil(length / 128)
    cut = data.draw(some.integers(0, num_blocks))
    nodes: dict[Node, float] = {}
    for first, last in ((0, cut), (cut, num_blocks)):
        elements = range(first * 128, min(last * 128, length))
        piece = Piece(position=0, elements=elements, num_elements=length)
        sums = pieces.node_sums(x[elements.start : elements.stop], piece)
        nodes |= dict(zip(aligned_nodes(first, last, num_blocks), sums, strict=True))
    assert finish(nodes, num_blocks, add) == wanted


def test_huge_and_tiny_numbers_have_norms() -> None:
    """Whose squares float32 does not have."""
    assert pieces.square_sums([torch.full((3,), 1e30)])[0] == pytest.approx(3e60)
    assert pieces.square_sums([torch.full((3,), 1e-30), torch.empty(0)]) == [pytest.approx(3e-60), 0.0]
