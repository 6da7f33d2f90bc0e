"""Start the shims as the tasks of a Slurm step: one task is one instance.

The tasks inherit poprun's environment through Slurm, which signs what it sends; no value stands in a command line.
"""

import signal

from poprun.hosts.routes import srun_words
from poprun.launch.launch_command import SHIM_WORDS, LaunchCommand
from poprun.messages.control import RANK_VARIABLE
from poprun.plan.plan import LaunchPlan

_RANK = "SLURM_PROCID"


def launch_command(plan: LaunchPlan) -> LaunchCommand:
    """The one command that starts every shim of ``plan``, which is in an allocation of Slurm."""
    return LaunchCommand(
        words=(
            *srun_words(plan.remote.slurm_job, plan.hosts, plan.num_instances_per_host),
            "--input=none",
            *SHIM_WORDS,
        ),
        environment={RANK_VARIABLE: _RANK},
        death_signal=signal.SIGTERM,
    )
