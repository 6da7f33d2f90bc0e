"""Making the weights of all instances equal, and proving that they are."""

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from popdist.context import current_group
from popdist.errors import CollectiveError, WeightsError, name_instances
from popdist.groups import MAX_NUMBERS, Group

Weights: TypeAlias = nn.Module | Mapping[str, object]
"""A module, or a state dict: names with tensors, and perhaps other values, which play no part here."""

_DIGEST_BYTES = 16


def broadcast_weights(weights: Weights, root: int = 0) -> None:
    """Give all instances the weights of instance ``root``, in place: parameters and buffers, non-persistent too.

    One message for each dtype and device. Then all instances compare checksums.

    Args:
        weights: A module, or a state dict, of the same names, shapes and dtypes on every instance.
        root: Job-wide number of the instance whose weights all get.

    Raises:
        WeightsError: If names, shapes or dtypes differ between instances (then no weight has changed), or the
            checksums do afterwards; the message names the instances that differ from ``root``.
        CollectiveError: If the instances do other things, or there is no instance ``root``.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or did not come in time.
    """
    group = current_group()
    text = f"broadcast_weights(root={root})"
    if fault := _fault(weights):
        with suppress(CollectiveError):
            group.agree(f"{text}, refused")
        raise WeightsError(f"{text}: {fault}")
    tensors = dict(_named_tensors(weights))
    if root not in group.instances:
        raise WeightsError(f"{text}: there is no such instance, only {name_instances(group.instances)}")
    if different := _different(group, root, f"{text}, names, shapes and dtypes", _digest(tensors, _describe)):
        raise WeightsError(
            f"{text}: names, shapes or dtypes of {name_instances(different)} differ from those of instance "
            f"{root}: {_first_difference(group, root, different[0], tensors)}; every instance must make the same "
            "model"
        )
    if len(group.instances) > 1:
        broadcast_tensors(group, root, [tensor.detach() for tensor in tensors.values()])
    if different := _different(group, root, f"{text}, checksums", _digest(tensors, _describe, _bytes)):
        raise WeightsError(
            f"{text}: the weights of {name_instances(different)} differ from those of instance {root} although "
            "they were just sent: nothing may change them while they are broadcast"
        )


