"""One rank of a world that benchmarks/allreduce.py starts and orders about: python ranks.py KIND SOCKET.

Between two orders a rank sleeps in a read of its own, so that a world which has nothing to do takes no core from
one that is timed. That is why each rank has a connection: through MPI, it would have to poll for its orders.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

LARGEST_ORDER_BYTES = 4096
TIMEOUT_SECONDS = 120.0

PARTS = ("a call", "a barrier", "copy_", "add_")
"""Contenders that add nothing up."""

Operation = Callable[[], object]


class World(Protocol):
    """The ranks of one world as one of them sees it."""

    rank: int
    num_ranks: int
    library: str

    def contender(self, name: str, tensor: Tensor) -> tuple[Tensor, Operation]:
        """The tensor that is reduced, which may be another one of its size, and what reduces it."""
        ...

    def wait_for_others(self) -> None:
        """Wait for the other ranks."""
        ...


class TorchWorld:
    """A job that poprun has started, with its default group on gloo and another one on shared memory."""

    def __init__(self) -> None:
        import popdist
        from popdist.exchange.host_memory.host_group import HostGroup

        popdist.init()
        distributed.init_process_group("gloo")
        self._gloo = distributed.group.WORLD
        self._shared = distributed.new_group(backend="popdist")
        self._shared_empty = popdist.shared_empty
        self.rank, self.num_ranks = distributed.get_rank(), distributed.get_world_size()
        store = PrefixStore("in place", _get_default_store())
        host = HostGroup.connect(store, self.rank, self.num_ranks, timeout_seconds=TIMEOUT_SECONDS)
        if host is None:
            raise RuntimeError("the ranks share no memory")
        self._host = host
        self._alone = [distributed.new_group([rank], backend="popdist") for rank in range(self.num_ranks)]
        self.library = f"torch {torch.__version__}"

    def contender(self, name: str, tensor: Tensor) -> tuple[Tensor, Operation]:
        """One of gloo, popdist, popdist in place, popdist shared, and what these are made of."""
        if name == "popdist in place":
            return self._in_place(tensor)
        if name == "popdist shared":
            shared = self._shared_empty(len(tensor)).copy_(tensor)
            return shared, lambda: distributed.all_reduce(shared, group=self._shared)
        if name in {"add_", "copy_"}:
            other = torch.zeros_like(tensor)
            return tensor, partial(tensor.add_ if name == "add_" else tensor.copy_, other)
        if name == "a barrier":
            return tensor, self._host.barrier
        group = {"gloo": self._gloo, "popdist": self._shared, "a call": self._alone[self.rank]}[name]
        return tensor, lambda: distributed.all_reduce(tensor, group=group)

    def _in_place(self, tensor: Tensor) -> tuple[Tensor, Operation]:
        block = self._host.allocate(tensor.nbytes)
        mine = block.mine.view(torch.float32)
        mine.copy_(tensor)
        return mine, self._host.reduction([row.view(torch.float32) for row in block.rows]).run

    def wait_for_others(self) -> None:
        """Wait for the other ranks."""
        distributed.barrier(self._gloo)


class MpiWorld:
    """A job of mpiexec; the buffers are torch's, too."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._in_place = MPI.IN_PLACE
        self._world = MPI.COMM_WORLD
        self.rank, self.num_ranks = self._world.Get_rank(), self._world.Get_size()
        name, version = MPI.get_vendor()
        self.library = f"{name} {'.'.join(map(str, version))}"

    def contender(self, _name: str, tensor: Tensor) -> tuple[Tensor, Operation]:
        """The one that this MPI has."""
        array = tensor.numpy()
        return tensor, lambda: self._world.Allreduce(self._in_place, array)

    def wait_for_others(self) -> None:
        """Wait for the other ranks."""
        self._world.Barrier()


class Rank:
    """Carries orders out; keeps the buffers of one size, which all contenders of the world take in turn."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_bytes = 0
        self._contenders: dict[str, Operation] = {}

    def seconds(self, *, contender: str, num_bytes: int, times: int) -> float:
        """How long one all-reduce of ``num_bytes`` of float32 took, of ``times`` right after one another."""
        if num_bytes != self._num_bytes:
            self._contenders.clear()
            self._num_bytes = num_bytes
        if contender not in self._contenders:
            self._contenders[contender] = self._prepared(contender)
        operation = self._contenders[contender]
        self._world.wait_for_others()
        operation()
        start = time.perf_counter()
        for _ in range(times):
            operation()
        return (time.perf_counter() - start) / times

    def _prepared(self, name: str) -> Operation:
        """What is timed, after a check that it gives the sum; then with zeros, which stay what they are."""
        tensor = torch.full((self._num_bytes // 4,), float(self._world.rank + 1))
        reduced, operation = self._world.contender(name, tensor)
        operation()
        is_right = name in PARTS or bool((reduced == sum(range(self._world.num_ranks + 1))).all())
        if not is_right:
            raise RuntimeError(f"{name} does not give the sum of {self._num_bytes} bytes")
        self._world.wait_for_others()
        reduced.zero_()
        return operation


def main(kind: str, address: str) -> None:
    """Say who this is, then carry out orders until the driver hangs up."""
    torch.set_num_threads(1)
    world: World = TorchWorld() if kind == "torch" else MpiWorld()
    rank = Rank(world)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as driver:
        driver.connect(address)
        hello: dict[str, Any] = {"kind": kind, "rank": world.rank, "library": world.library, "pid": os.getpid()}
        driver.send(json.dumps(hello).encode())
        while order := driver.recv(LARGEST_ORDER_BYTES):
            driver.send(json.dumps(rank.seconds(**json.loads(order))).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
