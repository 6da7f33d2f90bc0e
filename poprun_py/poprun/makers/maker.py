"""The makers of devices: the variables that say which devices a program sees, and what tells which there are.

CUDA: https://docs.nvidia.com/cuda/cuda-c-programming-guide (environment variables), and its MIG user guide.
ROCm: https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html. Level Zero: its core programming guide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from poprun.makers.listings import Listed, arrange_tiles, read_amd, read_intel, read_nvidia

Answers = Sequence[str]  # what the commands of a maker print, in their order; empty for one that failed
Files = Mapping[str, str]  # the texts of a maker's files, by path


def _as_listed(devices: Sequence[Listed], environment: Mapping[str, str]) -> Sequence[Listed]:
    del environment
    return devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """What poprun knows of the devices of one maker."""

    name: str
    device_type: str  # torch's name of the type of its devices
    mask: str  # the variable with which poprun gives a program its devices
    aliases: tuple[str, ...] = ()  # variables that its runtime reads where ``mask`` is not set
    outer_masks: tuple[
        str, ...
    ] = ()  # variables that hide devices first; the names in ``mask`` count what they leave
    order: tuple[str, str] | None = None  # the variable and value that number devices as ``read`` does
    hiding: tuple[str, str]  # the variable and value that hide all devices
    slice_mark: str = (
        ""  # what the name of a slice has; a process sees one slice. Empty for a maker without slices
    )
    # files or commands: the devices are looked for where each group has one that is there
    signs: tuple[tuple[str, ...], ...]
    access: str = ""  # the file that a user must be able to read and write
    commands: tuple[tuple[str, ...], ...] = ()  # what to run; without the first one's answer nothing is known
    patterns: tuple[str, ...] = ()  # the files to read, as patterns of `glob`
    read: Callable[[Answers, Files], tuple[Listed, ...]]
    arrange: Callable[[Sequence[Listed], Mapping[str, str]], Sequence[Listed]] = _as_listed
    watch: tuple[
        str, ...
    ] = ()  # the command that prints every 5 s how busy and full the devices are, if there is one
    resource: str  # what Kubernetes calls a device

    @property
    def source(self) -> str:
        """What tells of the devices: the name of a command, or a folder."""
        return self.commands[0][0] if self.commands else self.patterns[0].partition("/*")[0]

    @property
    def masks(self) -> tuple[str, ...]:
        """All variables that hide devices, those that are read first at the end."""
        return (self.mask, *self.aliases, *self.outer_masks)

    def is_slice(self, name: str) -> bool:
        """Whether the device ``name`` is a slice."""
        return bool(self.slice_mark) and self.slice_mark in name


_NVIDIA_SMI: Final = ("nvidia-smi", "--format=csv,noheader")

NVIDIA: Final = Maker(
    name="NVIDIA",
    device_type="cuda",
    mask="CUDA_VISIBLE_DEVICES",
    order=("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    hiding=("CUDA_VISIBLE_DEVICES", ""),
    slice_mark="MIG-",
    signs=(("/proc/driver/nvidia", "/dev/nvidiactl", "nvidia-smi"),),
    commands=(
        (*_NVIDIA_SMI, "--query-gpu=index,uuid,pci.bus_id,name,memory.total"),
        (*_NVIDIA_SMI, "--query-compute-apps=gpu_uuid,pid"),
        ("nvidia-smi", "-L"),
    ),
    read=read_nvidia,
    watch=(
        *("nvidia-smi", "--query-gpu=index,uuid,utilization.gpu,memory.used"),
        *("--format=csv,noheader,nounits", "--loop=5"),
    ),
    resource="nvidia.com/gpu",
)

AMD: Final = Maker(
    name="AMD",
    device_type="cuda",  # torch for ROCm calls them so
    mask="HIP_VISIBLE_DEVICES",
    aliases=("CUDA_VISIBLE_DEVICES",),
    outer_masks=("ROCR_VISIBLE_DEVICES",),
    hiding=("HIP_VISIBLE_DEVICES", "-1"),
    # a laptop with an integrated GPU has the driver, and no ROCm
    signs=(("/dev/kfd",), ("rocm-smi", "amd-smi", "/opt/rocm")),
    access="/dev/kfd",
    patterns=(
        "/sys/class/kfd/kfd/topology/nodes/*/gpu_id",
        "/sys/class/kfd/kfd/topology/nodes/*/properties",
        "/sys/class/kfd/kfd/topology/nodes/*/mem_banks/*/properties",
        "/sys/class/kfd/kfd/proc/*/vram_*",
        "/sys/class/drm/renderD*/device/product_name",
    ),
    read=read_amd,
    resource="amd.com/gpu",
)

INTEL: Final = Maker(
    name="Intel",
    device_type="xpu",
    mask="ZE_AFFINITY_MASK",
    order=("ZE_ENABLE_PCI_ID_DEVICE_ORDER", "1"),
    hiding=("ONEAPI_DEVICE_SELECTOR", "*:cpu"),  # an empty mask hides nothing
    slice_mark=".",
    signs=(("xpu-smi",),),
    commands=(("xpu-smi", "discovery", "--dump", "1,2,11,16"), ("xpu-smi", "ps")),
    # each tile of a card has a graphics engine, which the drivers xe and i915 show at different places
    patterns=("/sys/bus/pci/devices/*/tile*/gt0/uevent", "/sys/bus/pci/devices/*/drm/card*/gt/gt*/id"),
    read=read_intel,
    arrange=arrange_tiles,
    resource="gpu.intel.com/i915",
)

MAKERS: Final = {maker.name: maker for maker in (NVIDIA, AMD, INTEL)}
"""By name, in the order in which their devices are looked for."""

DEFAULT_MAKER: Final = NVIDIA.name
"""Whose devices they are taken to be where nobody has looked, such as on a node that a scheduler describes."""

PASSED_PREFIXES: Final = (
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_"),
    *("HIP_", "HSA_", "ROCM_", "MIOPEN_", "RCCL_", "ZE_", "SYCL_", "ONEAPI_", "CCL_"),
)
"""How the variables begin that go to programs on other hosts. The outer masks hold for their own host only."""

CACHES: Final = {"CUDA_CACHE_PATH": "cuda", "MIOPEN_USER_DB_PATH": "miopen"}
"""Variables that say where compiled kernels are kept, and the folder of each in the directory for all of them."""

DETERMINISM: Final = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""cuBLAS gives the same bits again with workspaces of a fixed size only."""

TORCH_BUILDS: Final = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}
"""The attributes of ``torch.version`` that say for which runtime a torch was built, and what people call each."""
