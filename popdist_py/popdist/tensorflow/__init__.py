"""The functions that TensorFlow programs for PopDist call: devices, a strategy, sums and copies of values.

TensorFlow itself computes and connects; poprun describes the job to TensorFlow (``TF_CONFIG``). Needs no torch.
"""

from typing import Any, Literal, TypeVar

import tensorflow as tf

from popdist.job.context import environment

Config = TypeVar("Config")


def set_ipu_config(
    config: Config, ipus_per_replica: int | None = None, *, configure_device: bool = True
) -> Config:
    """Make only this instance's GPUs visible to TensorFlow; write its index and the job's size into ``config``.

    Args:
        config: Any object. ``select_ipus`` and ``experimental.multi_replica_distribution``, which an ``IPUConfig``
            has, are set if they exist.
        ipus_per_replica: The number given to poprun; None means this number.
        configure_device: Whether TensorFlow sees only this instance's GPUs. Works only before TensorFlow computes.

    Returns:
        ``config``.

    Raises:
        ContractError: If poprun was given another number of IPUs.
    """
    environment().ipus_of_replica(ipus_per_replica)
    job = environment().contract
    if hasattr(config, "select_ipus"):
        config.select_ipus = job.local_instance_index
    distribution = getattr(getattr(config, "experimental", None), "multi_replica_distribution", None)
    if distribution is not None:
        distribution.process_count, distribution.process_index = job.num_instances, job.instance_index
    if configure_device and job.devices:
        gpus = tf.config.list_physical_devices("GPU")
        tf.config.set_visible_devices([gpus[number] for number in job.devices], "GPU")
    return config


class PopDistStrategy(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc] # TensorFlow has no annotations
    """TensorFlow's strategy for several processes: each instance is a worker, and all have equal variables.

    Make the strategy before TensorFlow computes anything, after :func:`set_ipu_config`. In a job of one instance
    the strategy has one worker.
    """


def allreduce(value: Any, reduce_op: Literal["SUM", "MEAN"] = "SUM") -> Any:
    """Return the sum of ``value`` over all instances, or with ``"MEAN"`` the mean, on every instance.

    Args:
        value: A tensor, or a value that TensorFlow converts to a tensor; of the same shape and dtype on every
            instance.
        reduce_op: ``"SUM"`` or ``"MEAN"``.

    Returns:
        A tensor of the same shape. Floats are added in TensorFlow's own order.
    """
    strategy = tf.distribute.get_strategy()
    return strategy.reduce(reduce_op, strategy.run(tf.convert_to_tensor, args=(value,)), axis=None)


def allgather(value: Any) -> Any:
    """Return the values of all instances on each instance: one row for each instance, in instance order."""
    strategy = tf.distribute.get_strategy()
    return strategy.gather(strategy.run(lambda one: tf.convert_to_tensor(one)[None], args=(value,)), axis=0)


def broadcast(value: Any, root_rank: int = 0) -> Any:
    """Return ``value`` of the instance ``root_rank`` on each instance; shapes and dtypes must be equal."""
    return allgather(value)[root_rank]
