"""Jobs for Kubernetes, written from a plan: an MPIJob of the Kubeflow MPI Operator, or an indexed JobSet.

An MPIJob has one pod for each host and one pod for the MPI launcher: https://github.com/kubeflow/mpi-operator. A
JobSet has one pod for each instance. The index of the pod is the rank of the instance; everything else is the same
in all pods: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/.
"""

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any, Final

import yaml

from popdist.ground.contract import (
    GROUP_RANK,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    MASTER_ADDR,
    MASTER_PORT,
    RANK,
    WORLD_SIZE,
)
from poprun.errors import UsageError
from poprun.makers.maker import MAKERS
from poprun.plan.plan import LaunchPlan
from poprun.plan.program_environment import hash_seed
from poprun.plan.render.words import size_of
from poprun.plan.topology import MpiKind

HOST_FILE: Final = "/etc/mpi/hostfile"  # file in which the MPI Operator lists the pods for the launcher
_WAIT_FOR_NAMES: Final = f"""\
tries=0
while IFS=': ' read -r host _; do
  until getent hosts "$host" > /dev/null || [ "$tries" -ge 60 ]; do tries=$((tries + 1)); sleep 1; done
done < {HOST_FILE}
exec "$@"
"""
"""A shell script that waits until the names of all pods can be resolved: pods are ready earlier, and an MPI
launcher fails at the first unknown name."""

_SSH_WORDS: Final = "-o ConnectionAttempts=10"
_SSH_VARIABLES: Final = {MpiKind.OPEN_MPI: "PRTE_MCA_plm_ssh_args", MpiKind.MPICH: "HYDRA_LAUNCHER_EXTRA_ARGS"}
"""For each MPI, the variable with more options for ssh, which must retry until a pod's sshd is ready."""

_IMPLEMENTATIONS: Final = {MpiKind.OPEN_MPI: "OpenMPI", MpiKind.MPICH: "MPICH"}

_PORT: Final = 29500  # port at which instance 0 of a JobSet listens; each pod has its own ports
_GROUP: Final = "instance"
_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
"""The path of a pod's index in the pod's description, from which Kubernetes sets an environment variable."""


def mpijob(plan: LaunchPlan, name: str, image: str) -> str:
    """Return ``plan`` as an MPIJob in YAML, for the plan's kind of MPI, or for Open MPI if the plan has none."""
    kind = plan.mpi.kind if plan.mpi else MpiKind.OPEN_MPI
    words = ("sh", "-c", _WAIT_FOR_NAMES, "sh", *_launcher_words(plan, kind), *plan.program)
    launcher = {"containers": [_container(image, words, {_SSH_VARIABLES[kind]: _SSH_WORDS})]}
    worker = _computing_pod(plan, _container(image), plan.num_instances_per_host)
    spec = {
        "mpiImplementation": _IMPLEMENTATIONS[kind],
        "slotsPerWorker": plan.num_instances_per_host,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "backoffLimit": plan.ending.max_restarts,
            **_deadline_seconds(plan),
        },
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": {"spec": launcher}},
            "Worker": {"replicas": len(plan.hosts), "restartPolicy": "Never", "template": {"spec": worker}},
        },
    }
    return _manifest(plan, name, "kubeflow.org/v2beta1", "MPIJob", spec)


def jobset(plan: LaunchPlan, name: str, image: str) -> str:
    """Return ``plan`` as a JobSet in YAML, in which each instance is one pod."""
    # The set has one job, with index 0; the pod of instance 0 also has index 0.
    variables = {
        RANK: _INDEX,
        WORLD_SIZE: str(plan.num_instances),
        LOCAL_RANK: "0",
        LOCAL_WORLD_SIZE: "1",
        GROUP_RANK: _INDEX,
        MASTER_ADDR: f"{name}-{_GROUP}-0-0.{name}",
        MASTER_PORT: str(_PORT),
        **_common_variables(plan),
    }
    pod = _computing_pod(plan, _container(image, plan.program, variables), num_instances=1)
    job = {
        "completionMode": "Indexed",
        "completions": plan.num_instances,
        "parallelism": plan.num_instances,
        "backoffLimit": 0,
        **_deadline_seconds(plan),
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": plan.ending.max_restarts},
        "replicatedJobs": [{"name": _GROUP, "replicas": 1, "template": {"spec": job}}],
    }
    return _manifest(plan, name, "jobset.x-k8s.io/v1alpha2", "JobSet", spec)


