"""poprun: partition virtual IPUs into instances and replicas, start them, and see them to their end.

``make_plan(LaunchRequest(...), facts)`` is the command line's own way from what is asked to what will be done. The
names arrive on first use: the agents of a job import this package in a bare interpreter, which has none of them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poprun.plan.plan import LaunchPlan
    from poprun.plan.planner import make_plan
    from poprun.plan.request import LaunchRequest

__version__: str
__all__ = ["LaunchPlan", "LaunchRequest", "__version__", "make_plan"]

_HOMES = {
    "LaunchPlan": ("poprun.plan.plan", "LaunchPlan"),
    "LaunchRequest": ("poprun.plan.request", "LaunchRequest"),
    "__version__": ("popdist.contract", "VERSION"),
    "make_plan": ("poprun.plan.planner", "make_plan"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - see the module's docstring

    home, public = _HOMES[name]
    return getattr(import_module(home), public)
