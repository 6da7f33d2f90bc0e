"""Who may import whom: the law of `floors`, held against the code."""

import ast
import sys

import pytest

import popdist
from tests.architecture.drawing import PLACES, redrawn
from tests.architecture.floors import BRIDGE, FLOORS, floor_of
from tests.architecture.source_tree import (
    ROOT,
    find_cycle,
    graph,
    imports,
    imports_on_import,
    modules,
    reached_on_import,
)

AGENT = frozenset(
    {
        "poprun",
        "poprun.messages",
        "poprun.messages.control",
        "poprun.messages.json_lines",
        "poprun.process",
        "poprun.process.spawn",
        "poprun.process.process_tree",
    }
)
"""All that the agents may use beside the standard library."""

LEAN = frozenset({"__future__", "_json", "_socket", "_struct", "os", "resource", "select", "stat"})
"""What they may use of the standard library, beside what is in the interpreter: modules that load no others."""

HEAVY = frozenset({"torch", "mpi4py", "rich", "numpy"})
"""What neither package may load when it is imported."""

TORCH_FACING = frozenset(
    {
        "torch_private",
        "transport",
        "host_memory",
        "process_group",
        "groups",
        "collectives",
        "gradients",
        "training",
        "checks",
        "optim",
        "sharded",
        "data",
        "packing",
        "weights",
        "instances",
        "testing",
        "checkpoint",
        "stubs",
        "preemption",
    }
)


def _floor(package: str, module: str) -> int:
    floor = floor_of(package, module.split(".")[1])
    if floor is None:
        pytest.fail(f"{module} stands on no floor: give it one in tests/architecture/floors.py")
    return floor


@pytest.mark.parametrize("package", ["popdist", "poprun", "poptorch"])
def test_a_module_imports_only_lower_floors(package: str) -> None:
    """Within a package every import goes down, or to a sibling in the same folder."""
    edges = [
        (source, target)
        for source, targets in graph().items()
        for target in targets
        if source.startswith(f"{package}.") and target.startswith(f"{package}.")
    ]
    wrong = [
        f"{source} imports {target}"
        for source, target in edges
        if source.split(".")[1] != target.split(".")[1] and _floor(package, source) <= _floor(package, target)
    ]

    assert wrong == []


@pytest.mark.parametrize("package", ["popdist", "poprun", "poptorch"])
def test_every_floor_is_inhabited(package: str) -> None:
    """The law names nothing that is not there, and everything that is."""
    parts = {module.name.split(".")[1] for module in modules(package) if "." in module.name}

    assert parts == {part for floor in FLOORS[package] for part in floor}


@pytest.mark.parametrize(("document", "name"), PLACES)
def test_the_drawings_show_what_is_there(document: str, name: str) -> None:
    """A drawing that is stale is drawn anew by scripts/draw."""
    text = (ROOT / document).read_text(encoding="utf-8")

    assert redrawn(text, name) == text


def test_no_import_goes_in_a_circle() -> None:
    """No module imports itself through others, imports inside functions included."""
    packages = {"poprun", "popdist", "poptorch"}
    edges = {source: targets - packages for source, targets in graph().items() if source not in packages}

    assert find_cycle(edges) == []


def test_the_columns_meet_in_the_contract_only() -> None:
    """The launcher knows the contract and the layout; the library knows nothing of the launcher."""
    edges = [(source, target) for source, targets in graph().items() for target in targets]
    up = {target for source, target in edges if source.startswith("poprun") and target.startswith("popdist")}
    down = {source for source, target in edges if source.startswith("popdist") and target.startswith("poprun")}

    assert up <= BRIDGE
    assert down == set()


def test_poptorch_uses_public_names_only() -> None:
    """It stands on popdist as any program does; and nothing of popdist imports poptorch."""
    targets = {target for module in modules("poptorch") for target in imports(module)}
    used = {
        node.attr
        for module in modules("poptorch")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "popdist"
    }
    knowing = {
        source
        for source, found in graph().items()
        if not source.startswith("poptorch") and any(target.split(".")[0] == "poptorch" for target in found)
    }

    assert {target for target in targets if target.split(".")[0] in {"popdist", "poprun"}} == {"popdist"}
    assert used <= set(vars(popdist)["__all__"])
    assert knowing == set()


def test_the_launcher_never_imports_torch() -> None:
    """Nowhere in poprun, not even inside a function."""
    found = {name for module in modules("poprun") for name in imports(module)}

    assert {name for name in found if name.partition(".")[0] in {"torch", "mpi4py", "numpy"}} == set()


def test_the_agents_need_a_bare_interpreter_only() -> None:
    """They start in milliseconds: little of the standard library, the control messages, the process tree."""
    reached = reached_on_import("poprun.launch.start_shim") | reached_on_import("poprun.launch.agent")
    ours = {name for name in reached if name.partition(".")[0] in {"poprun", "popdist"}}
    foreign = {name.partition(".")[0] for name in reached - ours}

    assert {name for name in ours if not name.startswith("poprun.launch")} <= AGENT
    assert foreign <= LEAN | set(sys.builtin_module_names)


@pytest.mark.parametrize("package", ["popdist", "poprun", "poprun.__main__", "popdist.context"])
def test_importing_a_package_loads_nothing_heavy(package: str) -> None:
    """A laptop without torch and MPI can plan a job; what is heavy comes with the first use that needs it."""
    assert {name for name in reached_on_import(package) if name.partition(".")[0] in HEAVY} == set()


def test_poprun_hears_ctrl_c_before_it_imports() -> None:
    """Python loads these at its own start; an import is where it would show a traceback, or lose the signal."""
    ours = {"poprun", "poprun.__main__"}

    assert reached_on_import("poprun.__main__") - ours <= {"_signal", "errno", "os", "sys"}


def test_torch_is_imported_at_the_top_of_torch_facing_modules_only() -> None:
    """Below the backends the library is plain Python."""
    found = {
        module.name.split(".")[1]
        for module in modules("popdist")
        if any(name.partition(".")[0] in HEAVY for name in imports_on_import(module))
    }

    assert found <= TORCH_FACING
