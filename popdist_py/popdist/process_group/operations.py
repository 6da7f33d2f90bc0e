"""torch's collectives in terms of popdist's: for tensors of any strides, lists of tensors, and splits.

A group calls these functions in the order of its work queue. Arguments were checked before, so that a wrong one is
an error where the collective was called, and not a missing rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from popdist.host_memory.addition import Op
from popdist.host_memory.host_collectives import HostCollectives
from popdist.host_memory.offers import MayMove
from popdist.transport.several_hosts import SeveralHosts

Collectives = HostCollectives | SeveralHosts


def all_reduce(host: Collectives, tensors: Sequence[Tensor], op: Op, may_move: MayMove | None) -> None:
    """Each of ``tensors`` becomes its combination over the ranks, of the values that all of them have before."""
    combined = [tensor.clone() for tensor in tensors] if _share_memory(tensors) else tensors
    for tensor in combined:
        host.all_reduce(tensor, op, may_move)
    if combined is not tensors:
        for tensor, values in zip(tensors, combined, strict=True):
            tensor.copy_(values)


def broadcast(host: Collectives, tensors: Sequence[Tensor], root: int) -> None:
    """Each of ``tensors`` becomes the root's."""
    for tensor in tensors:
        flat = _flat(tensor)
        host.broadcast(flat, root)
        _give_back([tensor], [flat])


def reduce(host: Collectives, tensors: Sequence[Tensor], op: Op, root: int) -> None:
    """Each of the root's ``tensors`` becomes the combination of all."""
    for tensor in tensors:
        flat = _flat(tensor)
        host.reduce(flat, op, root)
        _give_back([tensor], [flat])


def all_gather(host: Collectives, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> None:
    """``outputs[i][rank]`` becomes the ``tensors[i]`` of ``rank``."""
    for row, tensor in zip(outputs, tensors, strict=True):
        places = [_place(tensor) for tensor in row]
        host.all_gather(places, _apart(_flat(tensor), places, places[host.rank]))
        _give_back(row, places)


def reduce_scatter(
    host: Collectives, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op: Op
) -> None:
    """``outputs[i]`` becomes the combination over the ranks of what stands in ``inputs[i]`` for this one."""
    for output, row in zip(outputs, inputs, strict=True):
        place = _place(output)
        host.reduce_scatter(place, [_apart(_flat(tensor), [place], place) for tensor in row], op)
        _give_back([output], [place])


def all_to_all(host: Collectives, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """``outputs[rank]`` becomes what stands in the ``inputs`` of ``rank`` for this one."""
    places = [_place(output) for output in outputs]
    host.all_to_all(places, [_apart(_flat(tensor), places) for tensor in inputs])
    _give_back(outputs, places)


def all_gather_single(host: Collectives, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Gather each of ``tensors`` into one output, one rank's part after the other."""
    for output, tensor in zip(outputs, tensors, strict=True):
        place = _place(output)
        parts = _parts(place, host)
        host.all_gather(parts, _apart(_flat(tensor), [place], parts[host.rank]))
        _give_back([output], [place])


def reduce_scatter_single(host: Collectives, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op) -> None:
    """:func:`reduce_scatter` of inputs that are one tensor each, one rank's part after the other."""
    for output, tensor in zip(outputs, inputs, strict=True):
        place = _place(output)
        parts = [_apart(part, [place], place) for part in _parts(_flat(tensor), host)]
        host.reduce_scatter(place, parts, op)
        _give_back([output], [place])


def all_to_all_single(
    host: Collectives, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
) -> None:
    """:func:`all_to_all` between tensors cut along their first dimension; no lengths mean equal ones."""
    place = _place(output)
    given = _apart(_flat(tensor), [place])
    host.all_to_all(_cut(place, output, received, host), _cut(given, tensor, sent, host))
    _give_back([output], [place])


def barrier(host: Collectives, timeout_seconds: float | None) -> None:
    """Wait for all ranks."""
    host.barrier(timeout_seconds)


def parts_like(output: Tensor, tensor: Tensor) -> list[Tensor]:
    """What all ranks brought to an output of parts like ``tensor``, in the order of the ranks."""
    size = output.numel() // tensor.numel() if tensor.numel() else 1
    return list(output.reshape(size, *tensor.shape).unbind())


def _parts(flat: Tensor, host: Collectives) -> Sequence[Tensor]:
    return flat.view(host.size, len(flat) // host.size).unbind()


def _cut(flat: Tensor, tensor: Tensor, lengths: Sequence[int], host: Collectives) -> Sequence[Tensor]:
    if not lengths:
        return _parts(flat, host)
    width = tensor[:1].numel()
    return list(flat.split([length * width for length in lengths]))


def _flat(tensor: Tensor) -> Tensor:
    """The values as one contiguous run, in memory of the tensor's where it is one already."""
    return _run(tensor.contiguous())


def _place(tensor: Tensor) -> Tensor:
    """Memory for the values of ``tensor`` as one contiguous run: its own where that is contiguous."""
    return _run(tensor) if tensor.is_contiguous() else torch.empty(tensor.numel(), dtype=tensor.dtype)


def _run(tensor: Tensor) -> Tensor:
    """A contiguous tensor as one dimension; a view of one number might have any stride, and then no bytes."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _give_back(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for tensor, place in zip(tensors, places, strict=True):
        if not tensor.is_contiguous():
            tensor.copy_(place.view(tensor.shape))


def _apart(tensor: Tensor, outputs: Sequence[Tensor], allowed: Tensor | None = None) -> Tensor:
    """The values of ``tensor``, in other memory than what is written into.

    Args:
        tensor: What is sent.
        outputs: What is written into.
        allowed: The place that a value may share with its result: each is read before it is written.
    """
    if allowed is not None and (tensor.data_ptr(), tensor.nbytes) == (allowed.data_ptr(), allowed.nbytes):
        return tensor
    return tensor.clone() if any(_share_memory([tensor, output]) for output in outputs) else tensor


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}
    return len(tensors) > 1 and len(storages) < sum(tensor.numel() > 0 for tensor in tensors)
