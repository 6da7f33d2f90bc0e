"""Calls that all instances make together: instance 0 writes, and an error of one instance is raised on all."""

from contextlib import AbstractContextManager
from typing import Final

from popdist.errors import CheckpointError, CollectiveError, name_instances
from popdist.exchange.groups import Group
from popdist.job import context
from popdist.job.collectives import fail_together

WRITER: Final = 0
"""The index of the instance that writes and reads manifests."""


def whole_job(call: str) -> Group:
    """Return the group of all the job's instances; raise CollectiveError inside ``execute_on_instances``."""
    group = context.current_group()
    num_instances = context.environment().contract.num_instances
    if len(group.instances) < num_instances:
        raise CollectiveError(
            f"{call} among {name_instances(group.instances)}: all {num_instances} instances of the job take part, "
            "so call it outside of execute_on_instances"
        )
    return group


def is_writer(group: Group) -> bool:
    """Whether this instance, instance 0, writes the manifests, which are the JSON files of checkpoints."""
    return group.backend.instance_index == WRITER


def together(group: Group, text: str) -> AbstractContextManager[None]:
    """Return a context in which an error of one instance is raised on all; its block must not communicate."""
    return fail_together(group, text, CheckpointError)
