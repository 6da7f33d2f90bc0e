"""The job that ``srun`` describes to each of its tasks: one task is one instance with one replica.

A batch script, or the shell of ``salloc``, is no task, because it has no ``SLURM_STEP_NUM_TASKS``. Variables:
srun(1), "OUTPUT ENVIRONMENT VARIABLES". Pure: reads the environment, never writes to it.
"""

import re
from collections.abc import Mapping
from typing import Final

from popdist.errors import ContractError
from popdist.ground.contract import Contract, read_count, read_master, read_node_counts

SIZE: Final = "SLURM_STEP_NUM_TASKS"
RANK: Final = "SLURM_PROCID"
LOCAL_RANK: Final = "SLURM_LOCALID"
NODE: Final = "SLURM_NODEID"
TASKS_PER_NODE: Final = "SLURM_STEP_TASKS_PER_NODE"
NODES: Final = "SLURM_STEP_NODELIST"
JOB: Final = "SLURM_JOB_ID"
STEP: Final = "SLURM_STEP_ID"

_NUM_PORTS: Final = 8
_FIRST_PORT: Final = 20_000
_LAST_PORT: Final = 32_000  # below the ports that Linux gives to outgoing connections


def read_slurm(env: Mapping[str, str]) -> Contract | None:
    """Return the job of a task of ``srun``; None for other processes. Raises ContractError if a value is wrong."""
    if SIZE not in env or RANK not in env:
        return None
    rank, size = read_count(env, RANK, minimum=0), read_count(env, SIZE)
    if rank >= size:
        raise ContractError(f"{RANK}={rank} is not below {SIZE}={size}")
    node = read_count(env, NODE, minimum=0, default=0)
    per_node = read_node_counts(env, TASKS_PER_NODE) or (size,)
    if node >= len(per_node):
        raise ContractError(f"{NODE}={node}, but {TASKS_PER_NODE}={env.get(TASKS_PER_NODE)} has no such node")
    return Contract(
        num_instances=size,
        instance_index=rank,
        num_local_instances=per_node[node],
        local_instance_index=read_count(env, LOCAL_RANK, minimum=0, default=rank % per_node[node]),
        host_index=node,
        num_replicas=size,
        job_id=step_name(env),
        master=read_master(env),
    )


def first_node(nodes: str) -> str:
    """Return the name of the first node in Slurm's list ``nodes``: ``n01`` for ``n[01-04,7],gpu2``."""
    match = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[0] if match else "")


def step_name(env: Mapping[str, str]) -> str:
    """Return the name of a Slurm step, ``<job>.<step>``; empty if Slurm has not set both numbers."""
    return f"{env[JOB]}.{env[STEP]}" if JOB in env and STEP in env else ""


def store_ports(step: str) -> tuple[int, ...]:
    """Return the ports at which a Slurm step's store may listen, in the order to try: Slurm reserves no port."""
    span = _LAST_PORT - _FIRST_PORT
    start = sum(
        int(number) * factor for number, factor in zip(re.findall(r"[0-9]+", step), (7919, 104729), strict=False)
    )
    return tuple(_FIRST_PORT + (start + 1201 * attempt) % span for attempt in range(_NUM_PORTS))
