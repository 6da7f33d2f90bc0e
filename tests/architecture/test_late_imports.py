"""Which imports stand inside functions: those that save time at a start, or that an optional package needs."""

import ast
from collections.abc import Iterator
from functools import cache

from tests.architecture.source_tree import Module, modules, reached_on_import, words

STARTS = words(
    "poprun poprun.__main__ poprun.command poprun.start poprun.attempts poprun.job.output.relay"
    " poprun.devices.lease.pool_client poprun.plan.render poprun.launch.start_shim poprun.launch.shim"
    " poprun.launch.agent poprun.hosts.remote_side poprun.vipu poprun.size poprun.observe.show.monitor.top"
    " poprun.observe.show.report_command popdist poptorch popdist.exchange.process_group.registration"
)
"""What runs from a command, or from an import, until the work begins. A module that a start loads may load others
late, which the start does not load.
"""

IN_EVERY_PYTHON = words("popdist.startup popdist_backend")
"""What runs in every Python of a job: each import there is late, so that programs lose no time."""

ALONE_IN_A_BUILD = words("popdist.ground.extension")
"""What a build of the wheel runs by its path, before popdist can be imported."""

OPTIONAL = words("torch mpi4py numpy scipy rich safetensors onnx transformers yaml")
"""Packages that a user may lack, or that take a tenth of a second."""

SLOW = words("popdist.checkpoint.tensor_files torch.nn.attention.flex_attention")
"""Modules that take seconds, which only some calls need."""


OURS = frozenset(module.name for module in modules())

reached = cache(reached_on_import)


def late_imports(module: Module) -> Iterator[tuple[str, str]]:
    """The function and the module of each import inside a function."""
    for function in module.functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                yield from ((function.name, name.name) for name in node.names)
            elif isinstance(node, ast.ImportFrom):
                names = (f"{node.module}.{name.name}" for name in node.names)
                yield from ((function.name, name if name in OURS else str(node.module)) for name in names)


def has_reason(module: str, target: str) -> bool:
    """Whether an import of ``target`` inside a function of ``module`` saves something."""
    if module in ALONE_IN_A_BUILD:
        return True
    if any(f"{module}.".startswith(f"{room}.") for room in IN_EVERY_PYTHON) or target in SLOW:
        return True
    needed = {name.partition(".")[0] for name in reached(target) - reached(module)}
    if needed & OPTIONAL:
        return True
    return any(module in loaded and target not in loaded for loaded in map(reached, STARTS))


def test_an_import_inside_a_function_saves_something() -> None:
    """Every other import stands at the top of its module."""
    late = [(module.name, function, target) for module in modules() for function, target in late_imports(module)]

    assert [one for one in sorted(set(late)) if not has_reason(one[0], one[2])] == []
