"""The package poprun: a launcher that starts the instances of a job and supervises them until the job ends.

``make_plan(LaunchRequest(...), facts)`` returns the same plan that the command line makes. A public name loads its
module when the name is first used, because the agents of a job import this package in a bare interpreter.
"""

TYPE_CHECKING = False  # not imported from typing, which takes longer to import than all that an agent needs
if TYPE_CHECKING:  # tells type checkers and editors the same modules as _MODULE_OF
    from poprun.plan.plan import LaunchPlan
    from poprun.plan.planner import make_plan
    from poprun.plan.request import LaunchRequest

    __version__: str

_MODULE_OF = {
    "LaunchPlan": "poprun.plan.plan",
    "LaunchRequest": "poprun.plan.request",
    "make_plan": "poprun.plan.planner",
}
"""The name of the module that defines each public name of the package."""

__all__ = ["LaunchPlan", "LaunchRequest", "__version__", "make_plan"]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "__version__":
        return import_module("popdist.ground.contract").VERSION
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'poprun' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
