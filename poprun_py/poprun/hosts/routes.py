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

Places = Sequence[tuple[str, str]]
"""A host's addresses as (interface, address)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoute:
    """One host of a job, as the others reach it.

    Attributes:
        name: What the user calls it.
        address: Its IP address for the job's traffic. All hosts of a job have one of the same family.
        interface: The network interface that has this address.
        devices: CUDA devices that the job holds there, in slot order; empty for those of the plan.
        keeper: Where the agents of that host are given the job's lease; empty when it has none.
    """

    name: str
    address: str
    interface: str
    devices: tuple[str, ...] = ()
    keeper: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKey:
    """The secret with which agents of other hosts prove that they belong to a job, new for each attempt.

    Attributes:
        text: The key; nobody else may read it.
        file: Where every host holds it until the agents have come.
    """

    text: str = field(repr=False)
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNetwork:
    """The hosts of a job that are not, or not only, the machine that poprun runs on.

    Attributes:
        control_host: Address of this machine at which the agents report.
        hosts: The hosts of the plan, in its order.
        key: The key of the agents.
        keepers: Children of poprun through which it keeps the leases on them.
    """

    control_host: str
    hosts: tuple[HostRoute, ...]
    key: JobKey
    keepers: tuple[int, ...] = ()


def ssh_options(config: str | None) -> tuple[str, ...]:
    """The options of every call of ssh; ``config`` stands in the place of the user's own configuration file."""
    return (*(("-F", config) if config is not None else ()), *_SSH_OPTIONS)


def remote_words(
    config: str | None, job: str | None, host: str, command: Sequence[str], *, is_kept: bool = False
) -> tuple[str, ...]:
    """The argv that runs ``command`` on ``host``, by srun in Slurm's ``job`` if there is one, else by ssh.

    Args:
        config: The configuration file of ssh, or None for the user's own.
        job: Number of the job in Slurm, or None.
        host: The host.
        command: The words, each of which arrives as it is.
        is_kept: Whether the command runs as long as the job: ssh then finds out when the host is lost, and ends;
            its connection is shared with no other call, which might end it.
    """
    if job is not None:
        return (*srun_words(job, (host,), 1), *command)
    return ("ssh", *ssh_options(config), *(_SSH_KEPT if is_kept else ()), "-T", "--", host, shlex.join(command))


def srun_words(job: str | None, hosts: Sequence[str], num_per_host: int) -> tuple[str, ...]:
    """The words before a command that Slurm runs ``num_per_host`` times on each of ``hosts``.

    The step shares what the job has with other steps (``--overlap``: a batch script may have some), is bound to no
    cores that Slurm chooses, and is no MPI job of Slurm's: see srun(1). Ranks go to the hosts in blocks.

    Args:
        job: Number of the job in Slurm; None for the one that the environment tells of.
        hosts: Nodes of that job.
        num_per_host: How often the command runs on each.
    """
    return (
        *("srun", *(() if job is None else (f"--jobid={job}",)), *_SRUN_OPTIONS),
        *(f"--nodes={len(hosts)}", f"--ntasks={len(hosts) * num_per_host}", f"--ntasks-per-node={num_per_host}"),
        f"--nodelist={','.join(hosts)}",
    )
