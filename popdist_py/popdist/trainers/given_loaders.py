"""The loaders that a program gives to accelerate, before popdist deals their batches to replicas."""

from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DistributedSampler, IterableDataset

from popdist.errors import BatchError


def refuse_loader(loader: Any) -> None:
    """Raise BatchError if ``loader`` has a DistributedSampler, or batch_size=None without an IterableDataset."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise BatchError(
            "the loader has a DistributedSampler, which deals samples to processes: leave it out, and the "
            "Accelerator deals the batches to the replicas"
        )
    if not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is None:
        raise BatchError("the loader has batch_size=None: give it a batch_size, or a batch_sampler")


def seed_sampler(loader: Any) -> None:
    """Add a generator to a loader's random sampler that has none, as accelerate does for several processes."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", None)
    if hasattr(sampler, "generator") and sampler.generator is None:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        sampler.generator = torch.Generator().manual_seed(seed)


def source_of(batch_sampler: Any) -> Any:
    """Return the sampler whose batches ``batch_sampler`` deals, or ``batch_sampler`` itself."""
    return batch_sampler.batch_sampler if isinstance(batch_sampler, BatchSamplerShard) else batch_sampler
