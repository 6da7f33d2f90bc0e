"""Runs one suite of a torch backend's tests."""

from importlib import import_module
from types import ModuleType

from torch import distributed

from tests.contract.forked_ranks import Rank, run_ranks


def prepare() -> None:
    """Import the suites, in the process that forks the worlds.

    What some of them import is out of date, and would be an error in the tests' own process.
    """
    for name in ("calls", "hosts", "laws", "losses", "neighbours", "random", "turns", "watched"):
        import_module(f"tests.contract.backend_{name}")
    import_module("torch._inductor.compile_fx")  # torch.compile, which takes each rank five seconds to import


def run_suite(suite: str, backend: str, num_ranks: int, hosts: str, seed: int) -> None:
    """Fork ``num_ranks`` ranks for it, on ``hosts`` if that says where each is; what is random has ``seed``."""
    from tests.contract import (
        backend_calls,
        backend_hosts,
        backend_laws,
        backend_losses,
        backend_neighbours,
        backend_random,
        backend_turns,
        backend_watched,
    )

    if suite == "losses":
        backend_losses.run_all(backend, num_ranks, hosts)
        return
    suites = {
        "laws": lambda rank: _run_laws(rank, backend_laws, backend_turns, backend_calls, backend_watched),
        "random": lambda rank: backend_random.play(rank, seed, backend_random.NUM_CALLS),
        "neighbours": backend_neighbours.run_all,
        "hosts": backend_hosts.run_all,
    }
    run_ranks(suites[suite], backend, num_ranks, hosts=hosts)


def _run_laws(rank: Rank, *modules: ModuleType) -> None:
    """Every law of some modules, in their order."""
    for module in modules:
        for name, law in list(vars(module).items()):
            if name.startswith("law_"):
                distributed.barrier()
                law(rank)
