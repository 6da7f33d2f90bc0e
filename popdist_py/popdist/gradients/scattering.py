"""Adding the partial sums of the instances where each needs some numbers of the sum only.

The order is that of `popdist.gradients.exchange`, and so are the bits; what is spared is telling everybody all of
the sum, which is half of what goes over the network.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from popdist.comm.backend import Backend
from popdist.gradients.exchange import CHUNK_SIZE, add_partials, is_whole, nodes_of
from popdist.gradients.pieces import in_rounds
from popdist.groups import Group
from popdist.host_memory.host_collectives import HostCollectives
from popdist.layout import ReplicaLayout
from popdist.tree import Node, aligned_nodes

NEAR: Final = 16
"""Runs with fewer numbers than this between them go as one: between slots there are fewer, and nobody's."""


def joined(runs: Sequence[range]) -> list[range]:
    """``runs`` of numbers in a row, ascending; those that are near each other as one."""
    found: list[range] = []
    for run in sorted((it for it in runs if it), key=lambda it: it.start):
        if found and run.start - found[-1].stop < NEAR:
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return found


def scatter_sum(
    group: Group, layout: ReplicaLayout, own: Sequence[Tensor], wanted: Sequence[Sequence[range]]
) -> None:
    """Make what this instance wants of the first of ``own`` the sum over the partial sums of all instances.

    What stands elsewhere in it is nothing in particular afterwards.

    Args:
        group: All instances of the job.
        layout: Which replicas each of them owns.
        own: This instance's partial sums, as `popdist.gradients.exchange.nodes_of` names them.
        wanted: For each instance the runs of numbers that it wants, without overlap.

    Raises:
        BackendError: If an instance was lost or did not come in time.
    """
    backend = group.backend
    neighbours = None if own[0].is_cuda else backend.neighbours
    if neighbours is not None and not is_whole(layout.num_local_replicas * neighbours.group.size):
        neighbours = None
    rounds = [in_rounds(runs, max(1, CHUNK_SIZE // len(wanted))) for runs in wanted]
    add = _Among(backend, layout) if neighbours is None else _ByHosts(backend, neighbours, layout)
    for number in range(max(map(len, rounds))):
        runs = [it[number] if number < len(it) else [] for it in rounds]
        mine = runs[backend.instance_index]
        total = add(own, runs, max(sum(map(len, it)) for it in runs))
        lengths = [len(it) for it in mine]
        for run, part in zip(mine, total[: sum(lengths)].split(lengths), strict=True):
            own[0][run.start : run.stop] = part


class _Among:
    """Everybody sends to everybody."""

    def __init__(self, backend: Backend, layout: ReplicaLayout) -> None:
        self._backend = backend
        self._num_replicas = layout.num_replicas
        self._nodes = [nodes_of(layout, instance) for instance in backend.instances]

    def __call__(self, own: Sequence[Tensor], runs: Sequence[Sequence[range]], width: int) -> Tensor:
        sent = own[0].new_zeros(len(runs), max(map(len, self._nodes)), width)
        for number, row in enumerate(own):
            for into, wanted in zip(sent[:, number], runs, strict=True):
                _take(row, wanted, into)
        return add_partials(self._backend.all_to_all(sent), self._nodes, self._num_replicas)


class _ByHosts:
    """In the memory of each host first, then between the instances that have the same place on their hosts."""

    def __init__(self, backend: Backend, neighbours: HostCollectives, layout: ReplicaLayout) -> None:
        self._neighbours = neighbours
        self._num_replicas = layout.num_replicas
        self._num_local = neighbours.group.size
        self._peers = backend.subgroup(backend.instances[neighbours.group.rank :: self._num_local])
        block = layout.num_local_replicas * self._num_local
        self._nodes: list[list[Node]] = [
            aligned_nodes(first, first + block, layout.num_replicas)
            for first in range(0, layout.num_replicas, block)
        ]

    def __call__(self, own: Sequence[Tensor], runs: Sequence[Sequence[range]], width: int) -> Tensor:
        (row,) = own
        places = row.new_zeros(self._num_local, len(self._nodes), width)
        for instance, wanted in enumerate(runs):
            _take(row, wanted, places[instance % self._num_local, instance // self._num_local])
        mine = row.new_empty(len(self._nodes), 1, width)
        self._neighbours.reduce_scatter(mine.view(-1), places.view(self._num_local, -1).unbind(), "sum")
        return add_partials(self._peers.all_to_all(mine), self._nodes, self._num_replicas)


def _take(row: Tensor, runs: Sequence[range], into: Tensor) -> None:
    """Copy ``runs`` of ``row`` to the beginning of ``into``."""
    if runs:
        torch.cat([row[it.start : it.stop] for it in runs], out=into[: sum(map(len, runs))])
