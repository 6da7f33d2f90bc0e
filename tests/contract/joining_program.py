"""A program that joins the job of whoever started it; the arguments say what it does. Run as a script."""

import os
import sys

import psutil
import torch
from torch import distributed, nn

import popdist

TIMEOUT_SECONDS = 300.0


def tell(*words: object) -> None:
    """Write one line in one piece: the instances share the stream."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def plain() -> str:
    """A program that names the backend ``popdist``, and is told its rank by whoever started it."""
    rank, size = (
        next(int(os.environ[name]) for name in names if name in os.environ)
        for names in (
            ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"),
            ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"),
        )
    )
    if "RANK" in os.environ:
        distributed.init_process_group("popdist")
    else:
        store = f"file://{os.environ['PLAIN_STORE']}"
        distributed.init_process_group("popdist", init_method=store, rank=rank, world_size=size)
    total = torch.tensor([rank + 1.0])
    distributed.all_reduce(total)
    part = distributed.new_group(backend="popdist")
    distributed.all_reduce(total, group=part)
    backends = f"{distributed.get_backend()} {distributed.get_backend(part)}"
    distributed.destroy_process_group()
    return f"{backends} {total.item()}"


def join() -> None:
    """Every instance counts, knows its place, and trains; nothing that init() opened listens off loopback."""
    tell(*place(), trained())


def place() -> tuple[object, ...]:
    """How many replicas there are, where each instance is, and where init() listens."""
    before = _listening()
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    addresses = {address for address, _ in _listening() - before}
    ranks = popdist.all_gather(torch.tensor(popdist.instance_index())).tolist()
    local = popdist.all_gather(torch.tensor(popdist.local_instance_index())).sort().values.tolist()
    return popdist.num_replicas(), ranks, local, popdist.isPopdistEnvSet(), addresses


def trained() -> str:
    """The checksum of weights after three steps of all replicas; with torch's optimizer torch would load more."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = popdist.ReplicatedModel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1)))
    samples, replicas = torch.randn(2 * popdist.num_replicas(), 8), popdist.local_replicas()
    for _ in range(3):
        for x in model.micro_batches(samples[2 * replicas.start : 2 * replicas.stop]):
            model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
        model.zero_grad()
    return popdist.checksum(model)


def join_mpi() -> None:
    """The same in a program that uses MPI itself, so that MPI's own listeners are not counted."""
    from mpi4py import MPI

    assert MPI.Is_initialized()
    join()


def init_first() -> str:
    """popdist.init() before the program's own default group; both work."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    distributed.init_process_group("gloo")
    return _sums_of_both()


def init_last() -> str:
    """popdist.init() after the program's own default group; both work."""
    distributed.init_process_group("gloo")
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    return _sums_of_both()


def torch_helpers() -> None:
    """What asks torch for the ranks finds the instances; nobody destroys the group."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS, torch_distributed=True)
    ones = torch.ones(1)
    distributed.all_reduce(ones)
    tell(ones.item())


def torch_helpers_fail() -> None:
    """The same, and instance 1 raises while the others wait for it there."""
    torch_helpers()
    if distributed.get_rank() == 1:
        raise ValueError("this instance cannot go on")
    distributed.barrier()


def fail() -> None:
    """Instance 1 raises; the others wait for it."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    if popdist.instance_index() == 1:
        raise ValueError("this instance cannot go on")
    popdist.barrier()


def _sums_of_both() -> str:
    ones = torch.ones(1)
    distributed.all_reduce(ones)
    distributed.destroy_process_group()
    return f"{ones.item()} {popdist.all_reduce(torch.ones(1)).item()}"


def _listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="inet")
    return {(it.laddr.ip, it.laddr.port) for it in connections if it.status == psutil.CONN_LISTEN}


PROGRAMS = (plain, join, join_mpi, init_first, torch_helpers, torch_helpers_fail, fail)

if __name__ == "__main__":
    for name in sys.argv[1:]:
        if told := {it.__name__: it for it in PROGRAMS}[name]():
            tell(told)
