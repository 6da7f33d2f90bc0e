"""``examples_utils`` as far as programs load operations written in C++ with it: nothing is compiled or loaded.

What such an operation does here, a program says with ``poptorch.custom_op`` (see docs/poptorch.md).
"""

import logging
from typing import NoReturn

__all__ = ["load_lib", "load_lib_all", "load_lib_from"]

_log = logging.getLogger("examples_utils")


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"examples_utils has no {name!r} here: it is not installed, and poptorch stands for {', '.join(__all__)}"
    )


def load_lib(path: object, *_arguments: object, **_settings: object) -> None:
    """Do nothing: operations for IPUs, in the C++ file or folder ``path``, are not compiled."""
    _log.debug("load_lib(%s): nothing is compiled, there is no IPU", path)


load_lib_all = load_lib_from = load_lib
