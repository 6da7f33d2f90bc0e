"""The order of the rooms: a file imports only from lower floors, and siblings in its folder.

What a folder is stands in its own docstring, in its ``__init__.py``.
"""

from typing import Final

from tests.architecture.source_tree import words

_LOWEST_FIRST: Final = {
    "popsize": "errors phases svg < hardware model < constants stages < catalogue < mapping < footprint < duration"
    " < search < tables < picture",
    "poprun": "errors makers < text < plan < launch < hosts < devices < observe < job < cli vipu < outcome"
    " < attempts < start size < command < __main__",
    "poprun.observe": "account < judge < show",
    "popdist": "errors startup < ground < exchange < job < metrics gradients < data < step packing < optim"
    " trainers < phases accelerate lightning fabric < parallel transformers"
    " < checkpoint compat tensorflow onnx poptorch launching < popdist_core popart",
    "popdist.ground": "values < layout local_tensors tree trusted_paths"
    " < contract installation torch_private extension < torch_private_groups < environments progress accelerators",
    "popdist.exchange": "host_memory < transport < groups < process_group",
    "popdist.job": "context < collectives < weights instances",
    "popdist.step": "training < checks preemption",
    "popdist.phases": "phased_optimizer phased_weights repeated_layers store_file used_memory"
    " < phase_store recompute < phased_layers < phase_memory < phase_budget phased_sums < phased_run"
    " < phased_calls phased_step < phased_model",
    "poptorch": "errors enums environment _impl profiling stubs < _logging custom_types < options losses testing"
    " < blocks poptorch_core optim data < executor ops",
}
FLOORS: Final = {folder: [*map(words, order.split(" < "))] for folder, order in _LOWEST_FIRST.items()}
"""The folders and files of each floor, lowest first: of each package, and of each room that has floors."""

BRIDGE: Final = frozenset(
    {
        "popdist.errors",
        *(f"popdist.ground.{name}" for name in words("contract layout progress trusted_paths values")),
    }
)
"""All that poprun may import of popdist: its errors, and parts of its ground."""


def part_of(folder: str, module: str) -> str:
    """Return the name of the folder or file in ``folder`` that ``module`` is, or is in."""
    return module.removeprefix(f"{folder}.").partition(".")[0]


def floor_of(folder: str, module: str) -> int:
    """Return the number of the floor of ``folder`` on which ``module`` stands."""
    part = part_of(folder, module)
    floor = next((number for number, parts in enumerate(FLOORS[folder]) if part in parts), None)
    assert floor is not None, f"{module} stands on no floor: give it one in tests/architecture/floors.py"
    return floor
