"""Random numbers of the instances that share a layer: other ones where they hold other parts of a tensor.

All instances of a replica draw the same numbers, as what they have alike must stay alike. For a part that this
one alone has, a seed is drawn, which all do, and the part's own numbers follow from it and from the part's place.
So they depend on the seed, the replica and the place, also when activations are computed again.
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
    """Within it, torch draws other numbers on each instance of a stage: for plain tensors that are cut over them.

    A DTensor says how it is cut, and draws rightly by itself. What a layer of ``ColwiseParallel`` returns is a
    plain tensor, of which each instance has a part: only the program knows that::

        with popdist.parallel.sharded_randomness():
            hidden = torch.nn.functional.dropout(hidden, 0.1, self.training)

    All instances of the stage enter it alike. Afterwards they draw the same numbers again.
    """
    part = context.environment().contract.replica_part
    shared = context.environment().contract.parallelism
    with _numbers_of(part.shard if shared.has_mesh else part.index, torch.default_generator):
        yield


@contextmanager
def _numbers_of(place: int, source: torch.Generator) -> Iterator[None]:
    """Within it, torch draws the numbers of one place, which follow from a seed that ``source`` gives."""
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
    """Within it, torch draws what belongs to this instance's part of a tensor that is placed so."""
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
    """From now on let parts of DTensors on CPUs draw numbers of their own; on accelerators torch sees to it."""
    if not accelerator.num_devices():
        torch_private.set_numbers_of_dtensors(_numbers_of_tensor)
