"""The sum of what the replicas of all instances bring, exchanged between the instances.

An instance adds what it can of the tree over all replicas (`popdist.tree`), the instances exchange those partial
sums, and each finishes the same tree: so the bits of the sum do not depend on how the replicas are dealt to
instances. Instances of several hosts add in its memory first (`popdist.transport.two_level`), where those
of a host make up one node of the tree. An instance that needs a part of the sum only gets no more than that, which
spares half of what goes over the network.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from popdist.gradients.flat_buffers import FlatTensors, add_flat, sum_of
from popdist.gradients.shards import in_rounds
from popdist.groups import Group
from popdist.layout import ReplicaLayout
from popdist.transport.two_level import CHUNK_SIZE, Transport, TwoLevelReduction, WaitingPeers
from popdist.tree import Node, TreeSum, aligned_nodes, finish


def nodes_of(layout: ReplicaLayout, instance: int) -> list[Node]:
    """The partial sums that ``instance`` can make of its own replicas."""
    replicas = layout.replicas_of(instance)
    return aligned_nodes(replicas.start, replicas.stop, layout.num_replicas)


def nodes_of_hosts(layout: ReplicaLayout, num_local: int) -> list[list[Node]] | None:
    """For each host of ``num_local`` instances the one node that they make; None where they make up none."""
    block = layout.num_local_replicas * num_local
    if block & (block - 1):
        return None
    hosts = range(0, layout.num_replicas, block)
    return [aligned_nodes(first, first + block, layout.num_replicas) for first in hosts]


def sum_between(transport: Transport, layout: ReplicaLayout) -> TwoLevelReduction:
    """The sum over all replicas, between all instances, each of which counts as a host of its own."""
    nodes = [nodes_of(layout, instance) for instance in range(layout.num_instances)]
    return TwoLevelReduction(WaitingPeers(transport), nodes, layout.num_replicas)


def sum_over_hosts(group: Group, layout: ReplicaLayout, device: torch.device) -> TwoLevelReduction:
    """The sum over all replicas of tensors on ``device``: in the memory of each host first, where that can be."""
    backend = group.backend
    local_collectives = None if device.type == "cuda" else backend.local_collectives
    nodes = None if local_collectives is None else nodes_of_hosts(layout, local_collectives.size)
    if local_collectives is None or nodes is None:
        return sum_between(backend, layout)
    peers = backend.subgroup(backend.instances[local_collectives.group.rank :: local_collectives.size])
    return TwoLevelReduction(WaitingPeers(peers), nodes, layout.num_replicas, local_collectives)


def add_instances(group: Group, layout: ReplicaLayout, own: list[Tensor]) -> None:
    """Make the first of ``own``, this instance's partial sums, the sum over those of all instances."""
    sum_over_hosts(group, layout, own[0].device).all_reduce(own, sum_of(own[0].dtype))


NEAR: Final = 16
"""Runs with fewer numbers than this between them are joined: those between two slots belong to no parameter."""


def joined(runs: Sequence[range]) -> list[range]:
    """Join runs that are near each other; all runs in ascending order."""
    found: list[range] = []
    for run in sorted((run for run in runs if run), key=lambda run: run.start):
        if found and run.start - found[-1].stop < NEAR:
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return found


def scatter_sum(
    group: Group, layout: ReplicaLayout, own: Sequence[Tensor], wanted: Sequence[Sequence[range]]
) -> None:
    """Make what this instance wants of the first of ``own`` the sum over the partial sums of all instances.

    ``own`` are this instance's partial sums, as :func:`nodes_of` names them, and ``wanted`` is for each instance
    the runs of numbers that it wants, without overlap. What it does not want is undefined afterwards.
    """
    reduction, op = sum_over_hosts(group, layout, own[0].device), sum_of(own[0].dtype)
    rounds = [in_rounds(runs, max(1, CHUNK_SIZE // len(wanted))) for runs in wanted]
    for number in range(max(map(len, rounds))):
        runs = [parts[number] if number < len(parts) else [] for parts in rounds]
        shares = reduction.empty_shares(own[0], max(sum(map(len, asked)) for asked in runs), op)
        for instance, asked in enumerate(runs):
            for flat, share in zip(own, reduction.share_of(shares, instance), strict=False):
                if asked:
                    parts = [flat[run.start : run.stop] for run in asked]
                    torch.cat(parts, out=share[: sum(map(len, asked))])
        total = reduction.reduce_scatter(shares, op)
        mine = runs[group.backend.instance_index]
        lengths = [len(run) for run in mine]
        for run, part in zip(mine, total[: sum(lengths)].split(lengths), strict=True):
            own[0][run.start : run.stop] = part


class ReplicaTree:
    """The sum of flat tensors over all replicas of the job, to which local replicas are added one by one."""

    def __init__(self, group: Group, layout: ReplicaLayout) -> None:
        self._group = group
        self._layout = layout
        first = layout.replicas_of(group.backend.instance_index).start
        self._tree: TreeSum[FlatTensors] = TreeSum(layout.num_replicas, add_flat, start=first)

    def add(self, tensors: FlatTensors) -> None:
        """Add the next local replica's tensors, which then belong to this object."""
        self._tree.push(tensors)

    def finish(self) -> FlatTensors:
        """The sum over all replicas, the same on every instance, when every local replica was added."""
        own = self._tree.nodes
        if self._layout.num_instances == 1:
            return finish(own, self._layout.num_replicas, add_flat)
        for nodes in zip(*own.values(), strict=True):
            add_instances(self._group, self._layout, list(nodes))
        return next(iter(own.values()))
