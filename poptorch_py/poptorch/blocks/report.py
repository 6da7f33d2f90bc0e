"""What a model needs of each virtual IPU's memory, as one value that prints as a table."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from typing import Final

import torch
from torch import nn

from poptorch.blocks.first_forward import FirstForward
from poptorch.blocks.placing import ipus_of_parameters

IPU_MEMORY_BYTES: Final = 900_000_000
"""In-Processor-Memory of an IPU of the second generation (Graphcore, GC200 product brief)."""

_WIDTH: Final = 100
_HEADINGS: Final = ("IPU", "parameters", "activations", "optimizer", "together", "of its memory", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class IpuMemory:
    """What one virtual IPU of a replica holds."""

    ipu: int  # its number in the replica
    parameter_bytes: int  # weights
    activation_bytes: int  # what backward needs of one micro batch; 0 in inference
    optimizer_bytes: int  # the state of the optimizer
    memory_bytes: int  # what it has

    @property
    def total_bytes(self) -> int:
        """All of it together."""
        return self.parameter_bytes + self.activation_bytes + self.optimizer_bytes

    @property
    def is_exceeded(self) -> bool:
        """Whether it has not so much memory."""
        return self.total_bytes > self.memory_bytes


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The memory that a model needs on each virtual IPU of a replica, in order."""

    ipus: tuple[IpuMemory, ...]

    @property
    def exceeded(self) -> tuple[int, ...]:
        """The virtual IPUs whose memory is too small."""
        return tuple(one.ipu for one in self.ipus if one.is_exceeded)

    def __str__(self) -> str:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for heading in _HEADINGS:
            table.add_column(heading, justify="right")
        for one in self.ipus:
            sizes = (one.parameter_bytes, one.activation_bytes, one.optimizer_bytes, one.total_bytes)
            share = f"{one.total_bytes / one.memory_bytes:.1%} of {_size(one.memory_bytes)}"
            table.add_row(str(one.ipu), *map(_size, sizes), share, "too much" if one.is_exceeded else "")
        lines = StringIO()
        Console(file=lines, width=_WIDTH, color_system=None).print(table)
        return "\n".join(line.rstrip() for line in lines.getvalue().splitlines() if line.strip())


def memory_of(device: torch.device) -> int:
    """Bytes that a virtual IPU has on ``device``: those of an accelerator, else of an IPU."""
    if device.type == "cpu":
        return IPU_MEMORY_BYTES
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def report_of(
    module: nn.Module, seen: FirstForward, *, optimizer_bytes: Mapping[str, int], memory_bytes: int
) -> ModelReport:
    """The report of a model."""
    ipu_of = ipus_of_parameters(module, seen)
    parameters, activations, states = Counter[int](), Counter[int](), Counter[int]()
    for name, parameter in module.named_parameters():
        parameters[ipu_of[name]] += parameter.nbytes
    for block, size in seen.saved_bytes.items():
        activations[seen.ipus[block]] += size
    for name, size in optimizer_bytes.items():
        states[ipu_of.get(name, 0)] += size
    return ModelReport(
        tuple(
            IpuMemory(
                ipu=ipu,
                parameter_bytes=parameters[ipu],
                activation_bytes=activations[ipu],
                optimizer_bytes=states[ipu],
                memory_bytes=memory_bytes,
            )
            for ipu in range(max([0, *ipu_of.values(), *activations]) + 1)
        )
    )


def _size(num_bytes: int) -> str:
    """A size for a person: 1.5 MB of 1,500,000 bytes."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{num_bytes} B"
        value /= 1000
    return f"{value:,.1f} TB"
