"""Device errors, such as CUDA out of memory, that a program printed: recognition and advice. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_SIZE: Final = r"([\d.]+ (?:[KMGT]i)?B)"
_NO_MEMORY: Final = re.compile(
    rf"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate {_SIZE}"
    rf"(?:\. (GPU \d+) has a total capacity of {_SIZE})?(?: of which {_SIZE})?"
)
AT_FAULT: Final = re.compile(
    r"(?:CUDA|HIP) error: (device-side assert triggered|an illegal (?:memory access|instruction) was encountered"
    r"|misaligned address|unspecified launch failure|hardware stack error|invalid program counter"
    r"|operation not supported on global/shared address space|the launch timed out and was terminated)"
)
"""A pattern for the error messages of a GPU's runtime after a kernel has failed on the GPU.

The texts are the messages of the errors 700 to 719 of the CUDA runtime (cudaError_t in the CUDA runtime's manual).
"""

SAID_OF_ALL: Final = re.compile(
    r"Search for `(?:cuda|hip)Error|(?:CUDA|HIP) kernel errors might be asynchronously"
    r"|For debugging consider passing |Device-side assertions? |Compile with `?TORCH_USE_"
)
"""A pattern for lines that torch adds to every error of a device, and that do not describe the error."""

_ASSERTION: Final = re.compile(r".*\bassertion .*failed", re.IGNORECASE)
_NO_ROOM: Final = re.compile(r"shared memory segment /dev/shm/nccl\S+.*No space left on device")

_LESS_MEMORY: Final = (
    "smaller micro batches with accumulation, popdist.parallel.recompute, or popdist.ShardedOptimizer"
)
_BLOCKING: Final = (
    "the kernel was started by an earlier line than the traceback's: CUDA_LAUNCH_BLOCKING=1 (on AMD "
    "AMD_SERIALIZE_KERNEL=3) makes the traceback right"
)
_LARGER: Final = "enlarge /dev/shm: start the container with --shm-size 8g, or mount -o remount,size=8g /dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFailure:
    """The reason why a program failed on its GPU, and advice for the user."""

    said: str  # the reason, in the words of the runtime's message
    advice: str  # what the user can do


def find_device_failure(lines: Sequence[str]) -> DeviceFailure | None:
    """Return why a program failed on its GPU, from the last ``lines`` of its output; None if unknown."""
    text = " ".join(lines)
    if memory := _NO_MEMORY.search(text):
        size, device, total, free = memory.groups()
        of = f", of {total} there" if total else ""
        left = f" {free} are free" if free else ""
        reason = f"out of memory on {device or 'its device'}: it asked for {size}{of}{left}"
        return DeviceFailure(said=reason, advice=_LESS_MEMORY)
    if fault := AT_FAULT.search(text):
        assertion = find_assertion(lines)
        return DeviceFailure(said=assertion or f"{fault[1]} on its device", advice=_BLOCKING)
    if _NO_ROOM.search(text):
        return DeviceFailure(said="NCCL has found no room in /dev/shm", advice=_LARGER)
    return None


def find_assertion(lines: Sequence[str]) -> str:
    """Return the last of ``lines`` in which a GPU kernel reports a failed assertion; "" if there is none."""
    return next((line.strip() for line in reversed(lines) if _ASSERTION.match(line)), "")
