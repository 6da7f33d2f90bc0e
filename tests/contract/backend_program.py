"""Runs one suite of a torch backend's tests: ``backend_program.py SUITE BACKEND NUM_RANKS [HOSTS]``."""

import sys

from torch import distributed

from tests.contract import (
    backend_hosts,
    backend_laws,
    backend_losses,
    backend_neighbours,
    backend_random,
    backend_turns,
)
from tests.contract.forked_ranks import Rank, run_ranks


def run_laws(rank: Rank) -> None:
    """Every law of two modules, in their order."""
    for module in (backend_laws, backend_turns):
        for name, law in list(vars(module).items()):
            if name.startswith("law_"):
                distributed.barrier()
                law(rank)


SUITES = {
    "laws": run_laws,
    "random": backend_random.play,
    "neighbours": backend_neighbours.run_all,
    "hosts": backend_hosts.run_all,
}


if __name__ == "__main__":
    suite, backend, num_ranks, *more = sys.argv[1:]
    hosts = "".join(more)
    if suite == "losses":
        backend_losses.run_all(backend, int(num_ranks), hosts)
    else:
        run_ranks(SUITES[suite], backend, int(num_ranks), hosts=hosts)
