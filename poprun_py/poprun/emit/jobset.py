"""A plan as an indexed JobSet: one pod for each instance, and no launcher.

The index of the pod is the rank of the instance; everything else is the same in all pods, so that the manifest of
a thousand instances is as short as that of one. Sources: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/
and https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode.
"""

import math
from typing import TYPE_CHECKING, Final

from popdist.contract import (
    GROUP_RANK,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    RANK,
    WORLD_SIZE,
)
from poprun.emit.kubernetes import (
    Field,
    common_variables,
    computing,
    container,
    deadline_seconds,
    document,
    job_name,
    required_image,
)
from poprun.plan.plan import LaunchPlan
from poprun.render.words import size_of

if TYPE_CHECKING:
    from poprun.emit import Surroundings

PORT: Final = 29500
"""Where the instances meet on instance 0; a pod has all ports for itself."""

_GROUP: Final = "instance"
_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def write(plan: LaunchPlan, surroundings: "Surroundings") -> str:
    """``plan`` as a JobSet in YAML.

    Raises:
        UsageError: If there is no image, or an instance has variables of its own.
    """
    image, name = required_image(surroundings.image), job_name(plan)
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(1, math.ceil(plan.ending.stop_timeout_seconds)),
        "containers": [container(image, command=plan.program, env=_variables(plan, name))],
    }
    job = {
        "completionMode": "Indexed",
        "completions": plan.num_instances,
        "parallelism": plan.num_instances,
        "backoffLimit": 0,
        **deadline_seconds(plan),
        "template": {"spec": computing(plan, pod, num_instances=1)},
    }
    values = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": plan.ending.max_restarts},
            "replicatedJobs": [{"name": _GROUP, "replicas": 1, "template": {"spec": job}}],
        },
    }
    return document(plan, size_of(plan), values)


def _variables(plan: LaunchPlan, name: str) -> dict[str, str | Field]:
    """What popdist and torch are told. The one job of the set has index 0, and so has the pod of instance 0."""
    return {
        RANK: Field(_INDEX),
        WORLD_SIZE: str(plan.num_instances),
        LOCAL_RANK: "0",
        LOCAL_WORLD_SIZE: "1",
        GROUP_RANK: Field(_INDEX),
        MASTER_ADDR: f"{name}-{_GROUP}-0-0.{name}",
        MASTER_PORT: str(PORT),
        **common_variables(plan),
    }
