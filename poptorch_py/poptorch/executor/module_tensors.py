"""A module's tensors and modes while poptorch runs it: on its device, and with the buffers of one replica.

On a CPU these are the module's own tensors, and training changes them in place. For a GPU each tensor has a copy
there: while the model runs, ``tensor.data`` is that copy, so that whoever holds a parameter holds the one that is
trained. Afterwards ``tensor.data`` is the host's memory again, with the values that training has made.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

import popdist
from poptorch.enums import CommGroupType, VariableRetrievalMode
from poptorch.errors import Error
from poptorch.options.option_values import one_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One attribute of a submodule that holds a parameter or a buffer; two places may hold the same tensor."""

    name: str
    part: nn.Module
    key: str
    tensor: Tensor
    is_persistent: bool

    def put_back(self) -> str:
        """Let the attribute hold the tensor again, and return in words what had become of it."""
        kind = "Parameter" if isinstance(self.tensor, nn.Parameter) else "Buffer"
        what = "removed from" if getattr(self.part, self.key, None) is None else "reassigned within"
        if isinstance(self.tensor, nn.Parameter):
            self.part.register_parameter(self.key, self.tensor)
        else:
            self.part.register_buffer(self.key, self.tensor, persistent=self.is_persistent)
        return (
            f"{kind} {self.name} is {what} the model, by its forward or since it was compiled. Write into it, as "
            f"{self.name}.copy_(value) does, so that the tensor stays; or call destroy() before it is replaced"
        )


@dataclass(slots=True)
class _Counts:
    """Of all models of this process."""

    running: int = 0  # how many run just now, one within another
    trainings: int = 0  # how many training calls there were


counts: Final = _Counts()


