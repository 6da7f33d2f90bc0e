"""Horovod's names for PyTorch over popdist's collectives: what programs for PopTorch join their metrics with.

Ranks are the instances of the job. Names and meaning: https://horovod.readthedocs.io/en/stable/api.html. Results
have no gradient. ``DistributedOptimizer`` is refused: gradients are reduced by ``poptorch.trainingModel`` or
``popdist.ReplicatedModel``.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from popdist.errors import CollectiveError, ContractError, OptimizerError
from popdist.job import collectives, context

__all__ = [
    "Average",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "grouped_allreduce",
    "grouped_allreduce_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]


class AllreduceOp(IntEnum):
    """The operations of ``allreduce``; the numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    MIN = 3
    MAX = 4


Average: Final = AllreduceOp.AVERAGE
Sum: Final = AllreduceOp.SUM
Min: Final = AllreduceOp.MIN
Max: Final = AllreduceOp.MAX

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def __getattr__(name: str) -> object:
    raise AttributeError(
        f"horovod.torch has no {name!r} here: Horovod is not installed, and poptorch stands for what programs for "
        "PopTorch use of it; popdist's own collectives are all_reduce, all_gather, gather, broadcast and barrier"
    )


def init(comm: object = None) -> None:
    """Connect the instances of the job as ``popdist.init()`` does; all instances call it.

    Raises:
        CollectiveError: If ``comm`` names some processes of the job.
        ContractError: If several instances share a replica: ranks would average gradients of different parts.
        ContractError, BackendError: As ``popdist.init()``.
    """
    if comm is not None:
        raise CollectiveError("horovod.torch.init(comm=...): the ranks are the job's instances; leave comm out")
    if context.num_instances() > context.num_replicas():
        raise ContractError(
            f"horovod.torch averages over all ranks, and {context.num_instances()} instances share "
            f"{context.num_replicas()} replicas in this job: start it without --parallelism and "
            "--instances-per-replica, or train with popdist.ReplicatedModel"
        )
    context.ensure_init()


def shutdown() -> None:
    """Do nothing: popdist leaves the job at the end of the program."""


is_initialized = context.is_initialized
size = context.num_instances
rank = context.instance_index
local_rank = context.local_instance_index
barrier = collectives.barrier


def local_size() -> int:
    """Instances of the job on this host."""
    return context.environment().contract.num_local_instances


def cross_size() -> int:
    """Hosts of the job."""
    return size() // local_size()


def cross_rank() -> int:
    """This host among those of the job, from 0."""
    return context.environment().contract.host_index


def is_homogeneous() -> bool:
    """Whether all hosts have as many instances: always so."""
    return True


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AllreduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """The mean, sum, least or largest of the tensors of all instances, as a new tensor.

    Args:
        tensor: Of the same shape and dtype on every instance; as of ``popdist.all_reduce``.
        average: True for the mean, False for the sum; give this or ``op``.
        name: Plays no part: calls belong together by their order, and that is checked.
        op: ``Average``, ``Sum``, ``Min`` or ``Max``; the mean when neither is given. A mean of integers is rounded
            down.
        prescale_factor: Multiplies the tensor before.
        postscale_factor: Multiplies the result.

    Raises:
        ValueError: If both ``average`` and ``op`` are given, or ``op`` is none of these.
        CollectiveError, NotInitializedError, BackendError: As ``popdist.all_reduce``.
    """
    return allreduce_(_values_of(tensor).clone(), average, name, op, prescale_factor, postscale_factor)


