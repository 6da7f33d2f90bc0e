"""The standard streams of an agent, and those of a program whose poprun is on another host.

Standard library only: the agents run this in a bare interpreter.
"""

import os

from poprun.messages.link import connect

NUM_STREAMS = 3


def connect_streams(address: str, key: str, index: int, timeout_seconds: float) -> list[int]:
    """The descriptors of a program whose poprun is on another host: sockets, and to read only for instance 0.

    Args:
        address: Where poprun's control socket is.
        key: The key of the job.
        index: Global index of the instance.
        timeout_seconds: How long connecting may take.

    Raises:
        OSError: If nobody is there.
        ProtocolError: If who is there is not the poprun of this job.
    """
    streams = [] if index == 0 else [os.open(os.devnull, os.O_RDONLY)]
    for number in range(len(streams), NUM_STREAMS):
        link = connect(address, key, timeout_seconds)
        link.send({"event": "stream", "instance": index, "stream": number})
        streams.append(link.connection.detach())
    return streams


def detach_streams() -> None:
    """Let go of the MPI runtime's pipes, on whose closing it may wait."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(NUM_STREAMS):
        os.dup2(null, descriptor)
    os.close(null)
