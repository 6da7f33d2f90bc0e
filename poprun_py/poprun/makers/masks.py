"""Evaluation of variables such as CUDA_VISIBLE_DEVICES: which GPUs a program sees, and what is wrong. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from popdist.ground.values import dataclass
from poprun.makers.listings import Listed
from poprun.makers.maker import MAKERS, Maker

_HIDING: Final = ("", "-1", "NoDevFiles", "none", "void")
"""Values with which a user or a scheduler hides all GPUs in a variable such as CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """The GPUs that a program sees under variables such as CUDA_VISIBLE_DEVICES, and errors in their values."""

    devices: tuple[Listed, ...]  # in the order of the innermost mask and with the names in that mask
    problems: tuple[str, ...] = ()  # problems of the masks, one sentence for each problem


def visible_devices(maker: Maker, listed: Sequence[Listed], environment: Mapping[str, str]) -> Visible:
    """Return which GPUs of ``listed`` a program with these environment variables sees, and errors in values."""
    devices, problems = tuple(maker.arrange(listed, environment)), list[str]()
    outer = {name: environment[name] for name in maker.outer_masks if name in environment}
    for name, text in outer.items():
        left, problem = _left_by(name, text, devices, maker)
        devices = tuple(replace(it, name=str(number)) for number, it in enumerate(left))
        problems += problem
    inner = [name for name in (maker.mask, *maker.aliases) if name in environment]
    if len(inner) > 1 and len({environment[name] for name in inner}) > 1:
        problems.append(
            f"{inner[0]}={environment[inner[0]]} counts, and {inner[1]}={environment[inner[1]]} is not read: "
            "unset one of them"
        )
    # schedulers write the same numbers into all masks: an alias would apply the numbers a second time
    if inner and not (inner[0] in maker.aliases and environment[inner[0]] in outer.values()):
        devices, problem = _left_by(inner[0], environment[inner[0]], devices, maker)
        problems += problem
    elif not inner and not outer:
        problems += _masks_of_others(maker, environment)
    return Visible(devices=devices, problems=tuple(problems))


def _left_by(
    variable: str, text: str, devices: Sequence[Listed], maker: Maker
) -> tuple[tuple[Listed, ...], list[str]]:
    """Return the GPUs that ``text``, a value as for CUDA_VISIBLE_DEVICES, selects; and the errors in ``text``."""
    left = list[Listed]()
    for word in map(str.strip, text.split(",")):
        matches = _called(word, devices, maker)
        if not matches and word in _HIDING:
            break
        if not matches:
            names = ", ".join(it.name for it in devices) or "none"
            ends = "" if text.strip() == word else ", and what follows it is not read"
            return tuple(left), [
                f"{variable}={text} names {word}, which is not among the devices here ({names}){ends}: correct it"
            ]
        left += matches
    if len({it.uuid for it in left}) < len(left):
        return (), [f"{variable}={text} names a device twice, and then a program sees none: name each once"]
    return tuple(left), []


def _called(word: str, devices: Sequence[Listed], maker: Maker) -> list[Listed]:
    """Return the GPUs that ``word``, a name in CUDA_VISIBLE_DEVICES, selects: one GPU, or all slices of a GPU."""
    is_uuid = not word.replace(".", "").isdecimal()
    named = [it for it in devices if word == it.name or (is_uuid and word and it.uuid.startswith(word))]
    if len(named) == 1:
        return [replace(named[0], name=word)]
    if is_uuid and maker.is_slice(word) and not any(it.whole for it in devices):
        return [Listed(name=word, uuid=word)]  # the tool does not list slices
    return [it for it in devices if word and word == it.whole] if not named else []


def _masks_of_others(maker: Maker, environment: Mapping[str, str]) -> list[str]:
    """Return a list with an error if a variable hides only another maker's GPUs, without effect here; else []."""
    foreign = (name for other in MAKERS.values() for name in other.masks if name not in maker.masks)
    name = next((name for name in foreign if environment.get(name, "")), None)
    if name is None:
        return []
    problem = f"{name}={environment[name]} is set, and the devices here are {maker.name}'s, which do not read it"
    return [f"{problem}: set {maker.mask}"]
