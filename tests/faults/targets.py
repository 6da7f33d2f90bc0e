"""Find the processes of a running job of poprun's, to do something to one of them."""

import random

import psutil

from tests.faults.catalogue import Target

VICTIM = 1
"""The instance whose shim or agent is hit."""

_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")


def find_target(root: int, target: Target, chance: random.Random) -> psutil.Process | None:
    """The process of poprun's job that ``target`` means, or None while there is none."""
    if target is Target.SHIM:
        found = _victims([process for process in bare_interpreters(root) if not _is_agent(process)])
    elif target is Target.AGENT:
        found = _victims([process for process in bare_interpreters(root) if _is_agent(process)])
    elif target is Target.PROXY:
        found = named_processes(root, "hydra_pmi_proxy")
    elif target is Target.RUNTIME:
        found = [one for one in named_processes(root, "shim.py") if not _is_bare(one)][:1]
    else:
        found = [*named_processes(root, "shim.py"), *named_processes(root, "hydra"), *_programs(root)]
    return chance.choice(found) if found else None


def named_processes(root: int, name: str) -> list[psutil.Process]:
    """Living descendants of ``root`` whose command line holds ``name``, parents before children."""
    try:
        family = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in family if any(name in word for word in _words(process))]


def bare_interpreters(root: int) -> list[psutil.Process]:
    """The shims and the agents below poprun; the MPI runtime has their words in its command line, too."""
    return [process for process in named_processes(root, "shim.py") if _is_bare(process)]


def _is_bare(process: psutil.Process) -> bool:
    return _words(process)[1:2] == ["-I"]


def _programs(root: int) -> list[psutil.Process]:
    """The interpreters of the programs; poprun's own command line names the program, too."""
    return [
        process for process in named_processes(root, "program.py") if "program.py" in "".join(_words(process)[1:2])
    ]


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _is_agent(process: psutil.Process) -> bool:
    """An agent's parent is a shim; a shim's is the runtime or poprun."""
    try:
        parent = process.parent()
    except psutil.Error:
        return False
    return parent is not None and _is_bare(parent)


def _victims(family: list[psutil.Process]) -> list[psutil.Process]:
    """Those of instance ``VICTIM``; without an MPI runtime one shim forks the agents in their order.

    An agent that the host shim forked has the environment of its rank shim, but only its program shows it.
    """
    ranks = [_rank(process) for process in family]
    if any(rank is not None for rank in ranks):
        return [process for process, rank in zip(family, ranks, strict=True) if rank == str(VICTIM)]
    if len(family) == 1 and not _is_agent(family[0]):
        return family
    return sorted(family, key=lambda process: process.pid)[VICTIM : VICTIM + 1]


def _rank(process: psutil.Process) -> str | None:
    try:
        environments = [
            process.environ(),
            *(child.environ() for child in process.children() if _is_agent(process)),
        ]
    except psutil.Error:
        return None
    return next((one[name] for one in environments for name in _RANKS if name in one), None)
