"""What poptorch takes from the environment: the process of a job, and defaults of options and of the log."""

import os
from typing import Final

import popdist

PROCESS_ID: Final = "OMPI_COMM_WORLD_RANK"
NUM_PROCESSES: Final = "OMPI_COMM_WORLD_SIZE"


def setting(name: str) -> str:
    """The value of the environment variable ``POPTORCH_<name>``; empty when it is not set."""
    return os.environ.get(f"POPTORCH_{name}", "")


def process_of_job() -> tuple[int, int]:
    """This process's index and their number, as poprun, else Open MPI, else another launcher says; else 0 of 1."""
    if not popdist.isPopdistEnvSet() and (PROCESS_ID in os.environ or NUM_PROCESSES in os.environ):
        return process_in(PROCESS_ID, NUM_PROCESSES)
    return popdist.instance_index(), popdist.num_instances()


def process_in(id_name: str, size_name: str) -> tuple[int, int]:
    """This process and the number of processes, from two variables; 0 of 1 when neither is set."""
    texts = os.environ.get(id_name), os.environ.get(size_name)
    if texts == (None, None):
        return 0, 1
    if not all(text is not None and text.strip().isdecimal() for text in texts):
        raise AssertionError(
            f"{id_name}={texts[0]} and {size_name}={texts[1]} must be the index of this process and the number of "
            "processes, or both be unset"
        )
    return int(str(texts[0])), int(str(texts[1]))
