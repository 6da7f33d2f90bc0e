"""Options for virtual IPUs that find nothing to act on in a job, and why. Pure.

PopRun's command lines give them for an IPU system; what has no meaning in a job is said, and never an error.
"""

from collections.abc import Mapping
from typing import Final

from poprun.plan.plan import LaunchPlan
from poprun.plan.pods import named_pod

_OF_PARTITIONS: Final = ("vipu-partition-attempts", "update-partition", "reset-partition", "remove-partition")
_OF_LEASES: Final = ("wait-for-devices", "vipu-server-timeout")
_OF_PODS: Final = ("vipu-allocation", "vipu-cluster")
_ALL: Final = (
    "vipu-partition",
    "vipu-server-host",
    "vipu-server-port",
    "pool",
    "share-devices",
    *_OF_PARTITIONS,
    *_OF_LEASES,
    *_OF_PODS,
)


def idle_vipu_options(plan: LaunchPlan) -> Mapping[str, str]:
    """The options that change nothing in ``plan``, with the reason, whether or not they were given."""
    vipu = plan.vipu
    if vipu.is_offline:
        return dict.fromkeys(_ALL, "--offline-mode takes no virtual IPUs")
    found = {}
    if not plan.devices:
        found["share-devices"] = "the job uses no GPUs"
    if not plan.asks_server and (vipu.pod is None or named_pod(vipu.pod) is not None):
        word = (
            f"{vipu.pod or 'this machine'} is one allocation, whatever it is called; a pod's YAML file has several"
        )
        found |= dict.fromkeys(_OF_PODS, word)
    if vipu.partition is None:
        found |= dict.fromkeys(_OF_PARTITIONS, "the job names no --vipu-partition")
    if plan.asks_server:
        found["pool"] = f"the virtual IPUs come from the server at {vipu.server_host}"
    elif not (plan.takes_lease or plan.owns_cores):
        word = (
            "the job takes nothing from the pool: nobody has counted the virtual IPUs of a CPU (--ipus-per-host)"
        )
        found |= dict.fromkeys(_OF_LEASES, word)
    return found
