"""Two programs of JAX in one process, which joins one job: the example, and a product with terms on all devices.

With an address and a number it is one of two processes that are told by hand what they are.
"""

import functools
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

PROGRAM: Final = str(Path(__file__).absolute())

_EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "jax_training.py"


def expected(num_processes: int) -> list[str]:
    """The lines that a job of four devices prints."""
    product = f"product [[56.0, 64.0], [56.0, 64.0]] processes {num_processes}"
    return [f"{num_processes} processes, 4 devices: [0. 1. 2. 3.]", product]


def main(words: list[str]) -> None:
    """Run both."""
    jax, np, utils = map(import_module, ("jax", "numpy", "jax.experimental.multihost_utils"))
    if words:
        address, rank = words
        jax.distributed.initialize = functools.partial(jax.distributed.initialize, address, 2, int(rank))
    runpy.run_path(str(_EXAMPLE), run_name="__main__")
    product = np.asarray(multiply(jax, np))
    indices = utils.process_allgather(np.array(jax.process_index()), tiled=False)
    if jax.process_index() == 0:
        sys.stdout.write(f"product {product.tolist()} processes {len(np.atleast_1d(indices))}\n")


def multiply(jax: Any, np: Any) -> Any:
    """A product, in JAX's way to say what each device does."""
    mesh = jax.make_mesh((jax.device_count(),), ("inner",))
    columns, rows, everywhere = (jax.sharding.PartitionSpec(*it) for it in ((None, "inner"), ("inner",), ()))

    def place(array: Any, spec: Any) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])

    def add_terms(a: Any, b: Any) -> Any:
        return jax.lax.psum(a @ b, "inner")

    step = jax.jit(jax.shard_map(add_terms, mesh=mesh, in_specs=(columns, rows), out_specs=everywhere))
    return step(place(np.ones((2, 8)), columns), place(np.arange(16.0).reshape(8, 2), rows))


if __name__ == "__main__":
    main(sys.argv[1:])
