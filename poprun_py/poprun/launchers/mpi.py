"""Start the shims through an MPI runtime: one table of flags for each family of runtimes.

The runtime is told to bind no process to cores (threads and placement are poprun's) and to take more processes
than cores without complaint. Flags: MPICH's "Using the Hydra Process Manager" and mpiexec.gforker's usage; Open
MPI's mpirun(1) and prterun(1).
"""

import signal
from dataclasses import dataclass
from typing import Final

from popdist.contract import HYDRA_RANK, OMPI_RANK
from poprun.control import RANK_VARIABLE
from poprun.launchers.base import SHIM_WORDS, LaunchCommand
from poprun.plan import LaunchPlan
from poprun.topology import MpiKind, MpiRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The command line of one family of MPI runtimes.

    Attributes:
        fixed: Words that come first on one machine; the user's own follow and win.
        num_processes: The option before the number of processes.
        rank_variable: Variable in which a process finds its rank.
    """

    fixed: tuple[str, ...]
    num_processes: str
    rank_variable: str


DIALECTS: Final = {
    MpiKind.MPICH: Dialect(
        fixed=("-launcher", "fork", "-rmk", "user", "-bind-to", "none"),
        num_processes="-n",
        rank_variable=HYDRA_RANK,
    ),
    MpiKind.OPEN_MPI: Dialect(
        fixed=("--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "--allow-run-as-root"),
        num_processes="-np",
        rank_variable=OMPI_RANK,
    ),
}


FORKER: Final = Dialect(fixed=(), num_processes="-n", rank_variable=HYDRA_RANK)
"""MPICH's launcher for one machine: it binds nothing to cores, counts none, and opens no port."""


def launch_command(plan: LaunchPlan, runtime: MpiRuntime) -> LaunchCommand:
    """The one command that starts every shim of ``plan``.

    Its order is PopRun's: launcher, fixed words, the user's global words, number of processes, the user's local
    words, program.
    """
    dialect = FORKER if runtime.forker else DIALECTS[runtime.kind]
    return LaunchCommand(
        words=(
            runtime.launcher,
            *dialect.fixed,
            *plan.mpi_global_args,
            dialect.num_processes,
            str(plan.num_instances),
            *plan.mpi_local_args,
            *SHIM_WORDS,
        ),
        environment={RANK_VARIABLE: dialect.rank_variable},
        death_signal=signal.SIGKILL
        if runtime.forker
        else signal.SIGTERM,  # a forker that is asked waits for seconds
    )
