"""Layers that the backward pass computes again: the same bits, and the memory that popsize predicts.

Holds popdist.phases.recompute.
"""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from measuring.live_bytes import LiveBytes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import popdist
from popdist.parallel import describe, recompute
from popsize.footprint import memory_of
from popsize.hardware import named_machine
from popsize.mapping import Mapping, Training, Workload
from popsize.model import Recompute
from tests.unit.test_describe import HIDDEN, Gpt


class Layer(nn.Module):
    """Draws from all generators, and writes a small buffer, a large one, and the one of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("seen", torch.ones(8))
        self.register_buffer("queue", torch.ones((1 << 16) + 1))
        self.register_buffer("none", None)
        self.seen: Tensor
        self.queue: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """An output that depends on all of them."""
        drawn = random.random() + float(np.random.rand())  # noqa: S311 - the subject
        y = self.dropout(self.norm(self.linear(x))) * self.seen.clone() * (float(self.queue[0]) * drawn)
        with torch.no_grad():
            self.seen = self.seen * 0.9 + y.detach().mean()
            self.queue.mul_(1.01)
        result: Tensor = x + y
        return result


class Tower(nn.Module):
    """Several of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def trained(change: Callable[[nn.Module], object], *, group_size: int = 1) -> dict[str, Tensor]:
    """What four local replicas have trained, in two steps of two micro batches each."""
    torch.manual_seed(1)
    module = Tower()
    change(module)
    model = popdist.ReplicatedModel(module, num_local_replicas=4, batch_norm_group_size=group_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y = torch.randn(48, 8), torch.randint(4, (48,))

    def body(x: Tensor, y: Tensor) -> None:
        cross_entropy(model(x), y).backward()

    for _ in range(2):
        model.run_micro_batches((x, y), body, accumulation=2)
        optimizer.step()
    model.eval()
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    state["drawn"] = torch.rand(3)
    return state | {f"torch of {key}": it["torch"] for key, it in model.randomness.state_dict().items()}


@pytest.mark.parametrize("what", ["layer", "attention"])
def test_the_bits_are_the_same(what: Any) -> None:
    """Weights, buffers and random states."""
    plain, again = trained(lambda module: module), trained(lambda module: recompute(module, what=what))

    assert list(plain) == list(again)
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []


def test_shared_statistics_are_refused() -> None:
    """Other replicas would compute in the middle of the layer."""
    with pytest.raises(popdist.WeightsError, match="Layer is recomputed, and has a BatchNorm layer that shares"):
        trained(recompute, group_size=2)


def test_a_graph_is_passed_twice() -> None:
    """A layer is computed again for each pass, from the same state."""
    torch.manual_seed(0)
    model = recompute(Tower(), layers=["layers.0", "layers.2"])
    loss = model(torch.randn(4, 8)).square().sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, list(model.parameters()))))


