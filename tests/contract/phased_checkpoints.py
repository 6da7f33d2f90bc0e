"""Checkpoints of models in phases that train on several hosts, or whose replicas several instances share."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import popdist
from popdist.checkpoint import load_latest, save
from popdist.parallel import PhasedOptimizer, phased, recompute
from tests.contract.phased_laws import losses_of, net
from tests.running import DEADLINE_SECONDS


def save_and_go_back(folder: Path) -> dict[str, Any]:
    """Each instance has a store of its own: save, train, load and train again; the bits at both ends."""
    popdist.init(timeout_seconds=DEADLINE_SECONDS)
    model = phased(net(), phases=3, store=folder / f"store-{popdist.instance_index()}")
    named: dict[str, Any] = {"model": model, "optimizer": PhasedOptimizer(model, torch.optim.AdamW, lr=0.01)}
    return {"ends": _ends(folder, named)}


def save_in_parts(folder: Path) -> dict[str, Any]:
    """As :func:`save_and_go_back`, by instances that have a part of each layer."""
    popdist.init(timeout_seconds=DEADLINE_SECONDS)
    made = net()
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in made.layers:
        parallelize_module(layer, popdist.device_mesh()["tensor"], plan)
    model = phased(made, phases=3, store=folder / "store")
    named: dict[str, Any] = {"model": model, "optimizer": PhasedOptimizer(model, torch.optim.AdamW, lr=0.01)}
    return {"ends": _ends(folder, named), "saved": _saved(named)}


def load_whole(folder: Path) -> dict[str, Any]:
    """Load what was saved in parts into a model that is whole, in memory and in phases; what it holds then."""
    popdist.init(timeout_seconds=DEADLINE_SECONDS)
    whole = popdist.ReplicatedModel(recompute(net()))
    model = phased(net(), phases=2, store=folder / "whole")
    found = []
    for named in (
        {"model": whole, "optimizer": torch.optim.AdamW(whole.parameters(), lr=0.01)},
        {"model": model, "optimizer": PhasedOptimizer(model, torch.optim.AdamW, lr=0.01)},
    ):
        load_latest(folder / "run", **named)
        found.append(_saved(named))
    return {"saved": found}


def _ends(folder: Path, named: dict[str, Any]) -> list[dict[str, bytes]]:
    """What is there after two steps, and after the second one from the checkpoint of the first."""
    losses_of(named["model"], named["optimizer"], num_steps=1)
    save(folder / "run", **named)
    ends = []
    for _ in range(2):
        losses_of(named["model"], named["optimizer"], accumulation=2, num_steps=1)
        ends.append(_saved(named))
        load_latest(folder / "run", **named)
    return ends


def _saved(named: dict[str, Any]) -> dict[str, bytes]:
    """The bytes of the model's state and the optimizer's, whole, by name."""
    names = {id(it): name for name, it in named["model"].named_parameters()}
    optimizer = named["optimizer"]
    parameters: list[nn.Parameter] = [it for group in optimizer.param_groups for it in group["params"]]
    state = {
        f"{names[id(parameters[number])]} {key}": it
        for number, them in optimizer.state_dict()["state"].items()
        for key, it in them.items()
    }
    tensors = {**named["model"].state_dict(), **state}
    return {name: _whole(it) for name, it in tensors.items()}


def _whole(tensor: Any) -> bytes:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return bytes(whole.detach().contiguous().view(-1).numpy().tobytes())
