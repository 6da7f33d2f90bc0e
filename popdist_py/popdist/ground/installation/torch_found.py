"""The check of the torch that Python finds. Importing this module does not import torch."""

import re
import sys
from importlib import import_module
from typing import Any, Final

OLDEST_TORCH: Final = (2, 6)
"""The oldest version of torch that popdist supports, as in the extra ``torch`` of pyproject.toml."""

_OLDEST_WORDS: Final = ".".join(map(str, OLDEST_TORCH))


def trouble_of_torch(version: str, *, has_distributed: bool) -> str:
    """Return why popdist cannot train with this version of torch, and what to do; an empty text if popdist can."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        return (
            f"torch {version} is too old for popdist, which works with torch {_OLDEST_WORDS} and newer: "
            f"pip install 'torch>={_OLDEST_WORDS}'"
        )
    if not has_distributed:
        return (
            f"torch {version or 'of no version'} was built without torch.distributed, which popdist needs: "
            "install a build of its own project: pip install --force-reinstall torch"
        )
    return ""


def trouble_of_numpy(torch: str, numpy: str) -> str:
    """Return why torch cannot use numpy, and the remedy; ``numpy`` is numpy's version, empty if not installed."""
    if not numpy:
        return "popdist needs numpy, which is not installed: pip install 'poprun[torch]'"
    other = "numpy<2" if int(numpy.partition(".")[0]) > 1 else "numpy>=2"
    return (
        f"torch {torch} cannot use numpy {numpy}, for which it was not built, and popdist needs both: "
        f"pip install '{other}', or a torch that was built for this numpy"
    )


def find_trouble() -> str:
    """Import torch; return why popdist cannot train with this torch, and a remedy; empty text if popdist can."""
    try:
        torch: Any = import_module("torch")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "torch":
            raise
        return "popdist trains with torch, which is not installed: pip install 'poprun[torch]'"
    version, distributed = str(getattr(torch, "__version__", "")), getattr(torch, "distributed", None)
    if trouble := trouble_of_torch(version, has_distributed=bool(distributed and distributed.is_available())):
        return trouble
    try:
        torch.empty(0, dtype=torch.float32, device="cpu").numpy()
    except RuntimeError as error:
        if "Numpy is not available" in str(error):  # otherwise a mode of the program hides the numbers of tensors
            return trouble_of_numpy(version, getattr(sys.modules.get("numpy"), "__version__", ""))
    return ""
