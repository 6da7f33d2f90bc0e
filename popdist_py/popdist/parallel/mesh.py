"""torch's DeviceMesh of the job's instances: which instances have the same replica, stage and tensor part."""

from functools import cache
from typing import Final

import torch
from torch import nn
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from popdist.data.shard_randomness import give_parts_numbers
from popdist.errors import CollectiveError, ContractError, WeightsError, name_instances
from popdist.exchange.process_group.registration import remember_wrappers
from popdist.ground.contract import Contract
from popdist.job import context

DIMENSIONS: Final = ("replica", "pipeline", "tensor")
"""The dimensions of the mesh, from the outermost to the innermost."""


def device_mesh() -> DeviceMesh:
    """Return the job's ``DeviceMesh`` of torch, with the dimensions ``replica``, ``pipeline`` and ``tensor``.

    The mesh always has all three dimensions, also with size 1, so that one program serves every ``--parallelism``:
    ``mesh["tensor"]`` is for torch's ``parallelize_module``, ``mesh["pipeline"].get_group()`` for torch's pipeline
    stages. The ranks of the mesh are the instances, and all instances must call the function; further calls return
    the same mesh. If the program has not done so, the function calls ``popdist.init()``, and makes the default
    process group of torch.distributed with the backend ``popdist``. If an instance has several replicas,
    ``replica`` counts instances.

    Raises:
        ContractError: If the job does not say how instances share a replica (``--instances-per-replica``).
        BackendError: If the ranks of the program's default group are not the instances.
        CollectiveError: If the instances make different calls, or inside ``execute_on_instances``.
    """
    _check_mesh_is_known(context.environment().contract)
    context.ensure_init()
    job = context.current_job()
    contract = job.environment.contract
    if len(job.group.instances) < contract.num_instances:
        raise CollectiveError(
            f"device_mesh() among {job.group.name(job.group.instances)}: all instances of the job make it "
            "together, so call it outside execute_on_instances"
        )
    for wrapper in remember_wrappers():
        if isinstance(wrapper, DistributedDataParallel):
            _refuse_ddp(wrapper, contract)
    _watch_for_ddp()
    if job.mesh is None:
        context.ensure_default_group("device_mesh()")
        device = context.device()
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)  # the device LOCAL_RANK may not be visible here
        shape = contract.layout.num_instances, contract.parallelism.pipeline, contract.parallelism.tensor
        give_parts_numbers()
        job.mesh = init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS)
    return job.mesh


def _check_mesh_is_known(contract: Contract) -> None:
    size = contract.parallelism.instances_per_replica
    if not contract.parallelism.has_mesh:
        raise ContractError(
            f"device_mesh(): the job has --instances-per-replica {size}, which does not say how these share a "
            f"replica. Start it with --parallelism tensor=T,pipeline=P in its place, T times P being {size}; or "
            f'make a mesh in the program: init_device_mesh("{context.device().type}", ({contract.num_replicas}, '
            f'{size}), mesh_dim_names=("replica", "shard"))'
        )


@cache
def _watch_for_ddp() -> None:
    register_module_module_registration_hook(_see_module)


def _see_module(wrapper: nn.Module, _name: str, _module: object) -> None:
    if isinstance(wrapper, DistributedDataParallel) and context.is_initialized():
        job = context.current_job()
        if job.mesh is not None:
            _refuse_ddp(wrapper, job.environment.contract)


def _refuse_ddp(wrapper: DistributedDataParallel, contract: Contract) -> None:
    """Raise WeightsError if the process group of ``wrapper``, a DDP model, has instances with different parts of a
    replica: DDP would take the mean of these parts' gradients.
    """
    try:
        ranks = get_process_group_ranks(wrapper.process_group)
    except KeyError:  # the group is destroyed, so the model trains no more
        return
    if len({contract.parallelism.part_of(rank).index for rank in ranks}) > 1:
        raise WeightsError(
            f"DistributedDataParallel over {name_instances(ranks)} would take the mean of gradients of different "
            "parts of a replica: wrap the model in popdist.ReplicatedModel, which adds those of each part over "
            'the replicas, or say DistributedDataParallel(..., device_mesh=popdist.device_mesh()["replica"])'
        )
