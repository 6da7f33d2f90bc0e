"""The micro batches of one call of a model on this process: how many, in which order, and who shares them."""

from poptorch.enums import CommGroupType
from poptorch.errors import Error
from poptorch.options.model_options import Options


def count_parts(options: Options) -> int:
    """How many equal parts dim 0 of an input has."""
    return int(options.device_iterations * options.Training.gradient_accumulation * _count_groups(options))


def parts_of_micro_batches(options: Options) -> tuple[int, ...]:
    """The part that each micro batch gets: by device iteration, step of accumulation, then replica."""
    num_groups, group_size = _count_groups(options), options.input_group_size
    is_strided = options.input_group_type is CommGroupType.Orthogonal
    groups = [
        replica % num_groups if is_strided else replica // group_size
        for replica in range(options.replication_factor)
    ]
    steps = range(options.device_iterations * options.Training.gradient_accumulation)
    return tuple(step * num_groups + group for step in steps for group in groups)


def _count_groups(options: Options) -> int:
    """How many groups of this process's replicas there are, each of which gets samples of its own."""
    num_replicas, group_size = options.replication_factor, options.input_group_size
    if num_replicas % group_size:
        raise Error(f"replicationFactor({num_replicas}) is no multiple of the input groups' size, {group_size}")
    return int(num_replicas // group_size)
