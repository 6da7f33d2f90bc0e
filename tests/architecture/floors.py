"""The order of the folders: a file imports only from lower floors, and siblings in its folder.

What a folder is stands in its own docstring, in its ``__init__.py``.
"""

from typing import Final

from tests.architecture.source_tree import words

_LOWEST_FIRST: Final = {
    "popsize": "errors phases svg < hardware model < constants stages < catalogue < mapping < footprint < duration"
    " < search < cases tables < picture",
    "poprun": "errors < text < process < messages < makers < plan < probe < hosts < launch render < trace"
    " < devices page < job monitor emit doctor < cli vipu reports < start size < command < __main__",
    "popdist": "errors layout local_tensors tree stack_signal startup trusted_paths < contract installation"
    " torch_private extension < environments progress accelerators < host_memory < transport < groups"
    " < process_group < context < collectives < metrics weights < instances gradients < data < training packing"
    " < checks < optim < sharded < phases"
    " < parallel < checkpoint compat tensorflow onnx poptorch launching preemption < popdist_core popart",
    "poptorch": "errors enums environment _impl profiling stubs < _logging custom_types < options losses testing"
    " < blocks poptorch_core optim data < executor ops",
}
FLOORS: Final = {package: [*map(words, order.split(" < "))] for package, order in _LOWEST_FIRST.items()}
"""Of each package, lowest first: the folders and files of each floor."""

BRIDGE: Final = words("popdist.contract popdist.layout popdist.errors popdist.progress popdist.trusted_paths")
"""All that poprun may import of popdist."""


def floor_of(module: str) -> int:
    """On which floor of its package ``module`` stands."""
    package, part = module.split(".")[:2]
    floor = next((number for number, parts in enumerate(FLOORS[package]) if part in parts), None)
    assert floor is not None, f"{module} stands on no floor: give it one in tests/architecture/floors.py"
    return floor