def allreduce_(
    tensor: AnyTensor,
    average: bool | None = None,
    name: str | None = None,
    op: AllreduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AnyTensor:
    """As :func:`allreduce`, in place."""
    del name
    chosen = _reduction_of(average, op)
    values = _values_of(tensor)
    is_whole = chosen is Average and not values.is_floating_point()
    if prescale_factor != 1.0:
        values.mul_(prescale_factor)
    collectives.all_reduce(values, "sum" if is_whole else _OPS[chosen])
    if is_whole:
        values.floor_divide_(len(context.current_group().instances))
    if postscale_factor != 1.0:
        values.mul_(postscale_factor)
    return tensor


_OPS: Final[Mapping[AllreduceOp, collectives.ReduceOp]] = {Average: "mean", Sum: "sum", Min: "min", Max: "max"}


def _values_of(tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise CollectiveError(f"horovod.torch: expected a tensor, and found a {type(tensor).__name__}")
    return tensor.detach()


def _reduction_of(average: object, op: object) -> AllreduceOp:
    if average is not None and op is not None:
        raise ValueError("allreduce(average=..., op=...): give one of them, op=horovod.torch.Average or op=Sum")
    if op is None:
        return Average if average or average is None else Sum
    if not isinstance(op, int) or op not in list(AllreduceOp):
        raise ValueError(f"allreduce(op={op!r}): choose Average, Sum, Min or Max of horovod.torch")
    return AllreduceOp(op)


def grouped_allreduce(tensors: Sequence[Tensor], *arguments: Any, **settings: Any) -> list[Tensor]:
    """:func:`allreduce` of each tensor."""
    return [allreduce(tensor, *arguments, **settings) for tensor in tensors]


def grouped_allreduce_(tensors: Sequence[Tensor], *arguments: Any, **settings: Any) -> list[Tensor]:
    """:func:`allreduce_` of each tensor."""
    return [allreduce_(tensor, *arguments, **settings) for tensor in tensors]


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """The tensors of all instances, joined along dim 0, which may have another length on each.

    Raises:
        CollectiveError, NotInitializedError, BackendError: As ``popdist.gather``.
    """
    del name
    return collectives.gather(tensor)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """The tensor of instance ``root_rank``, as a new one, of the shape and dtype that all bring.

    Raises:
        CollectiveError, NotInitializedError, BackendError: As ``popdist.broadcast``.
    """
    return broadcast_(_values_of(tensor).clone(), root_rank, name)


def broadcast_(tensor: AnyTensor, root_rank: int, name: str | None = None) -> AnyTensor:
    """As :func:`broadcast`, in place."""
    del name
    collectives.broadcast(_values_of(tensor), root_rank)
    return tensor


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int = 0) -> None:
    """Overwrite tensors by those of instance ``root_rank``: those of a state dict, or of ``named_parameters()``.

    Entries that are no tensors stay as they are.

    Raises:
        ValueError: If it is neither.
        CollectiveError: If the instances have tensors of other names, shapes or dtypes.
        NotInitializedError, BackendError: As ``popdist.broadcast``.
    """
    try:
        named: dict[Any, Any] = dict(params)
    except (TypeError, ValueError):
        named = {None: params}
    if not all(isinstance(name, str) for name in named):
        raise ValueError(
            f"broadcast_parameters({type(params).__name__}): expected a state_dict() or named_parameters()"
        )
    for name in sorted(named):
        if isinstance(named[name], Tensor):
            context.current_group().agree(f"broadcast_parameters() of {name}")
            collectives.broadcast(named[name], root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Give ``optimizer`` the state and the settings of that of instance ``root_rank``.

    Raises:
        CollectiveError, NotInitializedError, BackendError: As :func:`broadcast_object`.
    """
    optimizer.load_state_dict(broadcast_object(optimizer.state_dict(), root_rank))


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The object of instance ``root_rank``, on every instance; on that one it is ``obj`` itself.

    Args:
        obj: None, numbers, texts, tensors, and lists, tuples, sets and dicts of them: what ``torch.load`` reads
            with ``weights_only=True``, so that no code comes over the network. It matters only on the root.
        root_rank: Whose.
        name: Plays no part.

    Raises:
        CollectiveError: If it is something else (every instance raises it), there is no instance ``root_rank``, or
            the instances do other things.
        NotInitializedError, BackendError: As ``popdist.broadcast``.
    """
    del name
    is_root = context.instance_index() == root_rank
    data, fault = _encode(obj) if is_root else (b"", "")
    told = collectives.broadcast_object([len(data), fault], root_rank)
    if told[1]:
        raise CollectiveError(
            f"broadcast_object(root_rank={root_rank}): instance {root_rank} brought a {told[1]}; send numbers, "
            "texts, tensors, and lists, tuples, sets and dicts of them"
        )
    received = collectives.send_bytes(context.current_group(), data, told[0], root_rank)
    return obj if is_root else torch.load(io.BytesIO(received), weights_only=True)


def _encode(obj: object) -> tuple[bytes, str]:
    """The object in torch's format, or a text that says why it cannot be read as data only."""
    file = io.BytesIO()
    try:
        torch.save(obj, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:  # noqa: BLE001 - whatever pickling of a foreign object raises
        return b"", f"{type(obj).__name__} ({type(error).__name__})"
    return file.getvalue(), ""


def DistributedOptimizer(optimizer: object, *_arguments: object, **_settings: object) -> Any:
    """Raise OptimizerError, which says what to write instead."""
    raise OptimizerError(
        f"horovod.torch.DistributedOptimizer({type(optimizer).__name__}): Horovod is not installed, and popdist "
        "reduces gradients of a model, not of an optimizer: train with poptorch.trainingModel, or wrap the model "
        "with popdist.ReplicatedModel, and step with the optimizer as it is"
    )
