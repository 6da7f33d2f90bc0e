"""Laws: the functions of a module whose names begin with ``law_``; every instance of a job runs them, in order."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import popdist

TIMEOUT_SECONDS = 300.0


def laws_of(module: object, prefix: str = "law_") -> list[Callable[..., None]]:
    """The laws of ``module`` whose names begin so."""
    return [law for name, law in vars(module).items() if name.startswith(prefix)]


def run_laws(name: str, folder: Path | None = None, prefix: str = "law_") -> int:
    """Join the job and run the laws of the module ``name``, each in a folder of its own; how many there were."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    laws = laws_of(import_module(name), prefix)
    for law in laws:
        popdist.barrier()
        law() if folder is None else law(folder / law.__name__)
    return len(laws)
