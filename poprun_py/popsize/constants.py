"""Measured constants of the predictions, such as the share of its peak speed that a device reaches."""

from dataclasses import dataclass
from typing import Final

from popsize.hardware import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Measured constants of the predictions, each with its physical cause; see `docs/sizing.md`."""

    matmul_efficiency: float = 0.768  # share of the peak that large matrix products reach
    # Share of the memory's bandwidth that elementwise kernels, softmax, loss and optimizer reach.
    memory_efficiency: float = 0.92
    link_efficiency: float = 0.95  # share of a link's bandwidth that collectives inside a host reach
    # Latency of a collective of two devices, without its bytes: the start, and the wait for the later device.
    collective_seconds: float = 101e-6
    launch_seconds: float = 30e-6  # a CPU's time to launch one kernel from Python
    ramp_seconds: float = 6.05e-6  # a device's idle time at the beginning and end of a kernel
    skew_kernels: float = 2.13  # launches that the all-reduces of a tensor group add to a layer
    # Further launches of a layer if the masked softmax cannot be fused, because micro batch times heads of a
    # device is no multiple of 4.
    unfused_kernels: float = 47.7
    # Factor by which the logits are slower if no tensor group divides and pads the vocabulary.
    whole_logits_slowdown: float = 1.68
    # Share of the last stage's time for logits that is added when a pipeline fills and drains.
    drained_logits: float = 0.176
    # Time of a micro batch outside the layers: its data, the embedding, the bookkeeping of the loss.
    outside_seconds: float = 1.65e-3
    context_bytes: float = 1.5 * GIB  # what the driver, libraries and communication buffers take of a GPU's memory


CONSTANTS: Final = Constants()
