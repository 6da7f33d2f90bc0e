"""What programs reach of the figures in data sheets: the planner's constants, each with its physical cause."""

from dataclasses import dataclass
from typing import Final

from popsize.hardware import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The constants; `docs/sizing.md` says how they were found.

    Attributes:
        matmul_efficiency: Share of the peak that large matrix products reach.
        memory_efficiency: Share of the memory's bandwidth that elementwise kernels, softmax, loss and optimizer
            reach.
        link_efficiency: Share of a link's bandwidth that collectives inside a host reach.
        collective_seconds: What a collective of two devices waits for, beside its bytes: its start, and the
            later one.
        launch_seconds: A CPU's time to launch one kernel from Python.
        ramp_seconds: A device's idle time at the beginning and end of a kernel.
        skew_kernels: Launches that the all-reduces of a tensor group add to a layer.
        unfused_kernels: Launches that a layer has more where the masked softmax cannot be fused: where micro batch
            times heads of a device is no multiple of 4.
        whole_logits_slowdown: How much longer the logits take where no tensor group divides and pads the words.
        drained_logits: Share of the last stage's logits that filling and draining a pipeline waits for.
        outside_seconds: A micro batch outside the layers: its data, the embedding, the bookkeeping of the loss.
        context_bytes: What the driver, libraries and communication buffers take of a GPU's memory.
    """

    matmul_efficiency: float = 0.768
    memory_efficiency: float = 0.92
    link_efficiency: float = 0.95
    collective_seconds: float = 101e-6
    launch_seconds: float = 30e-6
    ramp_seconds: float = 6.05e-6
    skew_kernels: float = 2.13
    unfused_kernels: float = 47.7
    whole_logits_slowdown: float = 1.68
    drained_logits: float = 0.176
    outside_seconds: float = 1.65e-3
    context_bytes: float = 1.5 * GIB


CONSTANTS: Final = Constants()