def _launcher_words(plan: LaunchPlan, kind: MpiKind) -> tuple[str, ...]:
    """Return the command line of mpirun or mpiexec, with all environment variables: ssh does not pass them on."""
    total, per_host = str(plan.num_instances), str(plan.num_instances_per_host)
    variables = _common_variables(plan)
    if kind is MpiKind.MPICH:
        exports = [word for name, value in variables.items() for word in ("-genv", name, value)]
        first = ["mpiexec", "-f", HOST_FILE, "-ppn", per_host, "-bind-to", "none"]
    else:
        # without PATH, Open MPI finds only programs in the folders of sshd's own PATH
        exports = ["-x", "PATH", *(word for pair in variables.items() for word in ("-x", "=".join(pair)))]
        first = ["mpirun", "--allow-run-as-root", "--hostfile", HOST_FILE, "--bind-to", "none"]
    return (*first, *exports, *plan.mpi_global_args, "-n", total, *plan.mpi_local_args)


def _common_variables(plan: LaunchPlan) -> dict[str, str]:
    """Return the environment variables that are the same in all instances of ``plan``."""
    if plan.instance_variables:
        raise UsageError(
            "--instance-mpi-local-args: the pods of a job are all alike; let the program choose by its instance"
        )
    user_variables = plan.variables_of(0)
    return plan.contract(0).shape_to_env() | hash_seed(user_variables) | user_variables


def _container(image: str, command: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a pod's container as a dict; ``$`` is doubled, so that Kubernetes does not replace ``$(NAME)``."""
    entries = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": value}}}
        if value == _INDEX
        else {"name": name, "value": value.replace("$", "$$")}
        for name, value in (env or {}).items()
    ]
    words = [word.replace("$", "$$") for word in command]
    parts = {"name": "program", "image": image, "command": words, "env": entries}
    return {key: value for key, value in parts.items() if value}


def _computing_pod(plan: LaunchPlan, container: dict[str, Any], num_instances: int) -> dict[str, Any]:
    """Return a pod as a dict: ``container`` with its instances' GPUs, CPUs, shared memory, and time to stop."""
    resources: dict[str, Any] = {}
    if plan.devices:
        num_devices = min(num_instances * plan.num_devices_per_instance, len(plan.devices))
        resources["limits"] = {MAKERS[plan.maker].resource: num_devices}
    if plan.threads_per_replica is not None:
        resources["requests"] = {"cpu": str(num_instances * plan.threads_per_replica)}
    # otherwise a pod has only 64 MiB in /dev/shm, where DataLoader workers put batches
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    return {
        "terminationGracePeriodSeconds": max(1, math.ceil(plan.ending.stop_timeout_seconds)),
        "containers": [{**container, **({"resources": resources} if resources else {}), "volumeMounts": mounts}],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }


def _deadline_seconds(plan: LaunchPlan) -> dict[str, int]:
    """Return Kubernetes's field ``activeDeadlineSeconds`` if the job has a time limit; {} if not."""
    limit = plan.ending.timeout_seconds
    return {} if limit is None else {"activeDeadlineSeconds": max(1, math.ceil(limit))}


class _Dumper(yaml.SafeDumper):
    """A YAML writer that writes a text of several lines as a literal block."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None),
)


def _manifest(plan: LaunchPlan, name: str, api_version: str, kind: str, spec: Mapping[str, Any]) -> str:
    """Return an object of Kubernetes as YAML text, after two comment lines about the job and its program."""
    values = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=False)
    words = re.sub(r"[^ -~]+", "?", shlex.join(plan.program))
    return f"# {size_of(plan)}\n# {words}\n{text}"
