"""The check that each member of a group has its own accelerator, as backends such as NCCL require."""

import warnings
from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from popdist.errors import PopdistWarning
from popdist.ground.accelerators import accelerator

_NAME_BYTES: Final = 64
"""Number of bytes for the name of an accelerator's model."""


class Gathers(Protocol):
    """An object, such as a group's collectives, that can gather CPU tensors of all ranks of a group."""

    def all_gather(self, rows: Sequence[Tensor], mine: Tensor) -> object:
        """Write each rank's flat byte tensor ``mine`` into ``rows``, one tensor for each rank, in rank order."""


def are_distinct(
    collectives: Gathers, size: int, rank: int, device: torch.device | None, host: str, *, warns: bool = True
) -> bool:
    """Whether all ranks of a group have different accelerators. All ranks must call this function.

    The first member warns if members share an accelerator, or if accelerators are of several models.

    Args:
        collectives: The collectives of the group.
        size: The number of members.
        rank: The index of this member in the group.
        device: The accelerator of this member; None if this member has no accelerator.
        host: A name that no other host has.
        warns: Whether to warn if members share an accelerator. False if poprun planned this and has already
            warned.
    """
    identity = b"" if device is None else accelerator.identity_of(device, host)
    model = b"" if device is None else accelerator.name_of(device).encode()[:_NAME_BYTES]
    size_bytes = accelerator.IDENTITY_BYTES + _NAME_BYTES
    mine = torch.frombuffer(bytearray((identity + model).ljust(size_bytes, b"\0")), dtype=torch.uint8)
    rows = mine.new_empty(size, size_bytes)
    collectives.all_gather([*rows], mine)
    gathered = [row.numpy().tobytes() for row in rows]
    devices = [it[: accelerator.IDENTITY_BYTES] for it in gathered if any(it)]
    if rank == 0 and devices:
        _warn_of_kinds({it[accelerator.IDENTITY_BYTES :].rstrip(b"\0") for it in gathered if any(it)})
        if warns and len(set(devices)) < len(devices):
            _warn(
                f"several instances compute on one device, such as {device}: their tensors go over the memory of "
                "the host, with the same bits, and take longer"
            )
    return len(set(devices)) == size


def _warn_of_kinds(kinds: set[bytes]) -> None:
    if len(kinds) > 1:
        found = " and ".join(sorted(kind.decode(errors="replace") for kind in kinds))
        _warn(f"the instances compute on {found}: the same program has other bits on another kind of device")


def _warn(text: str) -> None:
    warnings.warn(text, PopdistWarning, stacklevel=3)
