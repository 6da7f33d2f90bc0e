"""The weights of all instances: a broadcast that makes weights equal, and checksums that compare weights."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn

from popdist.errors import CollectiveError, WeightsError
from popdist.exchange.groups import Group
from popdist.ground.local_tensors import local_part, part_itself
from popdist.job.collectives import gather_bytes
from popdist.job.context import data_parallel_group

Weights: TypeAlias = nn.Module | Mapping[str, object]
"""A module, or a state dict: tensors by name, and perhaps other values, which are ignored here."""

_DIGEST_BYTES = 16


def broadcast_weights(weights: Weights, root: int = 0) -> None:
    """Copy the weights (parameters, and all buffers) of instance ``root`` to all instances, in place.

    One message is sent for each dtype and device. Then all instances compare checksums.

    Args:
        weights: A module, or a state dict, of the same names, shapes and dtypes on every instance.
        root: Job-wide number of the instance whose weights all instances get. If several instances share a
            replica, the number of a replica: each instance gets its own part of that replica, and of DTensors its
            own shard.

    Raises:
        WeightsError: If names, shapes, dtypes or types of devices differ between instances (then no weight has
            changed), or the checksums differ afterwards; the message names the instances that differ from
            ``root``.
        CollectiveError: If the instances make other calls, or there is no instance ``root``.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or did not come in time.
    """
    group = data_parallel_group()
    text = f"broadcast_weights(root={root})"
    if fault := _fault(weights):
        with suppress(CollectiveError):
            group.agree(f"{text}, refused")
        raise WeightsError(f"{text}: {fault}")
    tensors = dict(_named_tensors(weights))
    if root not in group.instances:
        known = group.name(group.instances)
        raise WeightsError(f"{text}: there is no such {group.backend.names.noun}, only {known}")
    with group.undivided(text):
        _broadcast(group, root, text, tensors)


def _broadcast(group: Group, root: int, text: str, tensors: Mapping[str, Tensor]) -> None:
    if different := _different(group, root, f"{text}, names, shapes and dtypes", _digest(tensors, _place)):
        raise WeightsError(
            f"{text}: names, shapes, dtypes or devices of {group.name(different)} differ from those of "
            f"{group.name([root])}: {_first_difference(group, root, different[0], tensors)}; every instance must "
            "make the same model, on the same type of device"
        )
    if len(group.instances) > 1:
        broadcast_tensors(group, root, [tensor.detach() for tensor in tensors.values()])
    if different := _different(group, root, f"{text}, checksums", _digest(tensors, _describe, _bytes)):
        raise WeightsError(
            f"{text}: the weights of {group.name(different)} differ from those of {group.name([root])} although "
            "they were just sent: nothing may change them while they are broadcast"
        )


def broadcast_tensors(group: Group, root: int, tensors: Iterable[Tensor]) -> None:
    """Overwrite ``tensors`` with the tensors of instance ``root``; one message for each dtype and device."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for same_kind in kinds.values():
        _broadcast_together(group, root, same_kind)


def checksum(weights: Weights) -> str:
    """Return a digest of all parameters and buffers, as 32 hexadecimal digits.

    Equal digests mean equal names, shapes, dtypes and bits. Devices, strides, order and training mode do not
    change the digest, and a tied parameter counts once, under its first name. Of a DTensor only the local part
    counts. The digest is equal on every machine and in every version.
    """
    if fault := _fault(weights):
        raise WeightsError(f"checksum: {fault}")
    return _digest(dict(_named_tensors(weights)), _describe, _bytes).hex()


def is_in_memory(weight: Tensor) -> bool:
    """Whether ``weight`` has its elements in memory; a phased model keeps unused layers in a file or elsewhere."""
    part = part_itself(weight)
    absent = getattr(part, "_popdist_absent", None)  # set by popdist.phases.phased_layers.make_absent
    return absent is None or absent.data_ptr() != part.data_ptr()


def _fault(weights: object) -> str | None:
    """Return why ``weights`` cannot be used as weights; None if ``weights`` can be used."""
    if isinstance(weights, nn.Module):
        absent = [name for name, it in weights.named_parameters() if not is_in_memory(it)]
        return f"{absent[0]} is not in memory: give the state_dict() of the phased model" if absent else None
    if isinstance(weights, Mapping):
        return None
    return f"expected a module or a state dict, not a {type(weights).__name__}"


