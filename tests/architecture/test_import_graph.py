"""Who may import whom: the order of `floors`, held against the code."""

import ast
import sys
from graphlib import TopologicalSorter

import pytest

import popdist
from tests.architecture.drawing import PLACES, redrawn
from tests.architecture.floors import BRIDGE, FLOORS, floor_of
from tests.architecture.source_tree import (
    PACKAGES,
    ROOT,
    graph,
    imports,
    imports_on_import,
    modules,
    reached_on_import,
    words,
)

AGENT = words(
    "poprun poprun.messages poprun.messages.control poprun.messages.json_lines"
    " poprun.process poprun.process.spawn poprun.process.process_tree"
)
"""All that the agents may use beside the standard library."""

LEAN = words("__future__ _json _socket _struct os resource select stat")
"""What they may use of the standard library, beside what is in the interpreter: modules that load no others."""

HEAVY = words("torch mpi4py rich numpy")
"""What neither package may load when it is imported."""

TORCH_FACING = words(
    "torch_private transport host_memory process_group groups collectives gradients training checks optim sharded"
    " data packing weights instances testing checkpoint stubs preemption"
)


def top(name: str) -> str:
    """The package that holds the module ``name``."""
    return name.partition(".")[0]


def test_a_module_imports_only_lower_floors() -> None:
    """Within a package every import goes down, or to a sibling in the same folder."""
    wrong = [
        f"{source} imports {target}"
        for source, targets in graph().items()
        for target in targets
        if "." in source and "." in target and top(source) == top(target)
        if source.split(".")[1] != target.split(".")[1] and floor_of(source) <= floor_of(target)
    ]

    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_floor_is_inhabited(package: str) -> None:
    """The order names nothing that is not there, and everything that is."""
    parts = {module.name.split(".")[1] for module in modules(package) if "." in module.name}

    assert parts == {part for floor in FLOORS[package] for part in floor}


@pytest.mark.parametrize(("document", "name"), PLACES)
def test_the_drawings_show_what_is_there(document: str, name: str) -> None:
    """A drawing that is stale is drawn anew by scripts/draw."""
    text = (ROOT / document).read_text(encoding="utf-8")

    assert redrawn(text, name) == text


def test_no_import_goes_in_a_circle() -> None:
    """No module imports itself through others, imports inside functions included: else a CycleError names them."""
    edges = {source: targets - set(PACKAGES) for source, targets in graph().items() if source not in PACKAGES}

    assert {*TopologicalSorter(edges).static_order()} >= edges.keys()


def test_the_columns_meet_in_the_contract_only() -> None:
    """The launcher knows the contract and the layout; the library knows nothing of the launcher."""
    edges = {(top(source), target) for source, targets in graph().items() for target in targets}

    assert {target for package, target in edges if package == "poprun" and top(target) == "popdist"} <= BRIDGE
    assert {target for package, target in edges if package == "popdist" and top(target) == "poprun"} == set()


def test_poptorch_uses_public_names_only() -> None:
    """It stands on popdist as any program does; and nothing outside it imports poptorch."""
    targets = {target for module in modules("poptorch") for target in imports(module)}
    used = {
        node.attr
        for module in modules("poptorch")
        for node in module.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "popdist"
    }
    knowing = {
        module.name
        for module in modules("popdist", "poprun")
        if any(top(target) == "poptorch" for target in imports(module))
    }

    assert {target for target in targets if top(target) in {"popdist", "poprun"}} == {"popdist"}
    assert used <= set(vars(popdist)["__all__"])
    assert knowing == set()


def test_the_launcher_never_imports_torch() -> None:
    """Nowhere in poprun, not even inside a function."""
    assert {
        name for module in modules("poprun") for name in imports(module) if top(name) in HEAVY - {"rich"}
    } == set()


def test_the_agents_need_a_bare_interpreter_only() -> None:
    """They start in milliseconds: little of the standard library, the control messages, the process tree."""
    reached = reached_on_import("poprun.launch.start_shim") | reached_on_import("poprun.launch.agent")
    ours = {name for name in reached if top(name) in {"poprun", "popdist"}}

    assert {name for name in ours if not name.startswith("poprun.launch")} <= AGENT
    assert {top(name) for name in reached - ours} <= LEAN | set(sys.builtin_module_names)


@pytest.mark.parametrize("package", ["popdist", "poprun", "poprun.__main__", "popdist.context"])
def test_importing_a_package_loads_nothing_heavy(package: str) -> None:
    """A laptop without torch and MPI can plan a job; what is heavy comes with the first use that needs it."""
    assert {name for name in reached_on_import(package) if top(name) in HEAVY} == set()


def test_poprun_hears_ctrl_c_before_it_imports() -> None:
    """Python loads these at its own start; an import is where it would show a traceback, or lose the signal."""
    ours = {"poprun", "poprun.__main__"}

    assert reached_on_import("poprun.__main__") - ours <= words("_signal errno os sys")


def test_torch_is_imported_at_the_top_of_torch_facing_modules_only() -> None:
    """Below the backends the library is plain Python."""
    found = {
        module.name.split(".")[1]
        for module in modules("popdist")
        if any(top(name) in HEAVY for name in imports_on_import(module))
    }

    assert found <= TORCH_FACING
