"""The devices that instances compute on, other than the CPU: the only folder that knows one maker from another."""

from typing import Final

TYPES: Final = ("cuda", "xpu", "mps")
"""The types of the accelerators that torch itself knows; AMD's have the type of NVIDIA's."""

BACKENDS: Final = {"nccl": "cuda", "xccl": "xpu"}
"""Choices of ``init(backend=...)`` for tensors of accelerators alone, with the types of these."""
