"""What the instances of a job do together: one of them writes and reads, and an error on one is raised on all."""

from contextlib import AbstractContextManager
from typing import Final

from popdist.errors import CheckpointError, CollectiveError, name_instances
from popdist.exchange.groups import Group
from popdist.job import context
from popdist.job.collectives import fail_together

WRITER: Final = 0
"""The instance that writes manifests, and reads them."""


def whole_job(call: str) -> Group:
    """The group of all instances of the job; an error within ``execute_on_instances``."""
    group = context.current_group()
    num_instances = context.environment().contract.num_instances
    if len(group.instances) < num_instances:
        raise CollectiveError(
            f"{call} among {name_instances(group.instances)}: all {num_instances} instances of the job take part, "
            "so call it outside of execute_on_instances"
        )
    return group


def is_writer(group: Group) -> bool:
    """Whether this instance is the one that writes manifests."""
    return group.backend.instance_index == WRITER


def together(group: Group, text: str) -> AbstractContextManager[None]:
    """Within it an error on one instance is raised on each; the block waits for nobody."""
    return fail_together(group, text, CheckpointError)
