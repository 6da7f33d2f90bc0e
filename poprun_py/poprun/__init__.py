"""poprun: partition virtual IPUs into instances and replicas, start them, and see them to their end.

``make_plan(LaunchRequest(...), facts)`` is the command line's own way from what is asked to what will be done.
Each public name loads its module on first use: the agents of a job import this package in a bare interpreter.
"""

TYPE_CHECKING = False  # as typing has it, which takes longer to import than all of poprun that an agent needs
if TYPE_CHECKING:  # for type checkers and editors, what the table below says
    from poprun.plan.plan import LaunchPlan
    from poprun.plan.planner import make_plan
    from poprun.plan.request import LaunchRequest

    __version__: str

_MODULE_OF = {
    "LaunchPlan": "poprun.plan.plan",
    "LaunchRequest": "poprun.plan.request",
    "make_plan": "poprun.plan.planner",
}
"""The module of each public name."""

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
