"""The allocation of Slurm that poprun was called in, as its variables tell.

Variables: sbatch(1) and salloc(1), "OUTPUT ENVIRONMENT VARIABLES". Inside a step srun(1) tells more.
"""

import re
from collections.abc import Mapping
from typing import Final

from popdist.contract import read_node_counts
from popdist.errors import ContractError
from poprun.errors import PlanError
from poprun.plan.topology import Allocation
from poprun.text.host_names import parse_hosts

_JOB: Final = "SLURM_JOB_ID"
_NODES: Final = "SLURM_JOB_NODELIST"
_NODE_HERE: Final = "SLURMD_NODENAME"
_TASKS: Final = "SLURM_NTASKS"
_TASKS_PER_NODE: Final = "SLURM_TASKS_PER_NODE"
_CPUS_PER_NODE: Final = "SLURM_JOB_CPUS_PER_NODE"
_GPUS_PER_NODE: Final = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")
_STEP_TASKS: Final = "SLURM_STEP_NUM_TASKS"
_STEP_TASK: Final = "SLURM_PROCID"


def find_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation that ``environment`` tells of; None outside Slurm.

    Raises:
        PlanError: If a variable of Slurm's is not of the form that Slurm writes.
    """
    if not environment.get(_JOB) or not environment.get(_NODES):
        return None
    gpu_counts = (_last_number(environment.get(name, "")) for name in _GPUS_PER_NODE)
    try:
        tasks_per_node = read_node_counts(environment, _TASKS_PER_NODE) if _TASKS in environment else ()
        cpus_per_node = read_node_counts(environment, _CPUS_PER_NODE)
    except ContractError as error:
        raise PlanError(str(error)) from None
    return Allocation(
        job_id=environment[_JOB],
        nodes=parse_hosts(environment[_NODES]),
        node_here=environment.get(_NODE_HERE),
        tasks_per_node=tasks_per_node,
        cpus_per_node=cpus_per_node,
        num_gpus_per_node=next(filter(None, gpu_counts), 0),
        task=_task(environment),
    )


def _last_number(text: str) -> int:
    """The count in ``4``, ``a100:4`` or ``gpu:a100:4``; 0 without one."""
    match = re.search(r"([0-9]{1,6})$", text)
    return int(match[1]) if match else 0


def _task(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Index and count of the tasks of the step that poprun is a task of; None unless there are several."""
    rank, size = environment.get(_STEP_TASK, ""), environment.get(_STEP_TASKS, "")
    return (int(rank), int(size)) if rank.isdecimal() and size.isdecimal() and int(size) > 1 else None
