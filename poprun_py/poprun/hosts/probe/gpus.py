"""The devices of this machine: poprun asks the tools and drivers of each maker whose driver is installed."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from popdist.ground.values import dataclass
from poprun.launch.pressure import read_kernel_file
from poprun.launch.process.process_tree import ancestors, user_of
from poprun.launch.process.spawn import Answer, answers_of
from poprun.makers.listings import Listed
from poprun.makers.maker import DEFAULT_MAKER, MAKERS, Maker
from poprun.makers.masks import visible_devices
from poprun.plan.topology import Gpu, Occupant

PCI: Final = "/sys/bus/pci/devices"

_TOOL_SECONDS: Final = 10.0
_MOST_LETTERS: Final = 200  # of a tool's message that poprun shows


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevices:
    """The GPUs that a job may use, all of one maker, and why other GPUs of the machine cannot be used."""

    gpus: tuple[Gpu, ...] = ()  # in slot order
    maker: str = DEFAULT_MAKER
    source: str = ""  # what listed the devices, such as the name of a tool; empty if there are no devices
    problems: tuple[str, ...] = ()  # why devices cannot be used and what to do, one sentence for each problem


def find_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that are left visible by the environment variables in ``environment`` that hide GPUs."""
    return find_devices(environment).gpus


def find_devices(environment: Mapping[str, str], root: str = "/") -> FoundDevices:
    """Find the usable GPUs, but only of the first maker that has any; the files of drivers are below ``root``."""
    of_makers = [_devices_of(it, environment, root) for it in MAKERS.values() if _is_here(it, environment, root)]
    usable = [it for it in of_makers if it.gpus]
    if not usable:
        problems = tuple(problem for it in of_makers for problem in it.problems)
        return FoundDevices(problems=problems)
    first, *others = usable
    problems = tuple(
        f"devices of {first.maker} and of {it.maker} are here, and a job uses those of one maker: {first.maker}; "
        "{}={} hides these".format(*MAKERS[first.maker].hiding)
        for it in others
    )
    return FoundDevices(
        gpus=first.gpus, maker=first.maker, source=first.source, problems=(*first.problems, *problems)
    )


def _is_here(maker: Maker, environment: Mapping[str, str], root: str) -> bool:
    """Whether the driver or the tool of ``maker`` is installed on this machine."""
    folders = environment.get("PATH", os.defpath).split(os.pathsep)

    def is_there(sign: str) -> bool:
        if sign.startswith("/"):
            return os.path.exists(_below(root, sign))
        return any(os.path.exists(os.path.join(folder, sign)) for folder in folders)

    return all(any(map(is_there, group)) for group in maker.signs)


def _devices_of(maker: Maker, environment: Mapping[str, str], root: str) -> FoundDevices:
    masks = {name for it in MAKERS.values() for name in it.masks}  # masks would also hide devices from some tools
    unmasked = {name: text for name, text in os.environ.items() if name not in masks}
    answers = answers_of(maker.commands, _TOOL_SECONDS, unmasked)
    texts = [it.text if it.code == 0 else "" for it in answers]
    listed = maker.read(texts, _read_files(maker.patterns, root))
    problem = _problem_of(maker, listed, answers, root)
    if problem:
        return FoundDevices(maker=maker.name, problems=(problem,))
    visible = visible_devices(maker, listed, environment)
    gpus = gpus_of(visible.devices, _below(root, PCI))
    return FoundDevices(gpus=gpus, maker=maker.name, source=maker.source, problems=visible.problems)


def _problem_of(maker: Maker, listed: Sequence[Listed], answers: Sequence[Answer], root: str) -> str:
    """Return why the devices of ``maker`` cannot be used; an empty text if they can be used."""
    if maker.access and not os.access(_below(root, maker.access), os.R_OK | os.W_OK):
        return (
            f"{maker.access}, through which programs reach the {maker.name} GPUs, cannot be opened: join the "
            "group that owns it (usermod -aG render,video USER, then log in again)"
        )
    if listed:
        return ""
    if not answers:
        return (
            f"{maker.source} shows no {maker.name} GPU that this process may open: give the container its devices"
        )
    message = next((line for line in answers[0].text.splitlines() if line.strip()), "").strip()[:_MOST_LETTERS]
    return (
        f"{maker.source} finds no GPU, and says: {message or 'nothing'}: check the driver and the permissions, or "
        f"hide the GPUs with {'='.join(maker.hiding)}"
    )


def gpus_of(devices: Sequence[Listed], pci: str = PCI) -> tuple[Gpu, ...]:
    """Return ``devices`` as GPUs, each with the processes that use its memory, except poprun's own parents."""
    callers = {*ancestors(os.getpid())} if any(it.pids for it in devices) else set()
    return tuple(
        Gpu(
            name=it.name,
            uuid=it.uuid,
            occupants=tuple(Occupant(pid=pid, user=user_of(pid)) for pid in it.pids if pid not in callers),
            node=_node_of(it.address, pci) if it.address else None,
            model=it.model,
            memory_bytes=it.memory_bytes,
        )
        for it in devices
    )


def _node_of(address: str, pci: str) -> int | None:
    """Return the NUMA node of the device with the PCI address ``address``; None if the node is unknown."""
    domain, _, rest = address.lower().partition(":")
    with suppress(ValueError):
        node = int(read_kernel_file(os.path.join(pci, f"{domain[-4:]}:{rest}", "numa_node")))
        return node if node >= 0 else None
    return None


def _read_files(patterns: Sequence[str], root: str) -> dict[str, str]:
    """Return {path, as if ``root`` were /: text} for all readable files below ``root`` that match ``patterns``."""
    from glob import glob

    contents = {}
    for path in (path for pattern in patterns for path in glob(_below(root, pattern))):
        with suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            contents[f"/{os.path.relpath(path, root)}"] = file.read()
    return contents


def _below(root: str, path: str) -> str:
    return os.path.join(root, path.lstrip("/"))