def broadcast_tensors(group: Group, root: int, tensors: Iterable[Tensor]) -> None:
    """Overwrite ``tensors``, alike on all instances, with those of instance ``root``: a message for each kind."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for same_kind in kinds.values():
        _broadcast_together(group, root, same_kind)


def gather_bytes(group: Group, text: str, data: bytes) -> list[bytes]:
    """Every instance's ``data``, which may differ in length; all instances call this, with the same ``text``."""
    lengths = [length for (length,) in group.start(text, [len(data)]).wait()]
    sent = torch.zeros(max(lengths), dtype=torch.uint8)
    if data:
        sent[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = zip(group.backend.all_gather(sent), lengths, strict=True)
    return [row[:length].numpy().tobytes() for row, length in rows]


def checksum(weights: Weights) -> str:
    """A digest of all parameters and buffers: 32 hexadecimal digits.

    Equal digests mean equal names, shapes, dtypes and bits. Devices, strides, order and training mode play no
    part, and a tied parameter counts once, under its first name. The same on every machine and in every version.

    Raises:
        WeightsError: If ``weights`` is neither a module nor a state dict.
    """
    if fault := _fault(weights):
        raise WeightsError(f"checksum: {fault}")
    return _digest(dict(_named_tensors(weights)), _describe, _bytes).hex()


def _fault(weights: object) -> str | None:
    """Why these are no weights, or None."""
    if isinstance(weights, nn.Module | Mapping):
        return None
    return f"expected a module or a state dict, not a {type(weights).__name__}"


def _named_tensors(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Each tensor once, under the first of its names."""
    if isinstance(weights, nn.Module):
        named: list[tuple[str, object]] = [*weights.named_parameters(), *weights.named_buffers()]
    else:
        named = list(weights.items())
    seen: set[int] = set()
    for name, value in named:
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield name, value


def _digest(tensors: Mapping[str, Tensor], *parts: Callable[[str, Tensor], bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(tensors):
        for part in parts:
            digest.update(part(name, tensors[name]))
    return digest.digest()


def _describe(name: str, tensor: Tensor) -> bytes:
    return f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode()


def _bytes(_name: str, tensor: Tensor) -> bytes:
    return bytes_of(tensor)


def bytes_of(tensor: Tensor) -> bytes:
    """The elements of ``tensor`` in order, as bytes."""
    flat = _flat_bytes(tensor.detach())
    # numpy gets a copy: torch no longer resizes a storage that numpy has seen, and observers resize their buffers
    return (flat.clone() if flat.is_cpu else flat.cpu()).numpy().tobytes()


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _broadcast_together(group: Group, root: int, tensors: list[Tensor]) -> None:
    """Overwrite tensors of one dtype and device with the root's, in one message."""
    message = torch.cat([_flat_bytes(tensor) for tensor in tensors])
    group.backend.broadcast(message, root)
    values = message.view(tensors[0].dtype).split([tensor.numel() for tensor in tensors])
    for tensor, value in zip(tensors, values, strict=True):
        _overwrite(tensor, value.view(tensor.shape))


def _overwrite(tensor: Tensor, value: Tensor) -> None:
    """Copy ``value`` into ``tensor``; of elements that ``expand()`` has made one, one is written."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    tensor.copy_(value)


def _different(group: Group, root: int, text: str, digest: bytes) -> list[int]:
    """The instances whose digest is not the root's; the same list on every instance."""
    words = [int.from_bytes(digest[start : start + 8], "little", signed=True) for start in (0, 8)]
    received = dict(zip(group.instances, group.start(text, words).wait(), strict=True))
    return [instance for instance, found in received.items() if found != received[root]]


def _first_difference(group: Group, root: int, other: int, tensors: Mapping[str, Tensor]) -> str:
    """Where ``other`` departs from the root, in words; every instance asks for it."""
    own = b"".join(_describe(name, tensors[name]) for name in sorted(tensors))
    everybody = zip(group.instances, gather_bytes(group, "describe the weights", own), strict=True)
    lines = {instance: data.decode().splitlines() for instance, data in everybody}
    pairs = zip_longest(lines[other], lines[root], fillvalue="nothing more")
    theirs, roots = next((theirs, roots) for theirs, roots in pairs if theirs != roots)
    return f"instance {other} has {theirs}, instance {root} has {roots}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSums:
    """A checksum of each parameter of a module, or of its gradient, as it was at one moment.

    Attributes:
        names: Of the parameters.
        parameters: They, or their gradients.
        sums: For each, the sum of its memory, read as 64-bit integers, modulo 2**64.
    """

    names: Sequence[str]
    parameters: Sequence[Tensor]
    sums: Sequence[int]

    @property
    def word(self) -> int:
        """A 64-bit checksum of them all, which is never 0."""
        return _word(self.sums) or 1

    def first_change(self) -> int | None:
        """The position of the first parameter that is no longer what it was; None when all are."""
        pairs = zip(self.sums, sums_of(self.parameters), strict=True)
        return next((i for i, (before, now) in enumerate(pairs) if before != now), None)


def sum_parameters(module: nn.Module) -> ParameterSums:
    """The checksums of the parameters of ``module`` that instances must have alike.

    Left out are those that may differ: tensors of a class of their own, such as a DTensor, of which each instance
    has a part; and those without numbers to add: lazy, sparse, or on the device "meta".
    """
    return sum_tensors((name, it) for name, it in module.named_parameters() if is_comparable(it))


def sum_tensors(named: Iterable[tuple[str, Tensor]]) -> ParameterSums:
    """The checksums of tensors, each after its name."""
    pairs = list(named)
    tensors = [tensor for _, tensor in pairs]
    return ParameterSums(names=[name for name, _ in pairs], parameters=tensors, sums=sums_of(tensors))


def compare_weights(
    group: Group, words: Sequence[int], own: ParameterSums | None, timeout_seconds: float | None = None
) -> None:
    """Check that the weights of all instances are equal; as :func:`find_difference`.

    Raises:
        WeightsError: If they differ; it names the parameter and the instances.
        CollectiveError, BackendError: If the instances do other things, or one was lost.
    """
    difference = find_difference(group, "weights", words, own, timeout_seconds)
    if difference is not None:
        raise WeightsError(
            f"the weights of the instances are no longer equal: {difference}. It may have begun some steps ago. "
            "The usual reasons: one instance left out a step, as for a NaN that it alone has seen; a learning "
            "rate follows a loss of one instance, in place of its mean over all; load_state_dict() on one "
            "instance only; a layer that was made after ReplicatedModel, with another seed on each instance. "
            "popdist.broadcast_weights(model) makes them equal"
        )


def find_difference(
    group: Group, noun: str, words: Sequence[int], own: ParameterSums | None, timeout_seconds: float | None = None
) -> str | None:
    """The first tensor that differs between instances, and on which; every instance calls this.

    Args:
        group: All instances of the job.
        noun: What the tensors are.
        words: What each has said of its tensors, 0 for nothing: then it has no say.
        own: This instance's, of which it has said ``word``; None if it has said 0.
        timeout_seconds: How long to wait for each answer.

    Returns:
        In words; None where all are equal, which needs no answer.

    Raises:
        CollectiveError, BackendError: If the instances do other things, or one was lost.
    """
    if not any(words) or len(set(words) - {0}) <= 1:
        return None
    sums = own.sums if own is not None else ()
    told = group.start(f"the {noun} differ, count them", [len(sums)]).wait(timeout_seconds)
    counts = {i: count for i, (count,) in zip(group.instances, told, strict=True) if count}
    if len(set(counts.values())) > 1:
        return ", ".join(f"{count} {noun} on instance {instance}" for instance, count in counts.items())
    span = range(max(counts.values()))
    while True:
        step = -(-len(span) // MAX_NUMBERS)
        parts = [span[start : start + step] for start in range(0, len(span), step)]
        asked = [_word(sums[part.start : part.stop]) for part in parts] if sums else []
        text = f"the {noun} differ, look at {span.start} to {span.stop}"
        told = group.start(text, asked).wait(timeout_seconds)
        answers = {i: numbers for i, numbers in zip(group.instances, told, strict=True) if numbers}
        place = next(k for k, answer in enumerate(zip(*answers.values(), strict=True)) if len(set(answer)) > 1)
        span = parts[place]
        if len(span) == 1:
            name = own.names[span.start] if own is not None else f"number {span.start}"
            first = min(answers)
            others = [i for i, answer in answers.items() if answer[place] != answers[first][place]]
            return f"{name} of {name_instances(others)} is not that of instance {first}"


def is_comparable(parameter: Tensor) -> bool:
    """Whether instances must have ``parameter`` alike; see :func:`sum_parameters`."""
    if is_lazy(parameter) or parameter.layout != torch.strided or parameter.device.type == "meta":
        return False
    return type(parameter.data) is Tensor


_WORD_BYTES: Final = 8
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By the bytes of an element: what the last elements are read as, which fill no word."""


@torch.no_grad()
def sums_of(tensors: Iterable[Tensor]) -> list[int]:
    """The sum of each tensor's memory; those on one device are waited for once."""
    found = [_sum_of(tensor) for tensor in tensors]
    devices: dict[torch.device, list[int]] = {}
    for i, total in enumerate(found):
        devices.setdefault(total.device, []).append(i)
    sums = [0] * len(found)
    for members in devices.values():
        for i, value in zip(members, torch.stack([found[i] for i in members]).tolist(), strict=True):
            sums[i] = value
    return sums


def _sum_of(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    flat = dense.detach().contiguous().view(-1)
    if flat.data_ptr() % _WORD_BYTES or flat.storage_offset() * flat.itemsize % _WORD_BYTES:
        flat = flat.clone()
    num_whole = flat.nbytes // _WORD_BYTES * _WORD_BYTES // flat.itemsize
    total = flat[:num_whole].view(torch.int64).sum()
    if num_whole < len(flat):
        total += flat[num_whole:].view(_INTEGERS[flat.itemsize]).sum()
    return total


def _word(sums: Sequence[int]) -> int:
    """A signed 64-bit digest of 64-bit sums; of one, the sum itself."""
    if len(sums) == 1:
        return sums[0]
    digest = hashlib.blake2b(struct.pack(f"={len(sums)}q", *sums), digest_size=_WORD_BYTES).digest()
    return int.from_bytes(digest, "little", signed=True)
