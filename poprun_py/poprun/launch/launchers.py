"""How a plan is brought to life: the commands that start one shim for each instance.

Pure: a plan in, words out. `mpi` writes one command for an MPI runtime, `slurm` one for srun, `local` one for each
instance.
"""

from poprun.hosts.routes import JobNetwork
from poprun.launch.launch_command import SHIM_WORDS, LaunchCommand
from poprun.plan.plan import LauncherKind, LaunchPlan

__all__ = ["SHIM_WORDS", "LaunchCommand", "launch_commands"]


def launch_commands(plan: LaunchPlan, network: JobNetwork | None = None) -> tuple[LaunchCommand, ...]:
    """The commands that start the shims of ``plan``: one with MPI or Slurm, else one for each instance.

    Args:
        plan: The job.
        network: How its hosts reach each other; None when there is only this machine.
    """
    if plan.launcher is LauncherKind.MPI and plan.mpi is not None:
        from poprun.launch import mpi_launcher  # noqa: PLC0415 - one of the two, the one that is used

        return (mpi_launcher.launch_command(plan, plan.mpi, network),)
    if plan.launcher is LauncherKind.SRUN:
        from poprun.launch import slurm_launcher  # noqa: PLC0415 - as above

        return (slurm_launcher.launch_command(plan),)
    from poprun.launch import local_launcher  # noqa: PLC0415 - as above

    return local_launcher.launch_commands(plan)
