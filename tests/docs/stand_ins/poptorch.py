"""The handful of PopTorch that docs/from-ddp.md calls, on the CPU, with one replica a process. It is not PopTorch.

It shows that the page's block is a program with PopTorch's order of calls, and that its calls of popdist are
popdist's, not how PopTorch behaves.
"""

import sys
from collections.abc import Sized
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import Dataset, Subset

import popdist

__all__ = ["DataLoader", "Options", "optim", "trainingModel"]


class Options:
    """Of a step: what the page sets, it takes."""

    def __init__(self, ipus_per_replica: int) -> None:
        assert popdist.checkNumIpusPerReplica(ipus_per_replica)
        assert popdist.getNumLocalReplicas() == 1
        self.Training = SimpleNamespace(gradientAccumulation=lambda number: number)

    def randomSeed(self, seed: int) -> None:  # noqa: N802 - PopTorch's name
        """Seed torch, too."""
        torch.manual_seed(seed)


def DataLoader(  # noqa: N802 - as above
    _options: Options, dataset: Dataset[Any], *, batch_size: int, shuffle: bool, num_workers: int
) -> torch.utils.data.DataLoader[Any]:
    """A block of the dataset for each process, whole steps only."""
    assert isinstance(dataset, Sized)
    length = len(dataset) // popdist.getNumInstances() // batch_size * batch_size
    block = range(popdist.getInstanceIndex() * length, (popdist.getInstanceIndex() + 1) * length)
    return torch.utils.data.DataLoader(
        Subset(dataset, block), batch_size=batch_size, shuffle=shuffle, num_workers=num_workers
    )


class trainingModel:  # noqa: N801 - as above
    """Makes whole steps."""

    def __init__(self, model: nn.Module, _options: Options, optimizer: optim.Optimizer) -> None:
        self._model = model
        self.setOptimizer(optimizer)
        popdist.broadcast_weights(model)

    def setOptimizer(self, optimizer: optim.Optimizer) -> None:  # noqa: N802 - as above
        """Take the optimizer as it is now."""
        self._optimizer = optimizer

    def __call__(self, *inputs: Tensor) -> Tensor:
        """One step; the losses of the local replicas."""
        self._optimizer.zero_grad()
        loss: Tensor = self._model(*inputs)
        loss.backward()
        popdist.all_reduce_gradients(self._model)
        self._optimizer.step()
        return loss.detach().reshape(1)


_module = ModuleType("popdist.poptorch")
vars(_module)["Options"] = Options
vars(popdist)["poptorch"] = sys.modules[_module.__name__] = _module
