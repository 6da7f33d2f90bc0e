"""How the hosts of a job reach each other: what is found before the job starts, and the words of ssh and srun.

Host keys are checked as the user's configuration of ssh says; nothing here changes that. Nobody can type a
password or a passphrase: what needs one is an error (ssh_config(5), BatchMode). Pure.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_CONNECT_SECONDS: Final = 7
_SSH_KEPT: Final = ("-o", "ControlPath=none", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
_SSH_OPTIONS: Final = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}")
_SRUN_OPTIONS: Final = (
    *("--overlap", "--quiet", "--unbuffered", "--mpi=none", "--cpu-bind=none"),
    *("--distribution=block", "--overcommit", "--kill-on-bad-exit=0"),
)

Places = Sequence[tuple[str, str]]  # a host's addresses as (interface, address)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoute:
    """One host of a job, as the others reach it."""

    name: str  # what the user calls it
    address: str  # its IP address for the job's traffic. All hosts of a job have one of the same family
    interface: str  # the network interface that has this address
    # devices that the job holds there, in slot order; empty for those of the plan
    devices: tuple[str, ...] = ()
    lease_address: str = ""  # where its agents are given the lease of the job there; empty when it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKey:
    """The secret with which agents of other hosts prove that they belong to a job, new for each attempt."""

    text: str = field(repr=False)  # the key; nobody else may read it
    file: str  # where every host holds it until the agents have come


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNetwork:
    """The hosts of a job that are not, or not only, the machine that poprun runs on."""

    control_host: str  # address of this machine at which the agents report
    hosts: tuple[HostRoute, ...]  # the hosts of the plan, in its order
    key: JobKey
    lease_holders: tuple[int, ...] = ()  # children of poprun through which it holds the leases on them


def ssh_options(config: str | None) -> tuple[str, ...]:
    """The options of every call of ssh; ``config`` stands in the place of the user's own configuration file."""
    return (*(("-F", config) if config is not None else ()), *_SSH_OPTIONS)


def remote_words(
    config: str | None, job: str | None, host: str, command: Sequence[str], *, is_kept: bool = False
) -> tuple[str, ...]:
    """The argv that runs ``command`` on ``host``, by srun in Slurm's ``job`` if there is one, else by ssh."""
    # one that is kept as long as the job finds out when the host is lost, and shares no connection that might end
    if job is not None:
        return (*srun_words(job, (host,), 1), *command)
    return ("ssh", *ssh_options(config), *(_SSH_KEPT if is_kept else ()), "-T", "--", host, shlex.join(command))


def srun_words(job: str | None, hosts: Sequence[str], num_per_host: int) -> tuple[str, ...]:
    """The words before a command that Slurm runs ``num_per_host`` times on each host, in a step of ``job``."""
    # the step shares what the job has with others, and Slurm neither binds it to cores nor starts it as MPI's
    return (
        *("srun", *(() if job is None else (f"--jobid={job}",)), *_SRUN_OPTIONS),
        *(f"--nodes={len(hosts)}", f"--ntasks={len(hosts) * num_per_host}", f"--ntasks-per-node={num_per_host}"),
        f"--nodelist={','.join(hosts)}",
    )
