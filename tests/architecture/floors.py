"""The order of the folders: a file imports only from lower floors, and siblings in its folder.

What a folder is stands in its own docstring, in its ``__init__.py``.
"""

from typing import Final

from tests.architecture.source_tree import words

FLOORS: Final = {
    "poprun": (
        words("errors"),
        words("text"),
        words("process"),
        words("messages"),
        words("plan"),
        words("probe"),
        words("hosts"),
        words("launch render"),
        words("devices"),
        words("job monitor emit doctor"),
        words("cli vipu"),
        words("start"),
        words("command"),
        words("__main__"),
    ),
    "popdist": (
        words("errors layout tree stack_signal startup"),
        words("contract torch_private extension"),
        words("environments progress"),
        words("host_memory"),
        words("transport"),
        words("groups"),
        words("process_group"),
        words("context"),
        words("collectives"),
        words("metrics weights"),
        words("instances gradients"),
        words("data"),
        words("training packing"),
        words("checks"),
        words("optim"),
        words("sharded"),
        words("checkpoint compat stubs poptorch preemption testing"),
        words("popdist_core"),
    ),
    "poptorch": (
        words("errors enums environment _impl profiling"),
        words("_logging custom_types"),
        words("options losses testing"),
        words("blocks poptorch_core optim data"),
        words("executor ops"),
    ),
}
"""Lowest first: the folders and files of each floor."""

BRIDGE: Final = words("popdist.contract popdist.layout popdist.errors popdist.progress")
"""All that poprun may import of popdist."""


def floor_of(module: str) -> int:
    """On which floor of its package ``module`` stands."""
    package, part = module.split(".")[:2]
    floor = next((number for number, parts in enumerate(FLOORS[package]) if part in parts), None)
    assert floor is not None, f"{module} stands on no floor: give it one in tests/architecture/floors.py"
    return floor
