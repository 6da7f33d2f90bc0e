"""Whether a program of a job of several processes has trained alone: its imports show it at its end.

The start-up hook (``startup/sitecustomize.py``) calls it in whatever Python the program runs, so this is written
for Python 3.8 and imports nothing. Pure.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

FRAMEWORKS = ("torch", "keras", "tensorflow", "jax", "paddle")
"""Libraries that train. Of torch it shows whether a program did; of the others, that they were imported counts."""

_CONNECTORS = ("horovod", "ray")
"""Modules of libraries that connect processes in ways of their own."""

_CLUSTER = "PADDLE_TRAINER_ENDPOINTS"
"""The variable by which Paddle connects processes."""

_SERVERS = ("_collective_ops_server_def", "_server_def")
"""What TensorFlow's context has of the servers that connect it to others, in a strategy of several workers."""

_NODES = ("--nnodes", "--node_rank", "--node-rank")


def has_trained_alone(
    modules: Mapping[str, Any],
    words: Sequence[str],
    excepthook: Callable[..., object],
    variables: Mapping[str, str],
) -> bool:
    """Whether a process trained, as far as one can see, and none of its ``modules`` connected it to others."""
    if _was_connected(modules, excepthook) or _CLUSTER in variables or '"ps"' in variables.get("TF_CONFIG", ""):
        return False
    checks = modules.get("popdist.step.checks.optimizer_checks")
    if checks is not None:
        return bool(checks.lone_steps.number)
    if "torch" in modules:  # which tools for logs import beside TensorFlow
        return "keras" in modules or _has_trained(modules, words)
    return "popdist.job.context" not in modules and any(name in modules for name in FRAMEWORKS)


def _has_trained(modules: Mapping[str, Any], words: Sequence[str]) -> bool:
    """Whether the process made an optimizer (torch marks the class then), or is a torchrun whose processes did."""
    if "torch.distributed.run" in modules:
        return not any(word.startswith(_NODES) for word in words)  # else it connects torchruns
    optim = modules.get("torch.optim")
    kinds = [optim.Optimizer] if optim is not None else []
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(getattr(kind.step, "hooked", False) for kind in kinds)


def _is_there(modules: Mapping[str, Any], name: str) -> bool:
    """Whether a library was imported, and not the stand-in of `popdist.startup.stub_finder`."""
    spec = getattr(modules.get(name), "__spec__", None)
    return name in modules and getattr(spec, "origin", None) != "poptorch"


def _was_connected(modules: Mapping[str, Any], excepthook: Callable[..., object]) -> bool:
    """Whether MPI, torch.distributed or another library connected the process to others; popdist is not asked."""
    mpi, groups = modules.get("mpi4py.MPI"), modules.get("torch.distributed.distributed_c10d")
    if (mpi is not None and mpi.Is_initialized()) or any(_is_there(modules, name) for name in _CONNECTORS):
        return True
    jax = getattr(
        modules.get("jax._src.distributed"), "global_state", None
    )  # keeps the number when all is shut down
    tensorflow = getattr(modules.get("tensorflow.python.eager.context"), "_context", None)
    if getattr(jax, "num_processes", 1) > 1 or any(getattr(tensorflow, name, None) for name in _SERVERS):
        return True
    if groups is None:
        return False
    if groups.is_initialized():
        return bool(groups.get_world_size() > 1)
    # a group that was destroyed leaves the address of its store, and torch's way to print exceptions
    init_method = groups._default_pg_init_method  # noqa: SLF001 - nothing public has it
    return init_method is not None or excepthook.__module__ == groups.__name__
