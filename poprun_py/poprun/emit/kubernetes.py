"""What the jobs of a cluster's engine have in common: names, containers, and what they ask of a node.

Source: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ (RFC 1123 labels).

Source: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/.
"""

import math
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from poprun.errors import UsageError
from poprun.plan.plan import LaunchPlan

_MAX_NAME: Final = 40
"""Characters of a job's name; the operators append to it, and a host's name has at most 63."""


def job_name(plan: LaunchPlan) -> str:
    """A name for the job, from that of its program: ``/data/Train_2.py`` becomes ``train-2``."""
    script = next((word for word in plan.program if word.endswith(".py")), plan.program[0])
    stem = os.path.basename(script).removesuffix(".py").lower()
    name = re.sub("[^a-z0-9]+", "-", stem)[:_MAX_NAME].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".rstrip("-")


GPU: Final = "nvidia.com/gpu"


def required_image(image: str | None) -> str:
    """``image``, which a pod cannot do without.

    Raises:
        UsageError: If there is none.
    """
    if image is None:
        raise UsageError(
            "a pod needs a container image that holds the program, Python and popdist: add --image NAME"
        )
    return image


@dataclass(frozen=True, slots=True)
class Field:
    """The value of a variable that a pod finds in its own description, at ``path``."""

    path: str


def container(
    image: str, *, command: tuple[str, ...] = (), env: Mapping[str, str | Field] | None = None
) -> dict[str, Any]:
    """The one container of a pod. Kubernetes reads ``$(NAME)`` in words and values, and ``$$`` as one ``$``."""
    entries = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": value.path}}}
        if isinstance(value, Field)
        else {"name": name, "value": value.replace("$", "$$")}
        for name, value in (env or {}).items()
    ]
    words = [word.replace("$", "$$") for word in command]
    parts = {"name": "program", "image": image, "command": words, "env": entries}
    return {key: value for key, value in parts.items() if value}


def computing(plan: LaunchPlan, pod: dict[str, Any], num_instances: int) -> dict[str, Any]:
    """``pod``, of one container, with what ``num_instances`` of ``plan`` need: GPUs or cores, and shared memory.

    Without a volume of its own a pod has 64 MiB at /dev/shm, where data loaders leave their batches.
    """
    resources: dict[str, Any] = {}
    if plan.devices:
        resources["limits"] = {GPU: num_instances * plan.ipus_per_replica}
    if plan.threads_per_replica is not None:
        resources["requests"] = {"cpu": str(num_instances * plan.threads_per_replica)}
    (only,) = pod["containers"]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # noqa: S108 - the pod's own
    return {
        **pod,
        "containers": [{**only, **({"resources": resources} if resources else {}), "volumeMounts": mounts}],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }


def deadline_seconds(plan: LaunchPlan) -> dict[str, int]:
    """``activeDeadlineSeconds`` if the job has a time limit, else nothing."""
    limit = plan.ending.timeout_seconds
    return {} if limit is None else {"activeDeadlineSeconds": max(1, math.ceil(limit))}


def document(plan: LaunchPlan, size: str, values: Mapping[str, Any]) -> str:
    """``values`` as YAML, below two lines that say what they are."""
    import yaml  # noqa: PLC0415 - only here

    class Dumper(yaml.SafeDumper):
        """Writes scripts as they are, line by line."""

    Dumper.add_representer(
        str,
        lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None),
    )
    text: str = yaml.dump(dict(values), Dumper=Dumper, sort_keys=False, width=100, allow_unicode=False)
    words = re.sub(r"[^ -~]+", "?", shlex.join(plan.program))
    return f"# {size}\n# {words}\n{text}"


def common_variables(plan: LaunchPlan) -> dict[str, str]:
    """What all instances of ``plan`` are told alike, the user's own variables among it.

    Raises:
        UsageError: If some instances have variables of their own, which one template for all pods cannot give.
    """
    if plan.instance_variables:
        raise UsageError(
            "--instance-mpi-local-args: the pods of a job are all alike; let the program choose by its instance"
        )
    return plan.contract(0).shape_to_env() | plan.variables_of(0)
