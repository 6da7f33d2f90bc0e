"""What torch calls when it is imported, through the entry point ``torch.backends``: alone in a file of its own.

An exception here would end every program at ``import torch``. An interpreter may find the metadata of this
distribution and not its packages, as with PYTHONPATH and an editable installation, or another ``popdist.py``.
"""

from importlib import util


def register() -> None:
    """Register the backend ``popdist`` with torch, if the package can be imported. Never raises."""
    try:
        found = util.find_spec("popdist")
        if found is None or found.submodule_search_locations is None:  # a program of that name must not run again
            return
        from popdist.process_group import registration  # noqa: PLC0415 - which may fail

        registration.register()
    except Exception:  # noqa: BLE001, S110 - torch would raise it
        pass
