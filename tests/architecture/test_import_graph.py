"""Who may import whom: the order of `floors`, held against the code."""

import ast
import sys
from graphlib import TopologicalSorter

import pytest

import popdist
from tests.architecture.drawing import DRAWINGS, redrawn
from tests.architecture.floors import BRIDGE, FLOORS, floor_of, part_of
from tests.architecture.source_tree import (
    ROOT,
    SOURCES,
    graph,
    imports,
    imports_on_import,
    modules,
    reached_on_import,
    words,
)

AGENT = words(
    "poprun poprun.launch.messages poprun.launch.messages.control"
    " poprun.launch.process poprun.launch.process.spawn poprun.launch.process.process_tree"
)
"""All that the agents may use of ours, beside their own folder."""

COUNTERS = words("poprun poprun.observe poprun.observe.account poprun.observe.account.machine_counters")
"""What agents load because the order to start names it."""

LEAN = words("__future__ _json _socket _struct os resource select stat") | {*sys.builtin_module_names}
"""What they may use of the standard library: what is in the interpreter, and modules that load no others."""

PURE = words(
    "bisect collections.abc contextlib csv dataclasses difflib functools hashlib heapq html io itertools json"
    " math operator re rich.table types typing"
)
"""All that the planner of mappings may import of others."""

HEAVY = words("torch mpi4py rich numpy")
"""What neither package may load when it is imported."""

TORCH_FACING = words(
    "accelerate fabric lightning trainers transformers "
    "ground exchange job gradients step optim data packing phases parallel launching checkpoint onnx"
)


def top(name: str) -> str:
    """The package that holds the module ``name``."""
    return name.partition(".")[0]


def test_a_module_imports_only_lower_floors() -> None:
    """In a package, and in a room that has floors, every import goes down, or to a sibling in its folder."""
    wrong = [
        f"{source} imports {target}"
        for folder in FLOORS
        for source, targets in graph().items()
        for target in targets
        if source.startswith(f"{folder}.") and target.startswith(f"{folder}.")
        if part_of(folder, source) != part_of(folder, target)
        if floor_of(folder, source) <= floor_of(folder, target)
    ]

    assert wrong == []


@pytest.mark.parametrize("folder", FLOORS)
def test_every_floor_is_inhabited(folder: str) -> None:
    """The order names nothing that is not there, and everything that is."""
    inside = (module.name for module in modules() if module.name.startswith(f"{folder}."))

    assert {part_of(folder, name) for name in inside} == {part for floor in FLOORS[folder] for part in floor}


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_drawings_show_what_is_there(name: str) -> None:
    """A drawing that is stale is drawn anew by scripts/draw."""
    text = (ROOT / DRAWINGS[name][0]).read_text(encoding="utf-8")

    assert redrawn(text, name) == text


def test_no_import_goes_in_a_circle() -> None:
    """No module imports itself through others, imports inside functions included: else a CycleError names them."""
    edges = {source: targets - SOURCES.keys() for source, targets in graph().items() if source not in SOURCES}

    assert {*TopologicalSorter(edges).static_order()} >= edges.keys()


def test_the_columns_meet_in_the_contract_only() -> None:
    """The launcher knows contract and layout, the library nothing of the launcher, and neither poptorch.

    Poptorch's stand-in for Horovod also asks popdist for the groups of instances.
    """
    edges = {(top(source), target) for source, targets in graph().items() for target in targets}
    foreign = {(source, target) for source, target in edges if source != top(target)}

    assert {(source, target) for source, target in foreign if top(target) != "popsize"} == {
        *(("poprun", target) for target in BRIDGE),
        ("poptorch", "popdist"),
        *(
            ("poptorch", f"popdist.{name}")
            for name in words("job.collectives job.context errors startup.stub_finder")
        ),
    }
    assert {source for source, target in foreign if top(target) == "popsize"} <= {"poprun", "popdist"}


def test_the_planner_of_mappings_only_computes() -> None:
    """It reads no environment, clock or file, and starts nothing: what it says depends on its arguments alone."""
    used = {name for module in modules("popsize") for name in imports(module) if top(name) != "popsize"}
    called = {
        node.func.id
        for module in modules("popsize")
        for node in module.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }

    assert used <= PURE
    assert called & {"open", "print", "input", "exec", "eval", "__import__"} == set()


def test_poptorch_uses_public_names_only() -> None:
    """It stands on popdist as any program does."""
    used = {
        node.attr
        for module in modules("poptorch")
        for node in module.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "popdist"
    }

    assert used <= set(vars(popdist)["__all__"])


def test_the_launcher_never_imports_torch() -> None:
    """Nowhere in poprun, not even inside a function."""
    assert {top(name) for module in modules("poprun") for name in imports(module)} & (HEAVY - {"rich"}) == set()


@pytest.mark.parametrize(
    ("started", "ours", "others"),
    [
        ("poprun.launch.start_shim", AGENT, LEAN),
        ("poprun.launch.agent", AGENT, LEAN),
        ("poprun.observe.account.machine_counters", COUNTERS, LEAN),
        ("poprun.__main__", words("poprun poprun.__main__"), words("_signal errno gc os sys")),
    ],
)
def test_what_starts_fast_loads_little(started: str, ours: frozenset[str], others: frozenset[str]) -> None:
    """Agents start in a bare interpreter; and poprun hears Ctrl-C before it imports what Python has not loaded."""
    reached = reached_on_import(started)

    assert {name for name in reached if top(name) not in SOURCES} <= others
    assert {name for name in reached if top(name) in SOURCES and not name.startswith("poprun.launch")} <= ours


@pytest.mark.parametrize("package", ["popdist", "poprun", "poprun.__main__", "popdist.job.context"])
def test_importing_a_package_loads_nothing_heavy(package: str) -> None:
    """A laptop without torch and MPI can plan a job; what is heavy comes with the first use that needs it."""
    assert {top(name) for name in reached_on_import(package)} & HEAVY == set()


def test_torch_is_imported_at_the_top_of_torch_facing_modules_only() -> None:
    """Below the backends the library is plain Python."""
    assert {
        module.part
        for module in modules("popdist")
        if any(top(name) in HEAVY for name in imports_on_import(module))
    } <= TORCH_FACING