def _named_tensors(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in ``weights`` once, with the first of its names; of a DTensor, yield the local part."""
    if isinstance(weights, nn.Module):
        named: list[tuple[str, object]] = [*weights.named_parameters(), *weights.named_buffers()]
    else:
        named = list(weights.items())
    seen: set[int] = set()
    for name, value in named:
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield name, local_part(value)


def _digest(tensors: Mapping[str, Tensor], *parts: Callable[[str, Tensor], bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(tensors):
        for part in parts:
            digest.update(part(name, tensors[name]))
    return digest.digest()


def _describe(name: str, tensor: Tensor) -> bytes:
    return f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode()


def _place(name: str, tensor: Tensor) -> bytes:
    """Return name, dtype, shape and device type of a tensor as bytes; instances compare these bytes."""
    return _describe(name, tensor).replace(b"\n", f" on {tensor.device.type}\n".encode())


def _bytes(_name: str, tensor: Tensor) -> bytes:
    return bytes_of(tensor)


def bytes_of(tensor: Tensor) -> bytes:
    """Return the elements of ``tensor`` in order, as bytes."""
    flat = _flat_bytes(tensor.detach())
    # numpy gets a copy, because torch cannot resize a storage that numpy has seen, and observers resize their
    # buffers
    return (flat.clone() if flat.is_cpu else flat.cpu()).numpy().tobytes()


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _broadcast_together(group: Group, root: int, tensors: list[Tensor]) -> None:
    """Overwrite ``tensors``, all of one dtype and device, with the root's tensors, in one message."""
    message = torch.cat([_flat_bytes(tensor) for tensor in tensors])
    group.backend.broadcast(message, root)
    values = message.view(tensors[0].dtype).split([tensor.numel() for tensor in tensors])
    for tensor, value in zip(tensors, values, strict=True):
        _overwrite(tensor, value.view(tensor.shape))


def _overwrite(tensor: Tensor, value: Tensor) -> None:
    """Copy ``value`` into ``tensor``; write only once to elements that ``expand()`` repeats."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    tensor.copy_(value)


def _different(group: Group, root: int, text: str, digest: bytes) -> list[int]:
    """Return the instances whose digest differs from the root's digest; every instance returns the same list."""
    words = [int.from_bytes(digest[start : start + 8], "little", signed=True) for start in (0, 8)]
    received = dict(zip(group.instances, group.start(text, words).wait(), strict=True))
    return [instance for instance, found in received.items() if found != received[root]]


def _first_difference(group: Group, root: int, other: int, tensors: Mapping[str, Tensor]) -> str:
    """Return a text about the first weight whose name, dtype or shape on the instance ``other`` differs from the
    instance ``root``. All instances call this function.
    """
    description = b"".join(_place(name, tensors[name]) for name in sorted(tensors))
    everybody = zip(group.instances, gather_bytes(group, "describe the weights", description), strict=True)
    lines = {instance: data.decode().splitlines() for instance, data in everybody}
    pairs = zip_longest(lines[other], lines[root], fillvalue="nothing more")
    theirs, roots = next((theirs, roots) for theirs, roots in pairs if theirs != roots)
    return f"{group.name([other])} has {theirs}, {group.name([root])} has {roots}"


_WORD_BYTES: Final = 8
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""The integer dtype for reading the last elements, which fill no word of 8 bytes; the key is bytes per element."""


@torch.no_grad()
def sums_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return a checksum of each tensor: the sum of its memory, read as integers; wait for each device once."""
    totals = [_sum_of(tensor) for tensor in tensors]
    devices: dict[torch.device, list[int]] = {}
    for i, total in enumerate(totals):
        devices.setdefault(total.device, []).append(i)
    sums = [0] * len(totals)
    for members in devices.values():
        for i, value in zip(members, torch.stack([totals[i] for i in members]).tolist(), strict=True):
            sums[i] = value
    return sums


def _sum_of(tensor: Tensor) -> Tensor:
    dense = local_part(tensor) if tensor.layout == torch.strided else tensor.to_dense()
    flat = dense.detach().contiguous().view(-1)
    if (
        flat.stride() != (1,)
        or flat.data_ptr() % _WORD_BYTES
        or flat.storage_offset() * flat.itemsize % _WORD_BYTES
    ):
        flat = flat.clone(memory_format=torch.contiguous_format)
    num_whole = flat.nbytes // _WORD_BYTES * _WORD_BYTES // flat.itemsize
    total = flat[:num_whole].view(torch.int64).sum()
    if num_whole < len(flat):
        total += flat[num_whole:].view(_INTEGERS[flat.itemsize]).sum()
    return total
