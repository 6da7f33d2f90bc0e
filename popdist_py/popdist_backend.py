"""The function that torch calls at its import, through the entry point ``torch.backends``, in a file of its own.

An exception here would end every program at ``import torch``. An interpreter may find the metadata of this
distribution and not its packages, as with PYTHONPATH and an editable installation, or another ``popdist.py``.
"""

from contextlib import suppress
from importlib import util
from typing import NoReturn


def register() -> None:
    """Register torch's backend ``popdist``; on failure register a backend that raises the reason. Never raises."""
    try:
        _register()
    except Exception as error:  # noqa: BLE001 - torch would raise the error in every `import torch`
        with suppress(Exception):  # a torch that has no backends, or other ones
            _register_reason(error)


def _register() -> None:
    spec = util.find_spec("popdist")
    if spec is None:
        raise ImportError("Python does not find popdist, of which it finds the metadata; install poprun again")
    if spec.submodule_search_locations is None:  # a program of that name must not run again
        raise ImportError(f"{spec.origin} stands in the way of the package popdist; give that file another name")
    from popdist.exchange.process_group import registration

    registration.register()


def _register_reason(reason: Exception) -> None:
    from torch.distributed import Backend

    def refuse(*_options: object) -> NoReturn:
        why = reason if type(reason) is ImportError else f"{type(reason).__name__}: {reason}"
        raise ImportError(f"torch has no backend popdist: {why} (`poprun --doctor` tells more)") from reason

    Backend.register_backend("popdist", refuse, extended_api=True, devices=["cpu"])
