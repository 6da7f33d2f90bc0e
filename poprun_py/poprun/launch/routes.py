"""The routes between the hosts of a job, found before the job starts, and the command lines of ssh and srun. Pure.

The user's configuration of ssh decides how host keys are checked; poprun does not change this. A host that needs a
password or passphrase is an error, because nobody can type it (ssh_config(5), BatchMode).
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
    """The name and address at which the other hosts of a job reach one host."""

    name: str  # the user's name of the host
    address: str  # its IP address in the job; all hosts have the same IP version
    interface: str  # the network interface that has this address
    # devices that the job has leased there, in slot order; empty for the devices of the plan
    devices: tuple[str, ...] = ()
    lease_address: str = ""  # address where its agents fetch the job's lease; empty without a lease


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKey:
    """The secret with which processes on other hosts prove that they belong to a job; new for each start."""

    text: str = field(repr=False)  # the key, which no other user may read
    file: str  # the file with the key on every host until the agents have connected


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNetwork:
    """The network of a job on other hosts: their addresses, the job's key, and processes that hold devices."""

    control_host: str  # address of this machine to which agents connect
    hosts: tuple[HostRoute, ...]  # the hosts in the order of the plan
    key: JobKey
    lease_holders: tuple[int, ...] = ()  # children of poprun that keep the leases on the hosts


def ssh_options(config: str | None) -> tuple[str, ...]:
    """Return the options for every call of ssh; the file ``config`` replaces the user's configuration of ssh."""
    return (*(("-F", config) if config is not None else ()), *_SSH_OPTIONS)


def remote_words(
    config: str | None, job: str | None, host: str, command: Sequence[str], *, is_kept: bool = False
) -> tuple[str, ...]:
    """Return the argv that runs ``command`` on ``host``: with srun if ``job`` is a Slurm job, else with ssh."""
    # a kept ssh notices the loss of the host, and does not share a connection that another ssh might end
    if job is not None:
        return (*srun_words(job, (host,), 1), *command)
    return ("ssh", *ssh_options(config), *(_SSH_KEPT if is_kept else ()), "-T", "--", host, shlex.join(command))


def srun_words(job: str | None, hosts: Sequence[str], num_per_host: int) -> tuple[str, ...]:
    """Return srun's argv up to the command, which runs ``num_per_host`` times on each host in Slurm's ``job``."""
    # the step shares the job's resources with other steps; Slurm does not bind cores and does not start MPI
    return (
        *("srun", *(() if job is None else (f"--jobid={job}",)), *_SRUN_OPTIONS),
        *(f"--nodes={len(hosts)}", f"--ntasks={len(hosts) * num_per_host}", f"--ntasks-per-node={num_per_host}"),
        f"--nodelist={','.join(hosts)}",
    )
