"""Who may import whom: the picture of docs/architecture.md as a law."""

import sys

import pytest

from tests.architecture.source_tree import (
    ROOT,
    find_cycle,
    graph,
    imports,
    imports_on_import,
    modules,
    reached_on_import,
)

LAYERS = {
    "popdist": (
        (
            "errors",
            "dealing",
            "headers",
            "tree",
            "python_random",
            "progress",
            "stack_signal",
            "startup",
            "boundaries",
        ),
        ("layout", "arguments", "variables"),
        ("contract",),
        ("environments", "presence", "host_memory"),
        ("backends", "arithmetic", "process_group"),
        ("groups",),
        ("context",),
        ("queries", "collectives"),
        ("training", "data", "metrics", "instances", "objects"),
        ("testing", "compat", "checkpoint", "preemption"),
    ),
    "poprun": (
        ("errors", "ranges", "linux", "process_tree", "control", "users", "log_line"),
        ("topology", "binding", "legality", "fields", "tag_format", "processes", "authentication"),
        (
            "settings",
            "vipu_settings",
            "mpi_words",
            "hosts",
            "placement",
            "routes",
            "link",
            "view",
            "inventory",
            "leases",
        ),
        ("request", "plan", "pods", "domains"),
        ("planner", "environment", "allocations", "plan_checks"),
        ("plan_file", "advice", "fitness", "idle_options"),
        ("agent", "probe", "pool", "launchers", "render"),
        ("supervisor", "monitor", "preflight", "emit", "doctor", "remote_pool"),
        ("cli", "vipu"),
        ("__main__",),
    ),
}
"""Lowest first. A file imports only lower layers and, within its folder, its siblings."""

BRIDGE = frozenset(
    {"popdist.contract", "popdist.layout", "popdist.errors", "popdist.progress", "popdist.variables"}
)
"""All that poprun may know of popdist."""

AGENT = frozenset(
    {"poprun", "poprun.control", "poprun.link", "poprun.linux", "poprun.process_tree", "poprun.processes"}
)
"""All that the agents may use beside the standard library."""

HEAVY = frozenset({"torch", "mpi4py", "rich", "numpy"})
"""What neither package may load when it is imported."""

TORCH_FACING = frozenset(
    {
        "arithmetic",
        "backends",
        "host_memory",
        "process_group",
        "groups",
        "collectives",
        "training",
        "data",
        "metrics",
        "objects",
        "instances",
        "testing",
        "checkpoint",
        "preemption",
    }
)


def _layer(package: str, module: str) -> int:
    part = module.split(".")[1]
    for layer, parts in enumerate(LAYERS[package]):
        if part in parts:
            return layer
    pytest.fail(f"{module} stands in no layer: give it one here and in docs/architecture.md")


@pytest.mark.parametrize("package", ["popdist", "poprun"])
def test_a_module_imports_only_lower_layers(package: str) -> None:
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
        if source.split(".")[1] != target.split(".")[1] and _layer(package, source) <= _layer(package, target)
    ]

    assert wrong == []


@pytest.mark.parametrize("package", ["popdist", "poprun"])
def test_every_layer_is_inhabited(package: str) -> None:
    """The picture shows nothing that is not there, and everything that is."""
    parts = {module.name.split(".")[1] for module in modules(package) if "." in module.name}

    assert parts == {part for layer in LAYERS[package] for part in layer}


@pytest.mark.parametrize("package", ["popdist", "poprun"])
def test_the_picture_names_every_layer(package: str) -> None:
    """What is drawn in the documents is what is tested here."""
    picture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1].split()

    assert {part for layer in LAYERS[package] for part in layer} <= set(picture)


def test_no_import_goes_in_a_circle() -> None:
    """No module imports itself through others, imports inside functions included."""
    packages = {"poprun", "popdist"}
    edges = {source: targets - packages for source, targets in graph().items() if source not in packages}

    assert find_cycle(edges) == []


def test_the_columns_meet_in_the_contract_only() -> None:
    """The launcher knows the contract and the layout; the library knows nothing of the launcher."""
    edges = [(source, target) for source, targets in graph().items() for target in targets]
    up = {target for source, target in edges if source.startswith("poprun") and target.startswith("popdist")}
    down = {source for source, target in edges if source.startswith("popdist") and target.startswith("poprun")}

    assert up <= BRIDGE
    assert down == set()


def test_the_launcher_never_imports_torch() -> None:
    """Nowhere in poprun, not even inside a function."""
    found = {name for module in modules("poprun") for name in imports(module)}

    assert {name for name in found if name.partition(".")[0] in {"torch", "mpi4py", "numpy"}} == set()


def test_the_agents_need_a_bare_interpreter_only() -> None:
    """They start in milliseconds: standard library, the control messages and the process tree."""
    reached = reached_on_import("poprun.agent.shim")
    ours = {name for name in reached if name.partition(".")[0] in {"poprun", "popdist"}}
    foreign = {name.partition(".")[0] for name in reached - ours}

    assert {name for name in ours if not name.startswith("poprun.agent")} <= AGENT
    assert foreign <= sys.stdlib_module_names


@pytest.mark.parametrize("package", ["popdist", "poprun", "poprun.__main__", "popdist.context"])
def test_importing_a_package_loads_nothing_heavy(package: str) -> None:
    """A laptop without torch and MPI can plan a job; what is heavy comes with the first use that needs it."""
    assert {name for name in reached_on_import(package) if name.partition(".")[0] in HEAVY} == set()


def test_torch_is_imported_at_the_top_of_torch_facing_modules_only() -> None:
    """Below the backends the library is plain Python."""
    found = {
        module.name.split(".")[1]
        for module in modules("popdist")
        if any(name.partition(".")[0] in HEAVY for name in imports_on_import(module))
    }

    assert found <= TORCH_FACING
