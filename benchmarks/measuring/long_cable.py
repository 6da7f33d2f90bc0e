"""A switch that holds every packet back for some time, as a long cable does; for kernels without such a queue.

    python benchmarks/measuring/long_cable.py 0.001 port1 port2

It runs in the network namespace of the ports, as root, until it is killed. A packet that comes in at one port goes
out at the port where its receiver was heard, or at all others. Packets keep the offloads of the kernel, so one of
64 KiB is one packet.
"""

import select
import socket
import struct
import sys
import time
from collections import deque

SOL_PACKET = 263
IGNORE_OUTGOING, VNET_HEADER = 23, 15
"""Options of a packet socket (linux/if_packet.h): only what comes in, and with its offloads in front."""

HEADER_BYTES = 10
LARGEST_BYTES = 1 << 17
EVERY_PROTOCOL = 3


def open_port(name: str) -> socket.socket:
    """All packets of an interface."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL))
    for option in (IGNORE_OUTGOING, VNET_HEADER):
        port.setsockopt(SOL_PACKET, option, struct.pack("i", 1))
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        port.setsockopt(socket.SOL_SOCKET, option, 1 << 26)
    port.bind((name, 0))
    return port


def forward(ports: list[socket.socket], delay_seconds: float) -> None:
    """Hand on what comes, in its order, when it is due."""
    heard: dict[bytes, socket.socket] = {}
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        rest = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        ready, _, _ = select.select(ports, [], [], rest)
        due = time.monotonic() + delay_seconds
        for port in ready:
            packet = port.recv(LARGEST_BYTES)
            heard[packet[HEADER_BYTES + 6 : HEADER_BYTES + 12]] = port
            waiting.append((due, port, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, port, packet = waiting.popleft()
            receiver = heard.get(packet[HEADER_BYTES : HEADER_BYTES + 6])
            for other in [receiver] if receiver is not None else [it for it in ports if it is not port]:
                try:
                    other.send(packet)
                except OSError:  # a full queue loses packets, as a cable does
                    continue


if __name__ == "__main__":
    forward([open_port(name) for name in sys.argv[2:]], float(sys.argv[1]))
