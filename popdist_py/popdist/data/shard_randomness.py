"""Random numbers of the instances that share a layer: different numbers for different parts of a tensor.

All instances of a replica draw the same numbers, because the tensors that all instances have must stay equal. For
a part that only one instance has, all instances draw a seed. The numbers of the part follow from this seed and the
part's place. So the numbers depend on seed, replica and place, also when activations are computed again.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from popdist.ground import torch_private
from popdist.ground.accelerators import accelerator
from popdist.job import context


@contextmanager
def sharded_randomness() -> Iterator[None]:
    """A context in which torch's random numbers, as for dropout, differ between instances of a pipeline stage.

    Use the context for a plain tensor of which each instance has a part. A DTensor needs no such context, because
    torch knows how a DTensor is divided. But a layer of ``ColwiseParallel`` returns a plain tensor::

        with popdist.parallel.sharded_randomness():
            hidden = torch.nn.functional.dropout(hidden, 0.1, self.training)

    All instances of the stage must enter the context. Afterwards these instances draw the same numbers again.
    """
    part = context.environment().contract.replica_part
    shared = context.environment().contract.parallelism
    with _numbers_of(part.shard if shared.has_mesh else part.index, torch.default_generator):
        yield


@contextmanager
def _numbers_of(place: int, source: torch.Generator) -> Iterator[None]:
    """A context in which torch's seed is a hash of the part's number ``place`` and a draw from ``source``."""
    seed = int(torch.randint(1 << 62, (), generator=source, device=source.device))
    own = int.from_bytes(hashlib.blake2b(f"{seed} {place}".encode(), digest_size=8).digest(), "little") >> 1
    with accelerator.forked_random_states(own):
        yield


@contextmanager
def _numbers_of_tensor(
    mesh: Any,
    placements: Any,
    generator: torch.Generator | None,
) -> Iterator[None]:
    """A context for random numbers of a DTensor: instances with different parts draw different numbers."""
    place, is_cut = 0, False
    for number, size, placement in zip(mesh.get_coordinate(), mesh.mesh.shape, placements, strict=True):
        if not (placement.is_replicate() or placement.is_partial()):
            place, is_cut = place * size + number, True
    source = torch.default_generator if generator is None else generator
    if is_cut:
        with _numbers_of(place, source):
            yield
    elif source is torch.default_generator:
        yield
    else:
        with torch.random.fork_rng(()):
            torch.default_generator.set_state(source.get_state())
            yield
            source.set_state(torch.default_generator.get_state())


def give_parts_numbers() -> None:
    """Make torch draw different random numbers for different parts of DTensors on CPUs, as on accelerators."""
    if not accelerator.num_devices():
        torch_private.set_numbers_of_dtensors(_numbers_of_tensor)
