"""Options and attributes of DistributedDataParallel that popdist does not need, and what to write instead.

docs/from-ddp.md gives the same answers.
"""

from collections.abc import Mapping
from functools import cache
from itertools import chain
from typing import Any, Final

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy

from popdist.errors import WeightsError, name_instances
from popdist.ground.local_tensors import is_distributed, is_fully_sharded
from popdist.job import context

_MOVE: Final = "move the module first: ReplicatedModel(net.to(popdist.device()))"
_NOTHING: Final = "leave it out"
_BUFFERS: Final = f"{_NOTHING}: buffers become the mean over the replicas in each step"
_UNUSED: Final = f"{_NOTHING}: a replica that does not use a parameter, or has no samples, takes part all the same"
_MEMORY: Final = f"{_NOTHING}: gradients are added where they lie, and sent while the last backward pass runs"
_ACCUMULATION: Final = (
    "gradients are reduced once for all micro batches of a loop: say popdist.data_loader(..., accumulation=4), or "
    "`with model.no_sync():` around a backward pass outside the loop"
)

_OPTIONS: Final = {
    "device_ids": _MOVE,
    "output_device": _MOVE,
    "dim": _NOTHING,
    "broadcast_buffers": _BUFFERS,
    "init_sync": f"{_NOTHING}: all instances always begin with the weights of instance 0",
    "process_group": f"{_NOTHING}: the model trains on all instances of the job",
    "bucket_cap_mb": _MEMORY,
    "find_unused_parameters": _UNUSED,
    "check_reduction": _NOTHING,
    "gradient_as_bucket_view": _MEMORY,
    "static_graph": _UNUSED,
    "delay_all_reduce_named_params": _MEMORY,
    "param_to_hook_all_reduce": _MEMORY,
    "mixed_precision": "write torch.autocast around the forward pass",
    "device_mesh": f"{_NOTHING}: the model trains on all instances of the job",
    "skip_all_reduce_unused_params": _UNUSED,
}
"""For each keyword argument of DistributedDataParallel, what to write instead."""

ATTRIBUTES: Final = {
    "require_backward_grad_sync": _ACCUMULATION,
    "join": _UNUSED,
    "reducer": _MEMORY,
    "register_comm_hook": f"{_MEMORY}; for bf16_compress_hook write ReplicatedModel(net, gradient_dtype=...)",
}
"""For each attribute of DistributedDataParallel that programs use, what to write instead."""

_SHARDED: Final = "give it the bare module, and have popdist.ShardedOptimizer share the optimizer's state"
_WRAPPERS: Final = {
    "DistributedDataParallel": "give it the module inside, ddp.module, or leave out DistributedDataParallel",
    "DataParallel": "give it the module inside, and let poprun start one instance for each GPU",
    "FullyShardedDataParallel": _SHARDED,
    "ReplicatedModel": "wrap the module once",
    "PhasedModel": "it trains with the replicas of the job itself",
}
"""For each class of modules that reduces gradients itself, what to do; by name, because most are not imported."""


def refuse_options(options: Mapping[str, object]) -> None:
    """Raise TypeError if torch's DDP has no such option, otherwise WeightsError; do nothing without options."""
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"ReplicatedModel.__init__() got an unexpected keyword argument {name!r}")
    for name in options:
        raise WeightsError(f"ReplicatedModel(..., {name}=...) is an option of torch's DDP: {_OPTIONS[name]}")


@cache
def refuse_wrappers(model_class: type[nn.Module]) -> None:
    """Refuse DistributedDataParallel around a model of ``model_class`` from now on."""

    def refuse(wrapper: nn.Module, _name: str, module: nn.Module | None) -> None:
        if isinstance(module, model_class) and isinstance(wrapper, nn.parallel.DistributedDataParallel):
            raise WeightsError(
                "DistributedDataParallel around a ReplicatedModel would reduce its gradients twice: leave it out"
            )

    register_module_module_registration_hook(refuse)


def refuse_module(module: nn.Module) -> None:
    """Raise WeightsError if the module reduces gradients itself, or a parameter has no shape yet."""
    for name, part in module.named_modules():
        for kind in type(part).__mro__:
            if kind.__name__ in _WRAPPERS:
                place = f"{name} in the module" if name else "the module"
                raise WeightsError(
                    f"{place} is a {kind.__name__} already, whose gradients would be reduced twice: "
                    f"{_WRAPPERS[kind.__name__]}"
                )
    named = chain(module.named_parameters(), module.named_buffers())
    if lazy := [name for name, value in named if is_lazy(value)]:
        raise WeightsError(
            f"{lazy[0]} has no shape yet, as those of lazy modules before their first batch: run one batch "
            "through the module, or make it with its sizes, and wrap it then"
        )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.numel() > 1 and not any(parameter.stride()):
            raise WeightsError(
                f"{name} was made by expand(): its elements share one number, so no optimizer can update them. "
                "Make it of a tensor.expand(...).clone()"
            )
        if is_distributed(parameter):
            _refuse_mesh(module, name, parameter)


def _refuse_mesh(module: nn.Module, name: str, parameter: Any) -> None:
    """Raise WeightsError if a parameter is on a mesh of several replicas or stages.

    Its gradients would be added twice over the replicas, or never. Only the instances of one stage of this
    instance's replica may share a parameter.
    """
    contract, instances = context.environment().contract, context.instances_of_replica()
    of_stage = contract.parallelism.stage_of(contract.instance_index)
    mesh = parameter.device_mesh
    ranks = mesh.mesh.flatten().tolist()
    if all(rank in of_stage for rank in ranks):
        return
    names = f"mesh {mesh.mesh_dim_names or tuple(mesh.mesh.shape)} of {name_instances(ranks)}"
    if all(rank in instances for rank in ranks):
        raise WeightsError(
            f"{name} is a DTensor on the {names}, and those that share the layers of this stage are "
            f"{name_instances(of_stage)}: place it on popdist.device_mesh()"
            '["tensor"], or start the job with --instances-per-replica in place of --parallelism, and make the '
            "whole mesh in the program"
        )
    own = f"a replica of this job has {len(instances)} instance{'s' * (len(instances) > 1)}"
    if any(map(is_fully_sharded, module.modules())):
        raise WeightsError(
            f"{name} is sharded by fully_shard over the {names}, and {own}: fully_shard adds the gradients of "
            "these replicas itself. Leave out ReplicatedModel, and train the module with popdist.data_loader and "
            "popdist.clip_grad_norm_; or shard within a replica: fully_shard(..., mesh=popdist.device_mesh()"
            '["tensor"])'
        )
    raise WeightsError(
        f"{name} is a DTensor on the {names}, and {own}: gradients are added over replicas. Start the job with "
        f"poprun --parallelism tensor={len(ranks)}, and place the parameters on "
        'popdist.device_mesh()["tensor"]'
    )
