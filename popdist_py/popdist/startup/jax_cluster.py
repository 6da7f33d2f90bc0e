"""Tells JAX of poprun's job, so that ``jax.distributed.initialize()`` needs no argument in it.

The start-up hook (``startup/sitecustomize.py``) calls it in whatever Python the program runs, so this is written
for Python 3.8. What the program or its user say themselves wins: JAX asks here only for what they have not said.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing takes longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

COORDINATOR = "POPDIST_JAX_COORDINATOR"
"""Where instance 0's JAX is to listen: a port there is held for it."""

BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"

CPU_DEVICES = "JAX_NUM_CPU_DEVICES"
"""How many CPU devices an instance is to have: poprun sets it unless the user has."""

FIRST_WITH_CPU_DEVICES = (0, 5)
"""The first JAX that reads that variable."""


def register(clusters: ModuleType, announce: Callable[[], None]) -> None:
    """Add poprun to the kinds of clusters that JAX knows; ``clusters`` is the module with their base class.

    JAX asks each kind whether the process is in one when it connects the process: ``announce`` is called then.
    """

    class PoprunCluster(clusters.ClusterEnv):  # type: ignore[name-defined,misc] # JAX keeps a list of its subclasses
        """A job of poprun, under whichever launcher."""

        name = "poprun"

        @classmethod
        def is_env_present(cls) -> bool:
            """Whether this process is an instance of one."""
            announce()
            if COORDINATOR not in os.environ:
                return False
            if os.environ["RANK"] == "0":
                sys.stderr.write(describe_age(getattr(sys.modules["jax"], "__version_info__", ())))
            return True

        @classmethod
        def get_coordinator_address(
            cls, *_: object, override_coordinator_port: str | None = None, **__: object
        ) -> str:
            """Where the processes connect; there, and nowhere else, the coordinator listens."""
            host, port = os.environ[COORDINATOR].rsplit(":", 1)
            address = host + ":" + (override_coordinator_port or port)
            os.environ.setdefault(BIND_ADDRESS, address)  # else it would listen at all addresses of the machine
            return address

        @classmethod
        def get_process_count(cls) -> int:
            """The number of instances."""
            return int(os.environ["WORLD_SIZE"])

        @classmethod
        def get_process_id(cls) -> int:
            """The index of this instance."""
            return int(os.environ["RANK"])

        @classmethod
        def get_local_process_id(cls) -> None:
            """No number of a device: an instance may have several, and poprun says which."""


def describe_age(version: tuple[int, ...]) -> str:
    """What a user should know whose JAX is too old to have as many CPU devices as it is told; else nothing."""
    num_devices = os.environ.get(CPU_DEVICES, "1")
    if num_devices == "1" or version >= FIRST_WITH_CPU_DEVICES:
        return ""
    found = ".".join(map(str, version)) or "of this age"
    return (
        f"JAX {found} does not read {CPU_DEVICES}: each instance has one CPU device, not {num_devices}. Start as "
        f"many instances as replicas, set XLA_FLAGS=--xla_force_host_platform_device_count={num_devices}, or "
        "install JAX 0.5\n"
    )
