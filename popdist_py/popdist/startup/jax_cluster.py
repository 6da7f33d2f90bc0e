"""The description of poprun's job for JAX, so that ``jax.distributed.initialize()`` needs no argument.

The start-up hook (``startup/sitecustomize.py``) uses this module in the Python of the program, so it is written
for Python 3.8. Settings of the program or its user have priority, because JAX asks here only for missing settings.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing takes longer than importing this module
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

COORDINATOR = "POPDIST_JAX_COORDINATOR"
"""The environment variable with the address at which JAX of instance 0 must listen; poprun reserves a port."""

BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"

CPU_DEVICES = "JAX_NUM_CPU_DEVICES"
"""The environment variable with the number of CPU devices of an instance; poprun sets it if it is not set."""

FIRST_WITH_CPU_DEVICES = (0, 5)
"""The first version of JAX that reads the environment variable ``JAX_NUM_CPU_DEVICES``."""


def register(clusters: ModuleType, announce: Callable[[], None]) -> None:
    """Add poprun to the kinds of clusters that JAX knows; the module ``clusters`` has the base class of clusters.

    When JAX connects a process, it asks each kind whether the process is in such a cluster: ``announce`` is called
    then.
    """

    class PoprunCluster(clusters.ClusterEnv):  # type: ignore[name-defined,misc] # JAX keeps a list of its subclasses
        """A job of poprun as a kind of cluster for JAX, started by any launcher."""

        name = "poprun"

        @classmethod
        def is_env_present(cls) -> bool:
            """Whether this process is an instance of a job of poprun."""
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
            """Return the address at which JAX's processes connect; the coordinator listens only there."""
            host, port = os.environ[COORDINATOR].rsplit(":", 1)
            address = host + ":" + (override_coordinator_port or port)
            os.environ.setdefault(BIND_ADDRESS, address)  # else JAX would listen at all addresses of the host
            return address

        @classmethod
        def get_process_count(cls) -> int:
            """Return the number of instances of the job, which JAX calls processes."""
            return int(os.environ["WORLD_SIZE"])

        @classmethod
        def get_process_id(cls) -> int:
            """Return the index of this instance in the job."""
            return int(os.environ["RANK"])

        @classmethod
        def get_local_process_id(cls) -> None:
            """Return None, because an instance may have several devices, and poprun assigns the devices."""


def describe_age(version: tuple[int, ...]) -> str:
    """Return a warning if JAX is too old for the requested number of CPU devices; otherwise an empty text."""
    num_devices = os.environ.get(CPU_DEVICES, "1")
    if num_devices == "1" or version >= FIRST_WITH_CPU_DEVICES:
        return ""
    shown = ".".join(map(str, version)) or "of this age"
    return (
        f"JAX {shown} does not read {CPU_DEVICES}: each instance has one CPU device, not {num_devices}. Start as "
        f"many instances as replicas, set XLA_FLAGS=--xla_force_host_platform_device_count={num_devices}, or "
        "install JAX 0.5\n"
    )
