"""The orders that poprun sends to the agents of a job: to start a program, and to end the program."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from popdist.ground.contract import (
    CLOCK_DESCRIPTOR,
    HYDRA_DESCRIPTOR,
    NUMBERS_DESCRIPTOR,
    PROGRESS_DESCRIPTOR,
    STORE_DESCRIPTOR,
    Endpoint,
)
from popdist.ground.progress import ANNOUNCEMENT_AT, ANNOUNCEMENT_FORMAT, COUNTED_BYTES, RECORDER_AT
from poprun.launch.messages.control import Message
from poprun.observe.account.job_identity import JobIdentity
from poprun.plan.frameworks import workers_of
from poprun.plan.plan import LaunchPlan, StartFacts
from poprun.plan.program_environment import interface_environment, passed_environment, program_environment

if TYPE_CHECKING:
    from poprun.launch.routes import HostRoute

_UNSAVED_SECONDS: Final = 0.3  # time to end for a program that cannot save its state any more
_COUNTERS: Final = "poprun.observe.account.machine_counters"  # each agent loads this module on its host


def start_order(
    plan: LaunchPlan,
    index: int,
    environ: Mapping[str, str],
    identity: JobIdentity,
    endpoints: Mapping[int, Sequence[Endpoint]],
) -> Message:
    """Return the message that makes the agent (parent process) of instance ``index`` start its program."""
    _, master, coordinator, store = endpoints[0]
    leased = identity.devices_of(plan, index)
    binding = plan.instance(index, leased).binding
    start = StartFacts(
        job_id=identity.job_id,
        restart_count=identity.restart_count,
        master=master,
        store=store,
        coordinator=coordinator,
        workers=[endpoints[worker][0] for worker in workers_of(plan)],
        devices=leased.devices,
    )
    route = identity.route(plan, index)
    return {
        "order": "start",
        "words": plan.program,
        "working_directory": plan.working_directory,
        "environment": _added_environment(plan, index, environ, route, start),
        "lease_address": route.lease_address if route else "",
        "cores": binding.cores if binding else (),
        "memory_nodes": binding.memory_nodes if binding else (),
        "descriptor_variables": [HYDRA_DESCRIPTOR, STORE_DESCRIPTOR, PROGRESS_DESCRIPTOR, CLOCK_DESCRIPTOR],
        "clock_variable": CLOCK_DESCRIPTOR if plan.trace.folder is not None else "",
        "store_variable": STORE_DESCRIPTOR,
        "progress_variable": PROGRESS_DESCRIPTOR if plan.is_watched else "",
        "numbers_variable": NUMBERS_DESCRIPTOR if plan.has_curves else "",
        "progress_bytes": COUNTED_BYTES,
        "announcement_at": ANNOUNCEMENT_AT,
        "recorder_at": RECORDER_AT,
        "announcement_format": ANNOUNCEMENT_FORMAT,
        "counters": _COUNTERS,
        "open_files": identity.open_files if identity.network is None else 0,
        "grace_seconds": plan.ending.stop_timeout_seconds,
    }


def stop_order(plan: LaunchPlan, *, has_failed: bool) -> Message:
    """Return the message that makes agents (programs' parents) end their programs. After a failure
    (``has_failed``), JAX and TensorFlow programs, which then cannot save, get at most 0.3 s.
    """
    seconds = plan.ending.stop_timeout_seconds
    # JAX and TensorFlow delay the end after SIGTERM until all programs save, which is impossible after a failure.
    seconds_in_vain = min(seconds, _UNSAVED_SECONDS) if has_failed else seconds
    return {"order": "stop", "grace_seconds": seconds, "grace_seconds_in_vain": seconds_in_vain}


def _added_environment(
    plan: LaunchPlan, index: int, environ: Mapping[str, str], route: "HostRoute | None", start: StartFacts
) -> dict[str, str]:
    """Return the environment variables that an instance gets in addition to its parent process's variables."""
    if route is None:
        return program_environment(plan, index, environ, start)
    return {
        **passed_environment(environ, plan.passed_names(index)),
        **interface_environment(environ, route.interface),
        **program_environment(plan, index, environ, start),
    }
