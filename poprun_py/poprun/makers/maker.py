"""The makers of GPUs: the environment variables that select a program's GPUs, and the tools that list the GPUs.

CUDA: https://docs.nvidia.com/cuda/cuda-c-programming-guide (environment variables), and its MIG user guide. ROCm:
https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html. Level Zero: its core programming guide.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from popdist.ground.values import dataclass
from poprun.makers.listings import Listed, arrange_tiles, read_amd, read_intel, read_nvidia

Answers = Sequence[str]  # outputs of a maker's commands, in the order of the commands; empty if a command failed
Files = Mapping[str, str]  # contents of a maker's files, by path


def _as_listed(devices: Sequence[Listed], environment: Mapping[str, str]) -> Sequence[Listed]:
    del environment
    return devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """The facts about the GPUs of one maker, such as NVIDIA: environment variables, tools, parsers and names."""

    name: str
    device_type: str  # torch's name for the type of device
    mask: str  # the variable with which poprun gives a program its devices
    aliases: tuple[str, ...] = ()  # variables that the runtime reads if ``mask`` is not set
    outer_masks: tuple[str, ...] = ()  # variables that hide devices first; ``mask`` numbers the devices left
    order: tuple[str, str] | None = None  # the variable and value that number devices as ``read`` does
    hiding: tuple[str, str]  # the variable and value that hide all devices
    slice_mark: str = (
        ""  # part of every slice's name; empty for a maker without slices. A process sees only one slice
    )
    # groups of files or commands: poprun looks for devices if something of each group exists
    signs: tuple[tuple[str, ...], ...]
    access: str = ""  # the file that a user must be able to read and write
    commands: tuple[tuple[str, ...], ...] = ()  # list devices; without the first answer no device is known
    patterns: tuple[str, ...] = ()  # patterns of `glob` for the files to read
    read: Callable[[Answers, Files], tuple[Listed, ...]]
    arrange: Callable[[Sequence[Listed], Mapping[str, str]], Sequence[Listed]] = _as_listed
    watch: tuple[
        str, ...
    ] = ()  # the command, if there is one, that prints the use of the devices and of their memory every 5 s
    resource: str  # the name of a device in Kubernetes

    @property
    def source(self) -> str:
        """The command, or else the folder of files, from which poprun gets the list of the maker's GPUs."""
        return self.commands[0][0] if self.commands else self.patterns[0].partition("/*")[0]

    @property
    def masks(self) -> tuple[str, ...]:
        """All variables that hide GPUs from a program: the maker's main variable, aliases, and outer variables."""
        return (self.mask, *self.aliases, *self.outer_masks)

    def is_slice(self, name: str) -> bool:
        """Whether ``name`` is the name of a slice of a GPU, and not of a whole GPU."""
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
    device_type="cuda",  # torch for ROCm calls AMD's devices cuda
    mask="HIP_VISIBLE_DEVICES",
    aliases=("CUDA_VISIBLE_DEVICES",),
    outer_masks=("ROCR_VISIBLE_DEVICES",),
    hiding=("HIP_VISIBLE_DEVICES", "-1"),
    # a second group, because a laptop with an integrated GPU has the driver but no ROCm
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
"""All makers of GPUs by name, in the order in which poprun looks for GPUs."""

DEFAULT_MAKER: Final = NVIDIA.name
"""The maker that poprun assumes if nobody has looked for devices, such as on a node that a scheduler describes."""

PASSED_PREFIXES: Final = (
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_"),
    *("HIP_", "HSA_", "ROCM_", "MIOPEN_", "RCCL_", "ZE_", "SYCL_", "ONEAPI_", "CCL_"),
)
"""The beginnings of the names of environment variables that poprun passes to programs on other hosts.

Variables of `Maker.outer_masks` are not passed, because such a mask is right only on its own host.
"""

CACHES: Final = {"CUDA_CACHE_PATH": "cuda", "MIOPEN_USER_DB_PATH": "miopen"}
"""Environment variables for the folder of compiled kernels, each with its folder below poprun's cache folder."""

DETERMINISM: Final = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""An environment variable and its value, with which cuBLAS returns bitwise equal results in every run."""

TORCH_BUILDS: Final = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}
"""The attributes of ``torch.version`` that are set if torch was built for a runtime, and its name."""
