"""`popdist.poptorch.Options`: the options of a model in a job, which says what process and replicas there are."""

from collections.abc import Callable
from typing import NoReturn

import popdist
from popdist.errors import whole_number
from poptorch.options.model_options import Options
from poptorch.options.sub_options import _DistributedOptions


def _refused(name: str) -> Callable[..., NoReturn]:
    """A setter that raises an error: instances have their devices, processes and replicas from poprun."""

    def refuse(*_unused: object) -> NoReturn:
        raise RuntimeError(
            f"Cannot call `{name}` with popdist.poptorch.Options: the job decides it; use poptorch.Options to "
            "choose"
        )

    return refuse


class JobOptions(Options):
    """``poptorch.Options`` for this instance: process id, processes and replicas are those of the job.

    Outside a job they are 0, 1 and 1.

    Args:
        ipus_per_replica: Virtual IPUs of a replica, for a program that says it too; None for those of the job.

    Raises:
        ContractError: If it is no number from 1, or poprun gave a replica another number of them.
    """

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        given = popdist.ipus_per_replica()
        if ipus_per_replica is not None:
            whole_number("ipus_per_replica", ipus_per_replica, popdist.ContractError)
            if ipus_per_replica != given and popdist.isPopdistEnvSet():
                raise popdist.ContractError(
                    f"popdist.poptorch.Options(ipus_per_replica={ipus_per_replica}), and poprun gave each replica "
                    f"{given} virtual IPUs: start it with --ipus-per-replica {ipus_per_replica}, or leave it out"
                )
        self.set(replication_factor=popdist.num_local_replicas())
        self.Distributed.configureProcessId(popdist.instance_index(), popdist.num_instances())
        self.Distributed.__class__ = _JobDistributed

    useIpuId = _refused("useIpuId")
    replicationFactor = _refused("replicationFactor")


class _JobDistributed(_DistributedOptions):
    """``Distributed`` of these options, which the job alone decides."""

    disable = _refused("Distributed.disable")
    setEnvVarNames = _refused("Distributed.setEnvVarNames")
    configureProcessId = _refused("Distributed.configureProcessId")
