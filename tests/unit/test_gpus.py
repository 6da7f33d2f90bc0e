"""Devices of every maker: what their tools print, what masks leave, and what is said where something is wrong.

Holds poprun.makers.listings, poprun.makers.maker, poprun.makers.masks and poprun.hosts.probe.gpus.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from poprun.hosts.probe.gpus import PCI, FoundDevices, find_devices, gpus_of
from poprun.makers.listings import Listed, read_amd, read_intel, read_nvidia
from poprun.makers.maker import AMD, INTEL, MAKERS, NVIDIA
from poprun.makers.masks import visible_devices
from poprun.plan.topology import Gpu

INVENTORY = "0, GPU-aaaa-1\n1, GPU-aabb-2\n2, GPU-cccc-3\n"

TREE = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 2g.10gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2d9e4b1e-30a5-9d5d-0000-aa7c7a6bd9a2)
"""

SLICED = """\
0, GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77, 00000000:07:00.0, NVIDIA A100-SXM4-40GB, 40960 MiB
1, GPU-2d9e4b1e-30a5-9d5d-0000-aa7c7a6bd9a2, 00000000:0F:00.0, NVIDIA A100-SXM4-40GB, 40960 MiB
"""

CARDS = """\
Device ID,Device Name,PCI BDF Address,Memory Physical Size
0,"Intel(R) Data Center GPU Max 1550","0000:4b:00.0","131072.00 MiB"
1,"Intel(R) Data Center GPU Max 1550","0000:71:00.0","131072.00 MiB"
"""

PROCESSES = """\
PID       Command             DeviceID       SHR            MEM
12961     xpu-smi             0              0              1966
4127      python              1              0              83886
"""

TILES = {
    f"/sys/bus/pci/devices/0000:{bus}:00.0/tile{tile}/gt0/uevent": "" for bus in ("4b", "71") for tile in (0, 1)
}


def read_gpus(inventory: str, processes: str, visible: str | None, pci: str = PCI) -> tuple[Gpu, ...]:
    """The devices that two answers of nvidia-smi, and a mask, leave."""
    mask = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return gpus_of(visible_devices(NVIDIA, read_nvidia((inventory, processes, ""), {}), mask).devices, pci)


def names(devices: tuple[Listed, ...]) -> list[str]:
    """What masks call them."""
    return [it.name for it in devices]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("2,0", ["2", "0"]),
        ("1", ["1"]),
        (" 0 , 1 ", ["0", "1"]),
        ("0,7,1", ["0"]),
        ("-1", []),
        ("GPU-cccc-3,GPU-aaa", ["GPU-cccc-3", "GPU-aaa"]),
        ("GPU-aa", []),
        ("MIG-1234", ["MIG-1234"]),
        ("NoDevFiles", []),
    ],
)
def test_the_users_devices_are_the_inventory(visible: str | None, names: list[str]) -> None:
    """CUDA_VISIBLE_DEVICES names what there is, in its order, up to the first entry that is no device."""
    assert [gpu.name for gpu in read_gpus(INVENTORY, "", visible)] == names


def test_a_device_with_a_process_is_busy() -> None:
    """Whatever the device is called."""
    processes = "GPU-aabb-2\nGPU-aabb-2\n"

    assert [gpu.is_free for gpu in read_gpus(INVENTORY, processes, None)] == [True, False, True]
    assert [gpu.is_free for gpu in read_gpus(INVENTORY, processes, "GPU-aab,2")] == [False, True]


def test_a_caller_s_device_is_free() -> None:
    """A notebook that has used a GPU may start jobs there; any other process keeps them away."""
    processes = f"GPU-aabb-2, {os.getppid()}\nGPU-cccc-3, {os.getpid()}\n"

    assert [gpu.is_free for gpu in read_gpus(INVENTORY, processes, None)] == [True, True, False]


def test_a_driver_that_says_nothing_has_no_devices() -> None:
    """Neither an empty answer nor an error message is a device."""
    assert read_gpus("", "", None) == ()
    assert read_gpus("No devices were found\n", "", "0") == ()


def test_gpus_tell_their_node_and_kind(tmp_path: Path) -> None:
    """By their address on the PCI bus, which the driver writes longer than the kernel; -1 is none."""
    for address, node in [("0000:3b:00.0", "1"), ("0000:86:00.0", "-1")]:
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(f"{node}\n")
    inventory = (
        "0, GPU-a, 00000000:3B:00.0, NVIDIA H200, 143771 MiB\n1, GPU-b, 00000000:86:00.0\n"
        "2, GPU-c, 00000000:AF:00.0\n3, GPU-d\n"
    )

    first, second, *_ = read_gpus(inventory, "", None, str(tmp_path))
    assert (first.model, first.memory_bytes >> 20) == ("NVIDIA H200", 143771)
    assert (second.model, second.memory_bytes) == ("", 0)
    assert [gpu.node for gpu in read_gpus(inventory, "", None, str(tmp_path))] == [1, None, None, None]
    assert [gpu.node for gpu in read_gpus(inventory, "", "GPU-a", str(tmp_path))] == [1]


