"""A test at the end of a program that runs as several processes: do its imports show that it trained alone?

The start-up hook (``startup/sitecustomize.py``) uses this module in the Python of the program, so it is written
for Python 3.8 and imports nothing. Pure.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes longer than importing this module
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

FRAMEWORKS = ("torch", "keras", "tensorflow", "jax", "paddle")
"""The names of libraries that train. For torch a made optimizer counts as training, for others the import."""

_CONNECTORS = ("horovod", "ray")
"""Modules of libraries that connect processes by their own means."""

_CLUSTER = "PADDLE_TRAINER_ENDPOINTS"
"""The environment variable by which Paddle connects processes."""

_SERVERS = ("_collective_ops_server_def", "_server_def")
"""The attributes of TensorFlow's context that are set if a strategy has connected TensorFlow's processes."""

_NODES = ("--nnodes", "--node_rank", "--node-rank")


def has_trained_alone(
    modules: Mapping[str, Any],
    words: Sequence[str],
    excepthook: Callable[..., object],
    variables: Mapping[str, str],
) -> bool:
    """Whether this process seems to have trained, although nothing connected it to other processes."""
    if _was_connected(modules, excepthook) or _CLUSTER in variables or '"ps"' in variables.get("TF_CONFIG", ""):
        return False
    checks = modules.get("popdist.step.checks.optimizer_checks")
    if checks is not None:
        return bool(checks.lone_steps.number)
    if "torch" in modules:  # even if TensorFlow trains, because tools for logs import torch
        return "keras" in modules or _has_trained(modules, words)
    return "popdist.job.context" not in modules and any(name in modules for name in FRAMEWORKS)


def _has_trained(modules: Mapping[str, Any], words: Sequence[str]) -> bool:
    """Whether this process has made a torch optimizer, or is a torchrun that starts training processes."""
    if "torch.distributed.run" in modules:
        return not any(word.startswith(_NODES) for word in words)  # such a torchrun connects to torchruns
    optim = modules.get("torch.optim")
    kinds = [optim.Optimizer] if optim is not None else []
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(getattr(kind.step, "hooked", False) for kind in kinds)


def _is_there(modules: Mapping[str, Any], name: str) -> bool:
    """Whether the real library ``name`` was imported, and not poptorch's substitute with this name."""
    spec = getattr(modules.get(name), "__spec__", None)
    return name in modules and getattr(spec, "origin", None) != "poptorch"


def _was_connected(modules: Mapping[str, Any], excepthook: Callable[..., object]) -> bool:
    """Whether MPI, torch.distributed or another library than popdist has connected this process."""
    mpi, groups = modules.get("mpi4py.MPI"), modules.get("torch.distributed.distributed_c10d")
    if (mpi is not None and mpi.Is_initialized()) or any(_is_there(modules, name) for name in _CONNECTORS):
        return True
    jax = getattr(modules.get("jax._src.distributed"), "global_state", None)  # stays set after shutdown
    tensorflow = getattr(modules.get("tensorflow.python.eager.context"), "_context", None)
    if getattr(jax, "num_processes", 1) > 1 or any(getattr(tensorflow, name, None) for name in _SERVERS):
        return True
    if groups is None:
        return False
    if groups.is_initialized():
        return bool(groups.get_world_size() > 1)
    # a destroyed group leaves the address of its store, and torch's function for printing exceptions
    init_method = groups._default_pg_init_method  # noqa: SLF001 - torch has no public name for the default
    return init_method is not None or excepthook.__module__ == groups.__name__
