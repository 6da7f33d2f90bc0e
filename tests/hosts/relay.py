"""A switch that holds each frame for a while: python relay.py DEVICE SECONDS PID...

Each process PID is in a network namespace, which gets a device that ends here. Frames of up to 64 KiB
pass whole: the header before each (struct virtio_net_hdr, linux/virtio_net.h) says what is left to do with its
checksum and segments, and the receiver is told it as the sender told it. A line on the standard output says that
all devices are there; the end of the standard input ends the switch, and with it the devices.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple

CLONE_NEWNET = 0x40000000
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
OFFLOADS = 0b1111
"""Checksums, and segments of TCP over IPv4 and IPv6, also with ECN (linux/if_tun.h)."""

HEADER_BYTES = 10
ADDRESS_BYTES = 6
FRAME_BYTES = HEADER_BYTES + (1 << 16) + 64


class HeldFrame(NamedTuple):
    """A frame on its way.

    Attributes:
        due: When it leaves, on the monotonic clock.
        source: The device that it came from.
        buffer: Its memory, which is used again.
        num_bytes: Of it, with its header.
    """

    due: float
    source: int
    buffer: bytearray
    num_bytes: int


def open_device(name: str, pid: int) -> int:
    """Make the device in the namespace of a process; where its frames are read and written."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the network of process {pid}")
    os.close(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(device, TUNSETOFFLOAD, OFFLOADS)
    return device


class Switch:
    """Frames between devices, in the order in which they came.

    Args:
        devices: As opened.
        seconds: How long each frame is held.
    """

    def __init__(self, devices: list[int], seconds: float) -> None:
        self._devices = devices
        self._seconds = seconds
        self._held: deque[HeldFrame] = deque()
        self._free: list[bytearray] = []
        self._device_of: dict[bytes, int] = {}

    def run(self, end: int) -> None:
        """Pass frames on until ``end`` can be read."""
        while True:
            wait = max(self._held[0].due - time.monotonic(), 0.0) if self._held else None
            ready, _, _ = select.select([end, *self._devices], [], [], wait)
            if end in ready:
                return
            for device in ready:
                self._take(device)
            while self._held and self._held[0].due <= time.monotonic():
                self._pass_on(self._held.popleft())

    def _take(self, device: int) -> None:
        buffer = self._free.pop() if self._free else bytearray(FRAME_BYTES)
        num_bytes = os.readv(device, [buffer])
        self._held.append(HeldFrame(time.monotonic() + self._seconds, device, buffer, num_bytes))

    def _pass_on(self, frame: HeldFrame) -> None:
        target, source, _ = struct.unpack_from(f"{ADDRESS_BYTES}s{ADDRESS_BYTES}sH", frame.buffer, HEADER_BYTES)
        self._device_of[source] = frame.source
        known = self._device_of.get(target)
        others = {*self._devices} if known is None else {known}
        for device in others - {frame.source}:
            with suppress(OSError):  # one that is down, as at the beginning, loses its frames
                os.write(device, memoryview(frame.buffer)[: frame.num_bytes])
        self._free.append(frame.buffer)


def main(name: str, seconds: str, *pids: str) -> None:
    """Make the devices and pass frames on; before all else that runs here, because a cable needs no core."""
    devices = [open_device(name, int(pid)) for pid in pids]
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)  # noqa: T201 - whoever has started it waits for this
    Switch(devices, float(seconds)).run(sys.stdin.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
