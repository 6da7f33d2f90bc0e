"""The order that starts a program: its words, its environment and its placement. Pure."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from popdist.contract import HYDRA_DESCRIPTOR, PROGRESS_DESCRIPTOR, STORE_DESCRIPTOR, Endpoint
from popdist.progress import ANNOUNCEMENT_AT, ANNOUNCEMENT_FORMAT, USED_BYTES
from poprun.job.identity import JobIdentity
from poprun.messages.json_lines import Message
from poprun.plan.plan import LaunchPlan, StartFacts
from poprun.plan.program_environment import (
    interface_environment,
    passed_environment,
    program_environment,
)

if TYPE_CHECKING:
    from poprun.hosts.routes import HostRoute


def start_order(
    plan: LaunchPlan, index: int, environ: Mapping[str, str], identity: JobIdentity, meeting: Sequence[Endpoint]
) -> Message:
    """The order that starts the program of instance ``index``.

    ``meeting`` is where torch's own store and popdist's will listen, on instance 0's host.
    """
    master, store = meeting
    given = identity.devices_of(plan, index)
    binding = plan.instance(index, given).binding
    start = StartFacts(
        job_id=identity.job_id,
        restart_count=identity.restart_count,
        master=master,
        store=store,
        devices=given.devices,
    )
    route = identity.route(plan, index)
    return {
        "order": "start",
        "words": plan.program,
        "working_directory": plan.working_directory,
        "environment": _added_environment(plan, index, environ, route, start),
        "keeper": route.keeper if route else "",
        "cores": binding.cores if binding else (),
        "memory_nodes": binding.memory_nodes if binding else (),
        "descriptor_variables": [HYDRA_DESCRIPTOR, STORE_DESCRIPTOR, PROGRESS_DESCRIPTOR],
        "store_variable": STORE_DESCRIPTOR,
        "progress_variable": PROGRESS_DESCRIPTOR,
        "progress_bytes": USED_BYTES,
        "announcement_at": ANNOUNCEMENT_AT,
        "announcement_format": ANNOUNCEMENT_FORMAT,
        "open_files": identity.open_files if identity.network is None else 0,
        "grace_seconds": plan.ending.stop_timeout_seconds,
    }


def _added_environment(
    plan: LaunchPlan, index: int, environ: Mapping[str, str], route: "HostRoute | None", start: StartFacts
) -> dict[str, str]:
    """The variables that an agent adds to its own environment: on one machine that is the user's already."""
    if route is None:
        return program_environment(plan, index, environ, start)
    return {
        **passed_environment(environ, plan.passed_names(index)),
        **interface_environment(environ, route.interface),
        **program_environment(plan, index, environ, start),
    }
