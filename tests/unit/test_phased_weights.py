"""The weights of a model made a few layers at a time: the values of the model in memory, and refusals by name.

Holds popdist.phases.phased_weights.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from measuring.control_group import ControlGroup
from safetensors.torch import save_file
from torch import Tensor, nn

from popdist.errors import WeightsError
from popdist.phases.phased_weights import unit_weights
from tests.running import run


class Block(nn.Module):
    """Draws in the order in which it is constructed; its norms have buffers, persistent ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)


class Table(nn.Module):
    """Has a parameter and a buffer that is in no state, and sets both."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(8, dtype=torch.float64))
        self.register_buffer("places", torch.empty(8, dtype=torch.int64), persistent=False)
        self.places: Tensor
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random scales; a buffer in place of the old one."""
        self.scale.data.normal_()
        self.places = torch.arange(8)


class Net(nn.Module):
    """Layers, an embedding that is tied to the head, and a parameter outside all units."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.table = nn.Embedding(10, 8), Table()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 10)
        self.head.weight = self.words.weight
        self.blocks[1].requires_grad_(requires_grad=False)

    @property
    def units(self) -> list[nn.Module]:
        """All but the table; not in the order in which they are constructed."""
        return [self.words, *self.blocks, self.head]


def made(net: Net, **settings: object) -> dict[str, Tensor]:
    """What the units get; after each, its parameters lose their memory, as those of a phased model do."""
    found: dict[str, Tensor] = {}
    for tensors in unit_weights(net, net.units, **settings):  # type: ignore[arg-type]
        assert not found.keys() & tensors.keys()
        found |= {name: tensor.clone() for name, tensor in tensors.items()}
        parameters = dict(net.named_parameters())
        for name in tensors:
            parameters[name].data = torch.tensor(torch.nan).expand(parameters[name].shape)
    return found


def in_memory() -> tuple[Net, dict[str, Tensor]]:
    """A model, and its parameters but for that outside the units."""
    torch.manual_seed(3)
    net = Net()
    return net, {name: it.detach().clone() for name, it in net.named_parameters() if name != "table.scale"}


def on_meta() -> Net:
    """The model without memory."""
    with torch.device("meta"):
        return Net()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether names and bits are the same."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_in_memory_gives_its_own() -> None:
    """Each once, the tied one too."""
    net, expected = in_memory()

    assert same(made(net), expected)
    assert "head.weight" not in expected
    assert net.head.weight is net.words.weight


def test_a_model_on_meta_draws_what_one_in_memory_draws() -> None:
    """The same bits, buffers and generator; what is outside the units stays in the model."""
    known, expected = in_memory()
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    net = on_meta()
    found = made(net)

    assert same(found, expected)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert same(dict(net.named_buffers()), dict(known.named_buffers()))
    assert torch.equal(net.table.scale, known.table.scale)
    assert net.head.weight is net.words.weight
    assert [it.requires_grad for it in net.parameters()] == [it.requires_grad for it in known.parameters()]


def test_what_a_module_cannot_set_is_refused_by_name() -> None:
    """Whether or not a function was given."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))
            self.register_buffer("mask", torch.ones(3))
            self.plain = torch.ones(3)

    for initialize, left in (
        (None, "1.factor, 1.mask, plain (an attribute of Scale): a module"),
        (lambda it: isinstance(it, nn.Linear) and it.weight.fill_(1.0), "0.bias: a module"),
    ):
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(3, 3), Scale())
        with pytest.raises(WeightsError, match=re.escape(f"nothing has set {left} sets its own")):
            list(unit_weights(net, net, initialize=initialize))


def test_a_function_sets_the_modules_of_a_unit() -> None:
    """Children first, then the unit, which may change what they hold."""
    net, seen = on_meta(), list[str]()

    def initialize(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(len(seen))
        if isinstance(module, Block):
            module.second.weight.fill_(0.5)

    found = made(net, initialize=initialize)

    assert seen == ["Embedding", "Table", *["Linear", "BatchNorm1d", "Linear", "Block"] * 3, "Linear"]
    assert {float(found[f"blocks.{place}.second.weight"].mean()) for place in range(3)} == {0.5}
    assert float(found["words.weight"].mean()) == 1
    assert float(net.table.scale.detach().mean()) == int(net.table.places[0]) == 2


def test_a_folder_of_safetensors(tmp_path: Path) -> None:
    """Of one file or of several with an index, or a file, into a model on meta or in memory."""
    known, expected = in_memory()
    state = known.state_dict()
    del state["head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    parts = tmp_path / "parts"
    parts.mkdir()
    names = sorted(state)
    for place in range(2):
        save_file({name: state[name] for name in names[place::2]}, parts / f"{place}.safetensors")
    index = {name: f"{place % 2}.safetensors" for place, name in enumerate(names)}
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")

    torch.manual_seed(4)
    for net, folder in ((on_meta(), tmp_path), (Net(), parts), (on_meta(), tmp_path / "model.safetensors")):
        assert same(made(net, weights=folder), expected)
        assert torch.equal(net.table.scale, known.table.scale)
        assert same(dict(net.named_buffers()), dict(known.named_buffers()))


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    """What lacks, what is there besides, or has another dtype or shape, by name; and files that are none."""
    state = in_memory()[0].state_dict()
    del state["head.weight"], state["words.weight"], state["blocks.2.norm.running_mean"]
    save_file(state | {"more": torch.ones(1)}, tmp_path / "model.safetensors")

    with pytest.raises(WeightsError) as refused:
        unit_weights(on_meta(), [], weights=tmp_path)
    assert str(refused.value) == (
        f"the safetensors files in {tmp_path} are not those of this Net: they lack words.weight, "
        "blocks.2.norm.running_mean; they have besides more"
    )
    state = {name: it for name, it in in_memory()[0].state_dict().items() if name != "head.weight"}
    save_file(state | {"head.bias": torch.ones(9)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"head.bias of .* is torch.float32 of shape \(9,\), .* shape \(10,\)"):
        made(on_meta(), weights=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(WeightsError, match="is no safetensors file, nor a folder of some, that can be read"):
            unit_weights(on_meta(), [], weights=folder)


LARGER = """
import sys, torch
from torch import nn
from popdist.parallel import phased
torch.manual_seed(0)
torch.set_num_threads(1)
with torch.device("meta"):
    net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024)) for _ in range(36)))
with torch.no_grad():
    print(phased(net, phases=36, store=sys.argv[1])(torch.ones(1, 1024)).isfinite().all().item())
"""


def test_a_model_of_twice_its_memory_is_made(
    limited_memory: Callable[[int], ControlGroup], disk_folder: Path
) -> None:
    """On the meta device, in a process that the kernel would kill if it held more: 577 MiB of weights in 300."""
    group = limited_memory(300 << 20)
    done = run(group.command([sys.executable, "-c", LARGER, str(disk_folder / "store")]))

    assert done.succeeded().out == "True\n"
    assert group.num_killed == 0