def test_each_slice_is_a_device() -> None:
    """It has its own name and memory; a mask names it by the beginning of its UUID, or all slices by their GPU."""
    listed = read_nvidia((SLICED, "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb, 7\n", TREE), {})
    first, second = (it.uuid for it in listed[:2])

    assert names(listed) == [first, second, "1"]
    assert (listed[0].model, listed[0].memory_bytes >> 30) == ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20)
    assert [it.pids for it in listed] == [(), (7,), ()]
    assert names(visible_devices(NVIDIA, listed, {"CUDA_VISIBLE_DEVICES": "1,0"}).devices) == ["1", first, second]
    assert names(visible_devices(NVIDIA, listed, {"CUDA_VISIBLE_DEVICES": "MIG-cba"}).devices) == ["MIG-cba"]
    assert visible_devices(NVIDIA, listed, {"CUDA_VISIBLE_DEVICES": "MIG-ffff"}).devices == ()


@pytest.mark.parametrize(
    ("mask", "found", "problem"),
    [
        (
            "0,7,1",
            ["0"],
            "names 7, which is not among the devices here (0, 1, 2), and what follows it is not read",
        ),
        ("7", [], "names 7, which is not among the devices here (0, 1, 2): correct it"),
        ("0,GPU-aaaa", [], "names a device twice, and then a program sees none"),
        ("0,-1", ["0"], ""),
        ("", [], ""),
    ],
)
def test_a_mask_that_is_wrong_is_named(mask: str, found: list[str], problem: str) -> None:
    """As CUDA reads it; what hides devices on purpose is no mistake."""
    seen = visible_devices(NVIDIA, read_nvidia((INVENTORY, "", ""), {}), {"CUDA_VISIBLE_DEVICES": mask})

    assert names(seen.devices) == found
    assert [problem in it for it in seen.problems] == ([True] if problem else [])


def test_a_mask_of_another_maker_is_named() -> None:
    """Unless the maker's own is set, too, as a scheduler sets all."""
    listed = read_nvidia((INVENTORY, "", ""), {})
    (said,) = visible_devices(NVIDIA, listed, {"ROCR_VISIBLE_DEVICES": "1"}).problems

    assert said == (
        "ROCR_VISIBLE_DEVICES=1 is set, and the devices here are NVIDIA's, which do not read it: set "
        "CUDA_VISIBLE_DEVICES"
    )
    both = visible_devices(NVIDIA, listed, {"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"})
    assert (names(both.devices), both.problems) == (["2"], ())


def kfd(folder: Path, count: int) -> None:
    """Write what the kernel shows of a processor and ``count`` GPUs of AMD, the first of which process 99 uses."""
    nodes, drm = folder / "sys/class/kfd/kfd/topology/nodes", folder / "sys/class/drm"
    files = {nodes / "0/gpu_id": "0\n", nodes / "0/properties": "cpu_cores_count 96\nsimd_count 0\n"}
    for number in range(1, count + 1):
        files |= {
            nodes / f"{number}/gpu_id": f"{40000 + number}\n",
            nodes / f"{number}/properties": (
                "cpu_cores_count 0\nsimd_count 1216\ngfx_target_version 90402\nvendor_id 4098\n"
                f"location_id {256 * (number + 10)}\ndomain 0\ndrm_render_minor {127 + number}\n"
                f"unique_id {5752170827923136638 + number}\n"
            ),
            nodes / f"{number}/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 206141652992\nflags 0\n",
            drm / f"renderD{127 + number}/device/product_name": "AMD Instinct MI300X\n",
            folder / f"sys/bus/pci/devices/0000:{number + 10:02x}:00.0/numa_node": f"{number % 2}\n",
        }
    files[folder / "sys/class/kfd/kfd/proc/99/vram_40001"] = "8000000\n"
    files[folder / "sys/class/kfd/kfd/proc/98/vram_40002"] = "0\n"
    files[folder / "dev/kfd"] = ""
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


