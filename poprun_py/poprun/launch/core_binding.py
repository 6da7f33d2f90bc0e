"""Binds this process, and with it the program that it starts next, to cores and to the memory near them."""

import errno
import os
from collections.abc import Collection

from poprun.process.linux import take_memory_from


def bind(cores: Collection[int], memory_nodes: Collection[int]) -> dict[str, str]:
    """Let the threads of this process run on ``cores`` only, and take its memory from ``memory_nodes``.

    What a process starts inherits both (sched_setaffinity(2), set_mempolicy(2)).

    Args:
        cores: Numbers of cores; empty binds to none.
        memory_nodes: NUMA nodes; empty leaves the memory to the kernel, which takes it from the node of the core
            that touches it first.

    Returns:
        What is to be told: why the memory is not bound, if it is not. Containers may forbid that call.

    Raises:
        OSError: If one of the cores is not there, or its control group does not allow it.
    """
    if cores:
        os.sched_setaffinity(0, cores)
        if os.sched_getaffinity(0) != set(cores):  # the kernel leaves out what is not to be had, without a word
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if memory_nodes:
        try:
            take_memory_from(memory_nodes)
        except OSError as error:
            return {"memory_not_bound": error.strerror or str(error)}
    return {}
