"""What a poptorch program takes from popdist: options whose process is the instance, with the local replicas."""
# ruff: noqa: N802 - the names are PopTorch's

from typing import Any, NoReturn

import poptorch
from popdist.context import environment, instance_index, num_instances, num_local_replicas
from popdist.environments import Launcher
from popdist.errors import ContractError, whole_number

__all__ = ["Options"]


class Options(poptorch.Options):
    """``poptorch.Options`` for this instance: process id, processes and replicas are those of the job.

    Outside a job they are 0, 1 and 1.

    Args:
        ipus_per_replica: Virtual IPUs of a replica, for a program that says it too; None for those of the job.

    Raises:
        ContractError: If it is no number from 1, or poprun gave a replica another number of them.
    """

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        if ipus_per_replica is not None:
            ipus_per_replica = whole_number("ipus_per_replica", ipus_per_replica, ContractError)
        given = environment().contract.ipus_per_replica
        if ipus_per_replica not in (None, given) and environment().launcher is Launcher.POPRUN:
            raise ContractError(
                f"popdist.poptorch.Options(ipus_per_replica={ipus_per_replica}), and poprun gave each replica "
                f"{given} virtual IPUs: start it with --ipus-per-replica {ipus_per_replica}, or leave it out"
            )
        self.set(replication_factor=num_local_replicas())
        self.Distributed.configureProcessId(instance_index(), num_instances())
        self.Distributed.__class__ = _JobDistributed

    def useIpuId(self, *_unused: Any) -> NoReturn:  # noqa: ANN401 - whatever it is given
        """Not for these options: each instance has its devices from poprun."""
        raise _blocked("useIpuId")

    def replicationFactor(self, *_unused: Any) -> NoReturn:  # noqa: ANN401 - as above
        """Not for these options: the replicas are those that poprun gave the instance."""
        raise _blocked("replicationFactor")


class _JobDistributed(poptorch.options._DistributedOptions):  # noqa: SLF001 - programs subclass it, too
    """``Distributed`` of these options, which the job alone decides."""

    def disable(self) -> NoReturn:
        """Not for these options."""
        raise _blocked("Distributed.disable")

    def setEnvVarNames(self, *_unused: Any) -> NoReturn:  # noqa: ANN401 - as above
        """Not for these options."""
        raise _blocked("Distributed.setEnvVarNames")

    def configureProcessId(self, *_unused: Any) -> NoReturn:  # noqa: ANN401 - as above
        """Not for these options."""
        raise _blocked("Distributed.configureProcessId")


def _blocked(name: str) -> RuntimeError:
    return RuntimeError(
        f"Cannot call `{name}` with popdist.poptorch.Options: the job decides it; use poptorch.Options to choose"
    )
