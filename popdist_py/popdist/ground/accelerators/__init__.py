"""The accelerators that instances can compute on; only this folder names the accelerators of single makers."""

from typing import Final

TYPES: Final = ("cuda", "xpu", "mps")
"""torch's device types of accelerators; AMD's GPUs have the type ``cuda``, as NVIDIA's GPUs."""

BACKENDS: Final = {"nccl": "cuda", "xccl": "xpu"}
"""The choices of ``init(backend=...)`` that refuse CPU tensors, with the device type of each choice."""
