"""The device's copy of a module's tensors, which take the place of the host's while the model runs."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from poptorch.errors import Error
from poptorch.executor.host_tensors import Running, StandIns, as_they_are

P = ParamSpec("P")
R = TypeVar("R")


class _ScriptedAttributes:
    """The attributes of a module of torch.jit, which is none of Python, as the dictionary that a plain one has."""

    def __init__(self, part: torch.jit.ScriptModule) -> None:
        self._inside: Any = part._c  # noqa: SLF001 - torch has no public way to exchange them

    def get(self, name: str) -> Any:  # noqa: ANN401 - of every kind
        return self._inside.getattr(name)

    def containers(self) -> dict[str, Any]:
        """The lists, tuples and dicts that it keeps, by name."""
        kind: Any = torch._C.ConcreteModuleType.from_jit_type(self._inside._type())  # noqa: SLF001 - as above
        found = {name: self[name] for name in kind.get_attributes()}
        return {name: held for name, held in found.items() if isinstance(held, list | tuple | dict)}

    def __contains__(self, name: str) -> bool:
        return bool(self._inside.hasattr(name))

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - as above
        return self._inside.getattr(name)

    def __setitem__(self, name: str, value: object) -> None:
        self._inside.setattr(name, value)


Owner = dict[str, Any] | _ScriptedAttributes


@dataclass(slots=True, kw_only=True)
class _Place:
    """One place of a module that holds a parameter or a buffer; two places may hold the same one.

    Attributes:
        name: Its path in the module.
        owner: The dictionary that holds it,
        key: and where.
        host: The host's tensor.
        device: The device's.
    """

    name: str
    owner: Owner
    key: str
    host: Tensor
    device: Tensor


def _attributes_of(part: nn.Module) -> Owner:
    return _ScriptedAttributes(part) if isinstance(part, torch.jit.ScriptModule) else part.__dict__


class Modes:
    """Whether each part of a module was in training mode when it was wrapped: so it runs, whatever it is later."""

    def __init__(self, module: nn.Module) -> None:
        owners: list[Owner] = [_attributes_of(part) for part in module.modules()]
        self._modes = [(owner, owner["training"]) for owner in owners if "training" in owner]

    def enter(self) -> list[tuple[Owner, bool]]:
        """From now on the module has them; those that it did not have, for `leave`."""
        changed = [(values, mode) for values, mode in self._modes if values["training"] is not mode]
        for values, mode in changed:
            values["training"] = mode
        return changed

    @staticmethod
    def leave(changed: list[tuple[Owner, bool]]) -> None:
        """It has those of before."""
        for values, mode in changed:
            values["training"] = not mode


class DeviceTensors:
    """A copy of the tensors of ``module``, from the values that the host has now.

    Args:
        module: Its own tensors stay the host's.
        devices: Where the copy of each tensor lies, by its name.
        modes: The module's while it runs.
        num_replicas: Replicas of this process that have buffers of their own; 1 where all have the same.
        adopt: Called with a host tensor that the program has put into the place of another one.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Mapping[str, torch.device],
        modes: Modes,
        num_replicas: int,
        adopt: Callable[[Tensor], None],
    ) -> None:
        self._adopt = adopt
        self._modes = modes
        found = list(_places(module))
        hosts = list({id(host): host for *_, host in found}.values())
        values = copy.deepcopy([host.data for host in hosts])  # together, so that views of one memory stay that
        names = {id(host): name for name, *_, host in reversed(found)}
        copies = {
            id(host): _like(host, value.to(devices[names[id(host)]]))
            for host, value in zip(hosts, values, strict=True)
        }
        self._places = [
            _Place(name=name, owner=owner, key=key, host=host, device=copies[id(host)])
            for name, owner, key, host in found
        ]
        self._containers = [
            (owner, name, held, tree_map(lambda it: copies.get(id(it), it), held))
            for owner in map(_attributes_of, module.modules())
            if isinstance(owner, _ScriptedAttributes)
            for name, held in owner.containers().items()
            if any(id(it) in copies for it in tree_leaves(held))
        ]
        self._buffers = [place for place in self._places if not isinstance(place.host, nn.Parameter)]
        buffers = [place.device for place in self._buffers]
        self._buffers_of_replicas = [buffers, *(copy.deepcopy(buffers) for _ in range(num_replicas - 1))]

    @property
    def hosts(self) -> list[Tensor]:
        """The host's tensors."""
        return [place.host for place in self._places]

    @property
    def device_of(self) -> dict[nn.Parameter, nn.Parameter]:
        """Host parameter → device parameter."""
        return {
            place.host: place.device
            for place in self._places
            if isinstance(place.host, nn.Parameter) and isinstance(place.device, nn.Parameter)
        }

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """Host parameter → its name; the first one where it has several."""
        return {place.host: place.name for place in reversed(self._places) if isinstance(place.host, nn.Parameter)}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Name → device parameter, each once."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for place in self._places:
            if isinstance(place.device, nn.Parameter):
                found.setdefault(id(place.device), (place.name, place.device))
        return dict(found.values())

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Name → device buffer."""
        return {place.name: place.device for place in self._buffers}

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``function`` while the module has these tensors, and the modes that it runs in.

        Raises:
            Error: If one was assigned or deleted meanwhile.
        """
        outer, changed = self._enter()
        try:
            result = function(*args, **kwargs)
        except BaseException:
            self._leave(outer, changed)
            raise
        fault = self._leave(outer, changed)
        if fault is not None:
            raise Error(fault)
        return result

    def _enter(self) -> tuple[StandIns | None, list[tuple[Owner, bool]]]:
        for place in self._places:
            now = place.owner.get(place.key)
            if now is not place.host and now is not None:
                self._adopt(now)
                place.host = now
            place.owner[place.key] = place.device
        for owner, name, _, devices in self._containers:
            owner[name] = devices
        outer, Running.tensors = Running.tensors, self
        return outer, self._modes.enter()

    def _leave(self, outer: StandIns | None, changed: list[tuple[Owner, bool]]) -> str | None:
        Running.tensors = outer
        self._modes.leave(changed)
        fault = None
        for place in self._places:
            if place.owner.get(place.key) is not place.device:
                fault = fault or _fault_of(place)
            place.owner[place.key] = place.host
        for owner, name, hosts, _ in self._containers:
            owner[name] = hosts
        self._take_buffers(0)
        return fault

    def standing_for(self, host: object) -> object:
        """The device's tensor of a host tensor; anything else as it is."""
        return next((place.device for place in self._places if place.host is host), host)

    def become(self, replica: int) -> None:
        """While in place: have the buffers of local replica ``replica``, where each has its own."""
        if len(self._buffers_of_replicas) > 1:
            self._take_buffers(replica)
            for place in self._buffers:
                place.owner[place.key] = place.device

    def _take_buffers(self, replica: int) -> None:
        if len(self._buffers_of_replicas) > 1:
            for place, buffer in zip(self._buffers, self._buffers_of_replicas[replica], strict=True):
                place.device = buffer

    @torch.no_grad()
    def upload(self, names: Iterable[str] | None = None) -> None:
        """Take the host's values as they are, stale or not, for all replicas.

        Args:
            names: Of the buffers that are taken; None for all tensors.

        Raises:
            Error: If a tensor of the host has another shape than the device's.
        """
        chosen = self._places if names is None else [place for place in self._buffers if place.name in {*names}]
        with as_they_are():
            for place in chosen:
                if place.host.shape != place.device.shape:
                    raise Error(
                        f"{place.name} has the shape {list(place.host.shape)}, and the model was compiled with "
                        f"{list(place.device.shape)}: call destroy() first"
                    )
                place.device.copy_(place.host)
            for buffers in self._buffers_of_replicas[1:]:
                for place, buffer in zip(self._buffers, buffers, strict=True):
                    if names is None or place.name in {*names}:
                        buffer.copy_(place.host)

    @torch.no_grad()
    def download(self) -> None:
        """Give the host the values; of buffers that each replica has for itself, those of the first one here."""
        with as_they_are():
            for place in self._places:
                place.host.copy_(place.device)


def _places(module: nn.Module) -> Iterator[tuple[str, Owner, str, Tensor]]:
    """Name, owner, key and tensor of each parameter and buffer."""
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for owner in (part._parameters, part._buffers):  # noqa: SLF001 - torch has no public way to exchange them
            for key, tensor in owner.items():
                if tensor is not None:
                    yield prefix + key, owner if isinstance(owner, dict) else _attributes_of(part), key, tensor


def _like(host: Tensor, value: Tensor) -> Tensor:
    """``value`` as a parameter, where ``host`` is one."""
    with as_they_are():
        return nn.Parameter(value, host.requires_grad) if isinstance(host, nn.Parameter) else value


def _fault_of(place: _Place) -> str:
    kind = "Parameter" if isinstance(place.host, nn.Parameter) else "Buffer"
    what = "removed from" if place.owner.get(place.key) is None else "reassigned within"
    return (
        f"{kind} {place.name} is {what} the model while it runs. Write into it, as {place.name}.copy_(value) "
        "does, so that the tensor stays"
    )