class Numbered(nn.Module):
    """Reads an attribute that its caller sets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        """An output that depends on the attribute."""
        result: Tensor = x + self.linear(x) * self.factor
        return result


@pytest.mark.parametrize("what", ["layer", "attention"])
def test_a_layer_that_computes_something_else_again_is_refused(what: Any) -> None:
    """In the first step, and in the first one in another mode or with other trained weights."""
    torch.manual_seed(0)
    layer = Numbered()
    model = recompute(nn.Sequential(layer, nn.Linear(8, 8)), layers=["0"], what=what)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*, is_changed: bool) -> None:
        layer.factor = 1.0
        loss = model(torch.randn(4, 8)).square().sum()
        layer.factor = 2.0 if is_changed else 1.0
        loss.backward()
        optimizer.step()

    for change in (lambda: None, model.eval, lambda: layer.linear.bias.requires_grad_(False)):  # noqa: FBT003 - torch's own
        change()
        with pytest.raises(
            popdist.WeightsError, match=r"^0 has computed something else the second time \(recompute"
        ):
            step(is_changed=True)
        step(is_changed=False)


def peak(what: Recompute, ids: Tensor) -> int:
    """The most bytes alive in a step after the first, of all tensors but the samples."""
    live = LiveBytes()
    with live:
        model = Gpt(fused=True, num_layers=12)
        if what != "none":
            recompute(model, what=what)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(2):
            live.peak = 0
            cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return live.peak


@pytest.mark.parametrize("what", ["none", "layer", "attention"])
def test_the_peak_is_as_predicted(what: Recompute) -> None:
    """Within 5 %, though most of the memory without recomputation is that of activations."""
    ids = torch.randint(16, (32, 32))
    workload = Workload(
        model=describe(Gpt(fused=True, num_layers=12), ids),
        machine=named_machine("1xA100-80GB", {}),
        training=Training(global_batch=32, precision="fp32"),
    )
    memory, _ = memory_of(workload, Mapping(micro_batch=32, recompute=what))

    predicted = memory.total - workload.constants.context_bytes
    assert peak(what, ids) / predicted == pytest.approx(1, abs=0.05)


def test_copies_and_files_recompute_too() -> None:
    """A copy does not call the layers that it was copied from."""
    torch.manual_seed(0)
    plain = Gpt(fused=True)
    model = recompute(copy.deepcopy(plain))
    ids = torch.randint(16, (32, 32))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - of ours
        with torch.no_grad():
            model.get_parameter("blocks.0.out.bias").add_(HIDDEN)
        assert torch.equal(plain(ids), other(ids))
        assert kept_bytes(other, ids) < kept_bytes(plain, ids) / 4


def kept_bytes(model: nn.Module, ids: Tensor) -> int:
    """Bytes that a forward pass leaves, the logits and the weights among them."""
    live = LiveBytes()
    with live:
        logits = model(ids)
        live.peak = 0
        torch.empty(1)  # has it count what there is
    del logits
    return live.peak


def test_a_cache_of_transformers_is_filled_once() -> None:
    """A Llama, and a GPT-2, which gives it by position, train as without one, though they have one by default."""
    transformers = pytest.importorskip("transformers")
    numbers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    gpt2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attn_implementation": "eager"}
    gpt2_config = transformers.GPT2Config(vocab_size=16, n_embd=32, n_head=2, n_layer=2, **gpt2)
    llama_config = transformers.LlamaConfig(vocab_size=16, **numbers)
    for kind, config in (
        (transformers.LlamaForCausalLM, llama_config),
        (transformers.GPT2LMHeadModel, gpt2_config),
    ):
        torch.manual_seed(0)
        model = kind(config)
        ids = torch.randint(16, (2, 8))
        model(ids, labels=ids, use_cache=False).loss.backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        recompute(model)(ids, labels=ids).loss.backward()

        assert all(map(torch.equal, expected, [parameter.grad for parameter in model.parameters()]))


@pytest.mark.parametrize(
    ("layers", "what", "words"),
    [
        (["layer.0"], "layer", "layers has 'layer.0', which is no module of Tower: it has layers.0, layers"),
        ([nn.Linear(1, 1)], "layer", "layers has 'Linear', which is no module of Tower: it has layers, layers.0"),
        (["head"], "all", "what='all' must be 'layer' or 'attention'"),
    ],
)
def test_wrong_arguments_are_refused(layers: list[Any], what: Any, words: str) -> None:
    """The message says what was found."""
    with pytest.raises(popdist.WeightsError, match=words):
        recompute(Tower(), layers=layers, what=what)


def test_modules_that_do_not_fit_are_refused() -> None:
    """One without layers, one that is none, and one whose layers are recomputed already."""
    for module, words in (
        (nn.Linear(1, 1), "Linear repeats no layer in a list: name them"),
        (3, "was given int"),
        (recompute(Tower()), r"layers\.\d is recomputed already"),
    ):
        with pytest.raises(popdist.WeightsError, match=words):
            recompute(module)  # type: ignore[arg-type] # the subject
