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
from poprun.plan.plan import LaunchPlan
from poprun.plan.topology import MpiKind
from poprun.render.words import size_of

if TYPE_CHECKING:
    from poprun.emit import Surroundings

HOSTS: Final = "/etc/mpi/hostfile"
"""Where the operator tells the launcher of the pods."""

_PATIENT: Final = f"""\
tries=0
while IFS=': ' read -r host _; do
  until getent hosts "$host" > /dev/null || [ "$tries" -ge 60 ]; do tries=$((tries + 1)); sleep 1; done
done < {HOSTS}
exec "$@"
"""
"""Pods are ready a little before their names are known, and an MPI launcher gives up at the first that is not."""

_SSH_WORDS: Final = "-o ConnectionAttempts=10"
_SSH_VARIABLES: Final = {MpiKind.OPEN_MPI: "PRTE_MCA_plm_ssh_args", MpiKind.MPICH: "HYDRA_LAUNCHER_EXTRA_ARGS"}
"""Where each launcher reads more words for ssh; a pod is ready before its sshd is."""

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
    words = ("sh", "-c", _PATIENT, "sh", *_launcher_words(plan, kind), *plan.program)
    launcher = {"containers": [container(image, command=words, env={_SSH_VARIABLES[kind]: _SSH_WORDS})]}
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
    """The MPI launcher and its options; ssh passes no variables on, so they stand among its words.

    Hydra itself passes on all that the image has set; Open MPI has to be told of ``PATH``, or finds no program
    that is not where sshd looks.
    """
    total, per_host = str(plan.num_instances), str(plan.num_instances_per_host)
    variables = common_variables(plan)
    if kind is MpiKind.MPICH:
        exports = [word for name, value in variables.items() for word in ("-genv", name, value)]
        first = ["mpiexec", "-f", HOSTS, "-ppn", per_host, "-bind-to", "none"]
    else:
        exports = ["-x", "PATH", *(word for it in variables.items() for word in ("-x", "=".join(it)))]
        first = ["mpirun", "--allow-run-as-root", "--hostfile", HOSTS, "--bind-to", "none"]
    return (*first, *exports, *plan.mpi_global_args, "-n", total, *plan.mpi_local_args)