Tools = Callable[..., dict[str, str]]


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    """Make stand-ins for tools, each a shell script by its name; returns the environment that finds them."""

    def make(**scripts: str) -> dict[str, str]:
        for name, script in scripts.items():
            path = tmp_path / "bin" / name.replace("_", "-")
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}

    return make


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], FoundDevices]:
    """Find the devices of the machine that the test has written."""

    def call(environment: Mapping[str, str]) -> FoundDevices:
        monkeypatch.setenv("PATH", environment["PATH"])
        return find_devices(environment, str(tmp_path))

    return call


Find = Callable[[Mapping[str, str]], FoundDevices]


def test_gpus_of_amd_are_read_from_the_kernel(tmp_path: Path, tools: Tools, find: Find) -> None:
    """In the order of ROCm, with memory, kind, node and processes."""
    kfd(tmp_path, 3)
    found = find(tools(rocm_smi=""))

    assert (found.maker, found.source, found.problems) == ("AMD", "/sys/class/kfd/kfd/topology/nodes", ())
    assert [(gpu.name, gpu.node, gpu.is_free) for gpu in found.gpus] == [
        *(("0", 1, False), ("1", 0, True), ("2", 1, True)),
    ]
    first = found.gpus[0]
    assert (first.uuid, first.model) == ("GPU-4fd3d0e445b9207f", "AMD Instinct MI300X")
    assert (first.memory_bytes, first.occupants[0].pid) == (206141652992, 99)


@pytest.mark.parametrize(
    ("masks", "found", "uuids"),
    [
        ({"ROCR_VISIBLE_DEVICES": "3,1"}, ["0", "1"], [4, 2]),
        ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, ["1"], [2]),
        ({"ROCR_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "2"}, ["0"], [3]),  # as Slurm sets all of them
        ({"ROCR_VISIBLE_DEVICES": "GPU-4fd3d0e445b92081"}, ["0"], [3]),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, ["2", "3"], [3, 4]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["1"], [2]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, [], []),
    ],
)
def test_masks_of_amd_stack(
    tmp_path: Path, tools: Tools, find: Find, masks: dict[str, str], found: list[str], uuids: list[int]
) -> None:
    """What ROCR leaves is what HIP numbers; CUDA's variable is another name of HIP's."""
    kfd(tmp_path, 4)
    seen = find({**tools(rocm_smi=""), **masks})

    assert [gpu.name for gpu in seen.gpus] == found
    assert [int(gpu.uuid[-2:], 16) - 0x7E for gpu in seen.gpus] == uuids
    assert seen.problems == ()


def test_two_names_of_one_mask_that_differ_are_named(tmp_path: Path, tools: Tools, find: Find) -> None:
    """HIP's counts."""
    kfd(tmp_path, 2)
    seen = find({**tools(rocm_smi=""), "HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"})

    assert [gpu.name for gpu in seen.gpus] == ["0"]
    assert seen.problems == (
        "HIP_VISIBLE_DEVICES=0 counts, and CUDA_VISIBLE_DEVICES=1 is not read: unset one of them",
    )


def test_a_laptop_with_a_gpu_of_amd_has_no_devices(tmp_path: Path, find: Find) -> None:
    """Where ROCm is not installed, nothing can compute there."""
    kfd(tmp_path, 1)

    assert find({"PATH": "/nowhere"}) == FoundDevices()


