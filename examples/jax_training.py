"""Fits a line with JAX on all devices of the job: ``poprun -n 2 --num-replicas 4 examples/jax_training.py``."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def loss(weights: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error over the whole batch, wherever its rows are."""
    return jnp.mean((x @ weights - y) ** 2)


def train(weights: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """One step of gradient descent."""
    return weights - 0.1 * jax.grad(loss)(weights, x, y)


def main() -> None:
    """Train, and print the weights."""
    jax.distributed.initialize()  # poprun has told JAX which process this is, and where they connect
    mesh = jax.make_mesh((jax.device_count(),), ("replicas",))
    everywhere, rows = (NamedSharding(mesh, PartitionSpec(*names)) for names in ((), ("replicas",)))
    x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
    y = x @ np.arange(4, dtype=np.float32)

    share = slice(jax.process_index() * len(x) // jax.process_count(), None)
    num_rows = len(x) // jax.process_count()
    batch = [jax.make_array_from_process_local_data(rows, part[share][:num_rows]) for part in (x, y)]
    weights = jax.device_put(np.zeros(4, np.float32), everywhere)
    step = jax.jit(train)
    for _ in range(100):
        weights = step(weights, *batch).block_until_ready()
    if jax.process_index() == 0:
        print(f"{jax.process_count()} processes, {jax.device_count()} devices: {np.round(weights, 4)}")


if __name__ == "__main__":
    main()
