"""``python firewall.py INTERFACE``: from now on this host lets in new connections of IPv4 to port 22 only.

It is a program of the kernel's (bpf(2), XDP) that drops other SYN packets, and lasts as long as this process.
"""

import ctypes
import os
import platform
import socket
import struct
import sys
import time

_CALL = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _LINK_CREATE = 5, 28
_TYPE_XDP, _ATTACH_XDP, _SKB_MODE = 6, 37, 2
_ROOM_BYTES = 128
_PASS = 16

# Each is operation, registers (source, destination), offset and number, of the instruction set in RFC 9669.
_PROGRAM = (
    (0x61, 0x12, 0, 0),  # r2 = the frame's begin
    (0x61, 0x13, 4, 0),  # r3 = its end
    (0xBF, 0x24, 0, 0),  # r4 = r2
    (0x07, 0x04, 0, 54),  # r4 += headers of Ethernet, IPv4 and TCP
    (0x2D, 0x34, _PASS - 5, 0),  # shorter: pass
    (0x69, 0x25, 12, 0),
    (0x55, 0x05, _PASS - 7, socket.htons(0x0800)),  # not IPv4: pass
    (0x71, 0x25, 23, 0),
    (0x55, 0x05, _PASS - 9, socket.IPPROTO_TCP),  # not TCP: pass
    (0x71, 0x25, 47, 0),
    (0x57, 0x05, 0, 0x12),  # the flags SYN and ACK
    (0x55, 0x05, _PASS - 12, 0x02),  # not SYN alone: pass
    (0x69, 0x25, 36, 0),
    (0x15, 0x05, _PASS - 14, socket.htons(22)),  # to ssh: pass
    (0xB7, 0x00, 0, 1),  # XDP_DROP
    (0x95, 0x00, 0, 0),
    (0xB7, 0x00, 0, 2),  # XDP_PASS
    (0x95, 0x00, 0, 0),
)


def _bpf(command: int, attributes: bytes) -> int:
    room = ctypes.create_string_buffer(attributes, _ROOM_BYTES)
    library = ctypes.CDLL(None, use_errno=True)
    result = int(library.syscall(_CALL[platform.machine()], command, room, _ROOM_BYTES))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def main() -> None:
    """Say ``closed`` once it holds, then wait."""
    text = b"".join(struct.pack("<BBhi", *instruction) for instruction in _PROGRAM)
    code, licence = ctypes.create_string_buffer(text), ctypes.create_string_buffer(b"GPL")
    places = ctypes.addressof(code), ctypes.addressof(licence)
    program = _bpf(_PROG_LOAD, struct.pack("<IIQQ", _TYPE_XDP, len(_PROGRAM), *places))
    interface = socket.if_nametoindex(sys.argv[1])
    _bpf(_LINK_CREATE, struct.pack("<IIII", program, interface, _ATTACH_XDP, _SKB_MODE))
    print("closed", flush=True)  # noqa: T201 - whoever has started it waits for this
    time.sleep(3600)


if __name__ == "__main__":
    main()
