"""A plan as an MPIJob of the Kubeflow MPI Operator: a pod for each host, and one for the MPI launcher.

The operator writes the file of hosts and gives the pods keys; the MPI launcher then starts the program over ssh.
Source: https://github.com/kubeflow/mpi-operator, API kubeflow.org/v2beta1.
"""

import math
from typing import TYPE_CHECKING, Final

from poprun.emit.kubernetes import (
    common_variables,
    computing,
    container,
    deadline_seconds,
    document,
    job_name,
    required_image,
)
from poprun.plan import LaunchPlan
from poprun.render.words import size_of
from poprun.topology import MpiKind

if TYPE_CHECKING:
    from poprun.emit import Surroundings

HOSTS: Final = "/etc/mpi/hostfile"
"""Where the operator tells the launcher of the pods."""

_NAMES: Final = {MpiKind.OPEN_MPI: "OpenMPI", MpiKind.MPICH: "MPICH"}


def write(plan: LaunchPlan, surroundings: "Surroundings") -> str:
    """``plan`` as an MPIJob in YAML, for the kind of MPI that the plan starts with, else for Open MPI.

    Raises:
        UsageError: If there is no image, or an instance has variables of its own.
    """
    image = required_image(surroundings.image)
    kind = plan.mpi.kind if plan.mpi else MpiKind.OPEN_MPI
    worker = {
        "terminationGracePeriodSeconds": max(1, math.ceil(plan.ending.stop_timeout_seconds)),
        "containers": [container(image)],
    }
    launcher = {"containers": [container(image, command=(*_launcher_words(plan, kind), *plan.program))]}
    values = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": job_name(plan)},
        "spec": {
            "mpiImplementation": _NAMES[kind],
            "slotsPerWorker": plan.num_instances_per_host,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": plan.ending.max_restarts,
                **deadline_seconds(plan),
            },
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": {"spec": launcher}},
                "Worker": {
                    "replicas": len(plan.hosts),
                    "restartPolicy": "Never",
                    "template": {"spec": computing(plan, worker, plan.num_instances_per_host)},
                },
            },
        },
    }
    return document(plan, size_of(plan), values)


def _launcher_words(plan: LaunchPlan, kind: MpiKind) -> tuple[str, ...]:
    """The MPI launcher and its options; ssh passes no variables on, so they stand among its words."""
    total, per_host = str(plan.num_instances), str(plan.num_instances_per_host)
    variables = common_variables(plan)
    if kind is MpiKind.MPICH:
        exports = [word for name, value in variables.items() for word in ("-genv", name, value)]
        first = ["mpiexec", "-f", HOSTS, "-ppn", per_host, "-bind-to", "none"]
    else:
        exports = [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
        first = ["mpirun", "--allow-run-as-root", "--hostfile", HOSTS, "--bind-to", "none"]
    return (*first, *exports, *plan.mpi_global_args, "-n", total, *plan.mpi_local_args)