class ModuleTensors:
    """The parameters and buffers of one wrapped module; within it as a context the model runs."""

    _all_copies: ClassVar[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()
    """Tensor of the host → the copy on the device, which all models of the tensor share."""

    def __init__(
        self,
        module: nn.Module,  # the user's module
        # where the model computes on copies, while the module's own tensors stay as they are; None for no copies
        device: torch.device | None,
        # submodules, and whether each was in training mode when the module was wrapped
        modes: Sequence[tuple[nn.Module, bool]],
        *,
        is_training: bool,  # whether running the model trains the parameters
    ) -> None:
        self._module = module
        self._device = device
        self._modes = modes
        self._is_training = is_training
        self._num_entered = 0
        self._separate: list[str] = []  # the buffers of which each replica has its own
        self._shared = frozenset[str]()  # of these, those that the module has of the job's replica 0
        self._num_replicas = 1
        self._find_tensors()

    def separate_buffers(self, names: Iterable[str], num_replicas: int, shared: Iterable[str]) -> None:
        """Give each local replica its own buffers ``names``; of ``shared`` ones the module has the job's first."""
        self._separate, self._num_replicas, self._shared = [*names], num_replicas, frozenset(shared)
        self._make_replica_buffers()

    def _make_replica_buffers(self) -> None:
        self._separate = [name for name in self._separate if name in self.buffers]
        values = self._own_values()
        # values of local replica 1 and so on; copied together, so that views of one memory stay that
        self._others = [copy.deepcopy(values) for _ in range(self._num_replicas - 1)]
        # of local replica 0, what the module has of another instance
        self._first: dict[str, Tensor] = {}
        if popdist.instance_index():
            self._first = {name: it for name, it in copy.deepcopy(values).items() if name in self._shared}
        self._own = values  # what the module has while the model does not run

    def _own_values(self) -> dict[str, Tensor]:
        return {name: self.copies.get(name, self.buffers[name].data) for name in self._separate}

    def _find_tensors(self) -> None:
        self._num_trainings_seen = counts.trainings
        self._places = list(_places(self._module))
        tensors = {id(place.tensor): place for place in reversed(self._places)}  # the first name of each
        # the module's parameters and buffers by name, each once
        self._named = named = {place.name: place.tensor for place in reversed(tensors.values())}
        self.parameters = {name: it for name, it in named.items() if isinstance(it, nn.Parameter)}
        self.buffers = {name: it for name, it in named.items() if not isinstance(it, nn.Parameter)}
        self._buffer_places = [place for place in self._places if not isinstance(place.tensor, nn.Parameter)]
        # the values of all of them on the device, by name; empty without copies
        self.copies: dict[str, Tensor] = {}
        if self._device is not None:
            self.copies = {name: self._copy_of(tensor, self._device) for name, tensor in named.items()}
        self._make_replica_buffers()

    def _copy_of(self, tensor: Tensor, device: torch.device) -> Tensor:
        if tensor not in ModuleTensors._all_copies:
            ModuleTensors._all_copies[tensor] = tensor.detach().to(device, copy=True)
        copied: Tensor = ModuleTensors._all_copies[tensor]
        return copied

    def _take_replaced_buffers(self) -> None:
        """Use the buffers that the program has put in place of others.

        Where it has converted them, as ``half()`` does, each replica goes on with its own values, converted too.
        All replicas go on with other values that a program puts there.
        """
        before, replicas = self.buffers, self.replica_buffers
        self._find_tensors()
        converted = {
            name for name in before.keys() & self.buffers.keys() if _is_converted(before[name], self.buffers[name])
        }
        self.load_replica_buffers([{name: own[name] for name in converted & own.keys()} for own in replicas])

    def __enter__(self) -> None:
        if self._num_entered == 0:
            if any(getattr(it.part, it.key, None) is not it.tensor for it in self._buffer_places):
                self._take_replaced_buffers()
            self._changed_modes = [(part, mode) for part, mode in self._modes if part.training is not mode]
            for part, mode in self._changed_modes:
                part.training = mode
            self._gradients = []  # of a backward pass of the program's own, which the parameters do not have then
            if self._is_training:
                self._gradients = [(it, it.grad) for it in self.parameters.values() if it.grad is not None]
                for parameter, _ in self._gradients:
                    parameter.grad = None
            elif self._num_trainings_seen != counts.trainings:  # another model has trained
                self._num_trainings_seen = counts.trainings
                self.fill_replicas()
            if self._separate:
                self._own = self._own_values()
            self._host_values = {name: self._named[name].data for name in self.copies}
            for name, value in self.copies.items():
                self._named[name].data = value
            counts.running += 1
        self._num_entered += 1

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._num_entered -= 1
        if self._num_entered:  # it was entered while the model is compiled, or called
            return
        counts.running -= 1
        counts.trainings += self._is_training
        if self._others or self._first:
            self._put_buffers(self._own)
        faults = [it.put_back() for it in self._places if getattr(it.part, it.key, None) is not it.tensor]
        for name, value in self._host_values.items():
            self._named[name].data = value
        if self.copies:
            self.copy_to_host()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for part, mode in self._changed_modes:
            part.training = not mode
        if faults and kind is None:
            raise Error(faults[0])

    def select_replica(self, replica: int) -> None:
        """While the model runs: give the module the buffers of local replica ``replica``."""
        if replica:
            self._put_buffers(self._others[replica - 1])
        elif self._others or self._first:
            self._put_buffers(self._own | self._first)

    def _put_buffers(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.buffers[name].data = value

    @torch.no_grad()
    def share_buffers(self) -> None:
        """While the model runs, on all instances: give the module the shared buffers of the job's replica 0."""
        if not self._shared or popdist.num_instances() == 1:
            return
        values = [value for name, value in self._own.items() if name in self._shared]
        sent = [value.to(popdist.device()).reshape(-1).view(torch.uint8) for value in values]
        received = popdist.broadcast(torch.cat(sent)).split([len(part) for part in sent])
        for value, part in zip(values, received, strict=True):
            value.copy_(part.clone().view(value.dtype).view(value.shape))

    @torch.no_grad()
    def copy_to_device(self, names: Iterable[str] | None = None) -> None:
        """Give the device and all replicas the module's values: of all tensors, or of the buffers ``names``."""
        chosen = {*self.copies} if names is None else {*names}
        for name, value in self.copies.items():
            if name in chosen:
                value.copy_(self._named[name])
        self.fill_replicas(names)

    @torch.no_grad()
    def copy_to_host(self) -> None:
        """Give the module the device's values, as far as running changes them."""
        for name, value in self.copies.items():
            tensor = self._named[name]
            if name in self.buffers or (self._is_training and tensor.requires_grad):
                tensor.copy_(value)

    @torch.no_grad()
    def fill_replicas(self, names: Iterable[str] | None = None) -> None:
        """Give all replicas the module's buffers."""
        chosen = {*self._separate} if names is None else {*names}
        for values in self.replica_buffers:
            for name in chosen & values.keys():
                values[name].copy_(self.buffers[name])

    @property
    def replica_buffers(self) -> list[dict[str, Tensor]]:
        """What each replica of this process has in place of the module's buffers, by name."""
        return [self._first, *self._others]

    @torch.no_grad()
    def load_replica_buffers(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Go on from `replica_buffers` of as many replicas; what is missing stays as it is."""
        for values, read in zip(self.replica_buffers, saved, strict=False):
            for name in values.keys() & read.keys():
                values[name].copy_(read[name])


def _is_converted(before: Tensor, after: Tensor) -> bool:
    """Whether ``after`` has the values of ``before``, in whichever dtype and on whichever device."""
    return before.shape == after.shape and has_same_bits(before.to(after.device, after.dtype), after)


def has_same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one dtype have the same bits, those of NaN too."""
    one, other = (it.detach().contiguous().reshape(-1).view(torch.uint8) for it in (left, right))
    return torch.equal(one, other)


def group_replicas(
    parameter: nn.Parameter,
    comm_group_type: CommGroupType,
    shards: int,
    variable_retrieval_mode: VariableRetrievalMode,
) -> None:
    """Ask for a parameter that only replicas of a group share: refused later unless all are in one."""
    del shards
    one_of("replicaGrouping: comm_group_type", comm_group_type, CommGroupType)
    one_of("replicaGrouping: variable_retrieval_mode", variable_retrieval_mode, VariableRetrievalMode)
    if comm_group_type is CommGroupType.All:
        _grouped.pop(parameter, None)
    else:
        _grouped[parameter] = True


_grouped: Final = WeakTensorKeyDictionary()
nn.Parameter.replicaGrouping = group_replicas  # type: ignore[attr-defined] # where programs call it


def is_grouped(parameter: nn.Parameter) -> bool:
    """Whether a program asked for a parameter that differs from one group of replicas to the other."""
    return parameter in _grouped


def _places(module: nn.Module) -> Iterator[_Place]:
    persistent = module.state_dict().keys()
    for path, part in module.named_modules():
        own = *part.named_parameters(recurse=False), *part.named_buffers(recurse=False)
        for key, tensor in own:
            name = f"{path}.{key}" if path else key
            yield _Place(name=name, part=part, key=key, tensor=tensor, is_persistent=name in persistent)
