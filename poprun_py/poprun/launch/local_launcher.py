"""Start the shims without any MPI, all on this machine."""

import signal

from poprun.launch.launch_command import SHIM_WORDS, LaunchCommand
from poprun.messages.control import INSTANCE, RANK_VARIABLE
from poprun.plan.plan import LaunchPlan


def launch_commands(plan: LaunchPlan) -> tuple[LaunchCommand, ...]:
    """One command for each instance."""
    return tuple(
        LaunchCommand(
            words=SHIM_WORDS,
            environment={RANK_VARIABLE: INSTANCE, INSTANCE: str(index)},
            death_signal=signal.SIGKILL,
        )
        for index in range(plan.num_instances)
    )
