"""What TensorFlow programs for PopDist call: their devices, a strategy, and sums and copies over the instances.

TensorFlow itself computes and connects; poprun tells it of the job (``TF_CONFIG``). Needs no torch.
"""

from typing import Any, Literal, TypeVar

import tensorflow as tf

from popdist.job.context import environment

Config = TypeVar("Config")


def set_ipu_config(
    config: Config, ipus_per_replica: int | None = None, *, configure_device: bool = True
) -> Config:
    """Give this instance its own GPUs, and write its place in the job into a configuration.

    Args:
        config: Any object. Of what an ``IPUConfig`` has, ``select_ipus`` and
            ``experimental.multi_replica_distribution`` are set where they are there.
        ipus_per_replica: As poprun was told; None takes that.
        configure_device: Whether TensorFlow is to see this instance's GPUs only. Before it computes anything.

    Returns:
        ``config``.

    Raises:
        ContractError: If poprun was told another number of IPUs.
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
    """TensorFlow's strategy for several workers: each instance is one, and the variables of all are the same.

    Make it before anything else of TensorFlow's computes, after :func:`set_ipu_config`. A job of one instance has
    that instance only.
    """


def allreduce(value: Any, reduce_op: Literal["SUM", "MEAN"] = "SUM") -> Any:
    """The sum or the mean of the instances' values, on each of them.

    Args:
        value: A tensor, or what TensorFlow makes one of; of the same shape and dtype on every instance.
        reduce_op: ``"SUM"`` or ``"MEAN"``.

    Returns:
        A tensor of that shape. Floats are added in TensorFlow's own order.
    """
    strategy = tf.distribute.get_strategy()
    return strategy.reduce(reduce_op, strategy.run(tf.convert_to_tensor, args=(value,)), axis=None)


def allgather(value: Any) -> Any:
    """The values of the instances, on each of them: one row for each, in their order."""
    strategy = tf.distribute.get_strategy()
    return strategy.gather(strategy.run(lambda one: tf.convert_to_tensor(one)[None], args=(value,)), axis=0)


def broadcast(value: Any, root_rank: int = 0) -> Any:
    """The value of instance ``root_rank``, on each of them; those of the others only say its shape and dtype."""
    return allgather(value)[root_rank]