def test_a_user_who_may_not_open_the_gpus(
    tmp_path: Path, tools: Tools, find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would see all and could use none; root, who runs tests, may open everything."""
    kfd(tmp_path, 1)
    monkeypatch.setattr(os, "access", lambda path, _: not str(path).endswith("dev/kfd"))
    found = find(tools(rocm_smi=""))
    (said,) = found.problems

    assert found.gpus == ()
    assert said.startswith("/dev/kfd, through which programs reach the AMD GPUs, cannot be opened: join the group")


def test_a_container_without_its_devices(tmp_path: Path, tools: Tools, find: Find) -> None:
    """The kernel lists only GPUs that the control group may open."""
    kfd(tmp_path, 0)
    (said,) = find(tools(rocm_smi="")).problems

    assert "shows no AMD GPU that this process may open: give the container its devices" in said


@pytest.mark.parametrize(
    ("variables", "found", "sizes"),
    [
        ({}, ["0", "1", "2", "3"], [64] * 4),
        ({"ZE_AFFINITY_MASK": "1,3"}, ["1", "3"], [64] * 2),
        ({"ZE_AFFINITY_MASK": "0.1,1.0"}, ["1", "2"], [64] * 2),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, ["0.0", "0.1", "1.0", "1.1"], [64] * 4),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": "0.1,1"}, ["0.1", "1.0", "1.1"], [64] * 3),
    ],
)
def test_tiles_of_intel(variables: dict[str, str], found: list[str], sizes: list[int]) -> None:
    """They are devices, whatever Level Zero calls them; a mask may name tiles, or all of a card."""
    listed = read_intel((CARDS, PROCESSES), TILES)
    seen = visible_devices(INTEL, listed, variables)

    assert [it.pids for it in listed] == [(), (), (4127,), (4127,)]
    assert names(seen.devices) == found
    assert [it.memory_bytes >> 30 for it in seen.devices] == sizes
    assert seen.problems == ()


def test_devices_of_intel_are_found_by_their_tool(tmp_path: Path, tools: Tools, find: Find) -> None:
    """Asked without the user's mask, which it may heed."""
    for path in TILES:
        (tmp_path / path[1:]).parent.mkdir(parents=True)
        (tmp_path / path[1:]).touch()
    script = f"""[ -z "$ZE_AFFINITY_MASK" ] || exit 1
        case $1 in discovery) cat <<'END'\n{CARDS}END\n;; ps) cat <<'END'\n{PROCESSES}END\n;; esac"""
    found = find({**tools(xpu_smi=script), "ZE_AFFINITY_MASK": "2"})

    assert (found.maker, found.source) == ("Intel", "xpu-smi")
    assert [(gpu.name, gpu.uuid, gpu.is_free) for gpu in found.gpus] == [("2", "0000:71:00.0/0", False)]


def test_a_tool_of_another_maker_with_the_same_name() -> None:
    """It lists no card."""
    assert read_intel(("+---+\n| XPU-SMI 5.0 |\n", ""), {}) == ()


SMI = """case "$*" in *query-gpu*) printf '0, GPU-a, 00000000:3B:00.0, NVIDIA H200, 143771 MiB\\n';; esac"""


def test_the_questions_to_a_tool_are_asked_at_once(tmp_path: Path, tools: Tools, find: Find) -> None:
    """Each waits for the other one's beginning, so that one after the other would take until the deadline."""
    fifo = tmp_path / "both"
    os.mkfifo(fifo)
    wait = f"""case "$*" in *query-gpu*) echo here > {fifo};; *query-compute*) read word < {fifo};; esac"""
    found = find(tools(nvidia_smi=f"{wait}\n{SMI}"))

    assert [gpu.uuid for gpu in found.gpus] == ["GPU-a"]
    assert (found.maker, found.source, found.problems) == ("NVIDIA", "nvidia-smi", ())


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            "says: Failed to initialize NVML: Driver/library version mismatch: check the driver and the perm",
        ),
        ("echo; echo No devices were found; exit 6", "and says: No devices were found: check"),
        ("exit 9", "and says: nothing: check"),
    ],
)
def test_a_driver_in_trouble_is_quoted(tools: Tools, find: Find, script: str, said: str) -> None:
    """In one sentence, that says what to do."""
    found = find(tools(nvidia_smi=script))

    assert found.gpus == ()
    assert [said in it for it in found.problems] == [True]


def test_a_tool_that_may_not_be_run(tmp_path: Path, tools: Tools, find: Find) -> None:
    """The system's reason is said."""
    environment = tools(nvidia_smi="")
    (tmp_path / "bin/nvidia-smi").chmod(0o644)
    (said,) = find({"PATH": f"{tmp_path}/bin"}).problems

    assert environment
    assert "nvidia-smi finds no GPU, and says: Permission denied: check the driver and the permissions" in said


def test_devices_of_two_makers(tmp_path: Path, tools: Tools, find: Find) -> None:
    """A job has those of one, and hears how to have the others."""
    kfd(tmp_path, 1)
    environment = tools(nvidia_smi=SMI, rocm_smi="")
    found = find(environment)

    assert [gpu.uuid for gpu in found.gpus] == ["GPU-a"]
    (said,) = found.problems
    assert said.startswith("devices of NVIDIA and of AMD are here, and a job uses those of one maker: NVIDIA; ")
    assert said.endswith("CUDA_VISIBLE_DEVICES= hides these")
    assert find({**environment, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0"}).maker == "AMD"


def test_every_maker_has_its_own_name_and_way_to_hide() -> None:
    """Which are no mask of another one's, but for the alias."""
    assert list(MAKERS) == ["NVIDIA", "AMD", "Intel"]
    assert {maker.mask for maker in MAKERS.values()} == {NVIDIA.mask, AMD.mask, INTEL.mask}
    assert [maker.is_slice("MIG-1") for maker in MAKERS.values()] == [True, False, False]
    assert read_amd((), {}) == ()
