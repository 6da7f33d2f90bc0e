"""Where this instance stands in its job: no query needs ``init()``; outside a job there is one of everything."""

from typing import TYPE_CHECKING

from popdist.context import environment
from popdist.environments import Launcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def instance_index() -> int:
    """This instance (process) among those of the job: 0 to ``num_instances() - 1``; 0 outside a job.

    Raises:
        ContractError: If the environment promises a job and does not describe one.
    """
    return environment().contract.instance_index


def num_instances() -> int:
    """Instances (processes) in the job; 1 outside a job.

    Raises:
        ContractError: If the environment promises a job and does not describe one.
    """
    return environment().contract.num_instances


def num_replicas() -> int:
    """Replicas of the model in the whole job, a multiple of ``num_instances()``; 1 outside a job.

    Raises:
        ContractError: If the environment promises a job and does not describe one.
    """
    return environment().contract.num_replicas


def num_local_replicas() -> int:
    """Replicas that this instance owns, the same number on every instance; 1 outside a job.

    Raises:
        ContractError: If the environment promises a job and does not describe one.
    """
    return environment().contract.layout.num_local_replicas


def local_replicas() -> range:
    """Job-wide numbers of the replicas that this instance owns, ascending; ``range(0, 1)`` outside a job.

    Raises:
        ContractError: If the environment promises a job and does not describe one.
    """
    contract = environment().contract
    return contract.layout.replicas_of(contract.instance_index)


def ipus_per_replica() -> int:
    """Virtual IPUs (a share of the CPU's cores, or one CUDA device each) that a replica uses; 1 outside a job.

    Raises:
        ContractError: If the environment promises a job and does not describe one.
    """
    return environment().contract.ipus_per_replica


def local_instance_index() -> int:
    """This instance among those of the job on its host, from 0; 0 outside a job.

    Raises:
        ContractError: If the environment promises a job and does not describe one.
    """
    return environment().contract.local_instance_index


def job_id() -> str:
    """A name of the job, the same on all its instances: for folders of runs, logs and trackers.

    Under poprun it is ``POPDIST_JOB_ID``: what the caller has set it to, so that a job that is started again can
    have the same one, else a new random one. Empty under other launchers and outside a job.

    Raises:
        ContractError: If the environment promises a job and does not describe one.
    """
    return environment().contract.job_id


def device() -> "torch.device":
    """The device that this instance computes on: the first of ``devices()``.

    Under poprun it is the first of the CUDA devices that the instance was given, or the CPU when it was given
    none. Under another launcher, and outside a job, it is ``cuda:<local instance index>``, or the first of those
    that it needs in that order, when torch sees that device, else the CPU. Imports torch and starts no CUDA
    context.

    Raises:
        ContractError: If the environment promises a job and does not describe one.
    """
    return devices()[0]


def devices() -> "tuple[torch.device, ...]":
    """All devices of this instance, whose replicas take turns on them: one for each of ``ipus_per_replica()``.

    Under poprun they are the CUDA devices that it was given, under another launcher and outside a job those after
    the ones of the instances before it, when torch sees them all; else the CPU alone. Imports torch and starts no
    CUDA context.

    Raises:
        ContractError: If the environment promises a job and does not describe one.
    """
    import torch  # noqa: PLC0415 - queries do without it

    found = environment()
    contract = found.contract
    ordinals: Sequence[int] = contract.devices
    if found.launcher is not Launcher.POPRUN:
        first = contract.local_instance_index * contract.ipus_per_replica
        ordinals = range(first, min(first + contract.ipus_per_replica, torch.cuda.device_count()))
    return tuple(torch.device("cuda", ordinal) for ordinal in ordinals) or (torch.device("cpu"),)
