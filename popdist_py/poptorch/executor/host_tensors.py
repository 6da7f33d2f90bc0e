"""The host's copy of weights and buffers: that of the user's module, which is told when somebody looks at it.

A model that trains changes the device's copy only. The host's is stale then, and brought up to date when the
program touches it: a parameter or a buffer, however it came by it, or ``parameters()``, ``state_dict`` or
``forward`` of the module. Copies and pickles hold plain tensors and modules.
"""

import copy
import copyreg
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_WATCHES: Final = "_poptorch_watches"
"""The attribute of a watched tensor that says who watches it."""

_LOOKS: Final = frozenset(
    ["forward", "parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "save", "__deepcopy__"]
)
"""What shows the module's tensors."""

as_they_are = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - what torch's own subclasses of tensors use
"""Within it watched tensors are plain ones, and nobody is told."""


class HostWatch:
    """Knows whether one model's host tensors are stale.

    Args:
        update: Called when they are, and somebody looks at them.
        destroy: What the module's ``destroy()`` does.

    Attributes:
        is_stale: Whether the device's copy has been trained since the host's was made equal to it.
        version: How often training has made it stale.
        num_changes: The same of all models of the process,
        changed_at: and what it was when this model made it stale.
    """

    num_changes: ClassVar[int] = 0

    def __init__(self, update: Callable[[], None], destroy: Callable[[], None]) -> None:
        self.is_stale = False
        self.version = self.changed_at = 0
        self.destroy = destroy
        self._update = update
        self._watched: list[Tensor] = []

    def begin(self, module: nn.Module, tensors: Iterable[Tensor]) -> None:
        """Watch ``module`` and its ``tensors`` from now on, as far as they are not watched."""
        for part in _looked_at(module):
            if isinstance(part, WrappedModule):  # compiled by torch.jit, and part of another model too
                part.watches[:] = dict.fromkeys((*part.watches, self))
            else:
                kind = type(part)
                names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
                made = type(kind.__name__, (WrappedModule, kind), {**names, "_poptorch_watches": [self]})
                object.__setattr__(part, "__class__", made)
        for tensor in tensors:
            self.watch(tensor)

    def watch(self, tensor: Tensor) -> None:
        """Watch one more tensor."""
        known = tensor.__dict__.get(_WATCHES, ())
        if self in known or type(tensor) not in _WATCHED_KINDS:
            return
        tensor.__dict__[_WATCHES] = (*known, self)
        tensor.__class__ = _WATCHED_KINDS[type(tensor)]
        self._watched.append(tensor)

    def end(self, module: nn.Module) -> None:
        """Leave ``module`` and its tensors alone."""
        for part in _looked_at(module):
            if isinstance(part, WrappedModule) and self in part.watches:
                part.watches.remove(self)
                if not part.watches:
                    object.__setattr__(part, "__class__", part.plain_class)
        for tensor in self._watched:
            rest = tuple(watch for watch in tensor.__dict__.get(_WATCHES, ()) if watch is not self)
            if rest:
                tensor.__dict__[_WATCHES] = rest
            else:
                tensor.__dict__.pop(_WATCHES, None)
                tensor.__class__ = nn.Parameter if isinstance(tensor, WatchedParameter) else Tensor
        self._watched = []

    def look(self) -> None:
        """Somebody looks at the host's copy: it must not be stale."""
        if self.is_stale:
            self.is_stale = False
            self._update()

    def mark_stale(self) -> None:
        """A step has changed the device's copy."""
        self.is_stale = True
        self.version += 1
        HostWatch.num_changes += 1
        self.changed_at = HostWatch.num_changes


def _looked_at(module: nn.Module) -> list[nn.Module]:
    """``module``, and parts of it that torch.jit compiled: what these do with a watched tensor, nobody is told."""
    return [part for part in module.modules() if part is module or isinstance(part, torch.jit.ScriptModule)]


def _look_all(watches: Iterable[HostWatch]) -> None:
    """Somebody looks at what several models train: the host has the values of the one that ran last."""
    for watch in sorted(watches, key=lambda watch: watch.changed_at):
        watch.look()


def watches_of(tensors: Iterable[Tensor]) -> list[HostWatch]:
    """All who watch one of ``tensors``."""
    found = (watch for tensor in tensors for watch in tensor.__dict__.get(_WATCHES, ()))
    return list(dict.fromkeys(found))


class StandIns(Protocol):
    """The device's tensors of a model."""

    def standing_for(self, host: object) -> object:
        """The device's tensor of a host tensor; anything else as it is."""


class Running:
    """The device's tensors of the model that runs; None while none runs.

    A host tensor that a forward comes by, past the module's attributes, stands for the device's.
    """

    tensors: ClassVar[StandIns | None] = None


class _Watched:
    """What watched parameters and buffers have in common."""

    __dict__: dict[str, Any]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - as torch has it
        del types
        kwargs = kwargs or {}
        if Running.tensors is not None:
            args, kwargs = tree_map(Running.tensors.standing_for, (args, kwargs))
        for part in tree_leaves((args, kwargs)):
            if isinstance(part, _Watched):
                _look_all(part.__dict__.get(_WATCHES, ()))
        with as_they_are():
            return func(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self._plain())

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as object has it
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = made = copy.deepcopy(self._plain(), memo)
        return made

    def _plain(self) -> Tensor:
        """A plain tensor in the same memory, with the same attributes."""
        tensor = cast("Tensor", self)
        data = tensor.data  # which looks
        with as_they_are():
            made = nn.Parameter(data, tensor.requires_grad) if issubclass(type(self), nn.Parameter) else data
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name != _WATCHES})
        return made


class WatchedParameter(_Watched, nn.Parameter):  # type: ignore[misc] # its repr() takes less
    """A parameter of a wrapped module."""


class WatchedBuffer(_Watched, Tensor):  # type: ignore[misc] # as above
    """A buffer of a wrapped module."""


_WATCHED_KINDS: Final[dict[type, type]] = {
    nn.Parameter: WatchedParameter,
    Tensor: WatchedBuffer,
    WatchedParameter: WatchedParameter,
    WatchedBuffer: WatchedBuffer,
}


class WrappedModule(nn.Module):
    """What the user's module is while a model trains with it. Whoever copies or saves it finds its own class."""

    _poptorch_watches: list[HostWatch]

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        if name in _LOOKS:
            _look_all(object.__getattribute__(self, "_poptorch_watches"))
        return super().__getattribute__(name)

    @property
    def watches(self) -> list[HostWatch]:
        """Those who watch the module: one, or several where it is a part of several models that train."""
        return self._poptorch_watches

    @property
    def plain_class(self) -> type[nn.Module]:
        """The module's own class."""
        return next(kind for kind in type(self).__mro__[1:] if kind is not WrappedModule)

    def destroy(self) -> None:
        """Take the model off its device, and leave the module to the program."""
        for watch in (*self._poptorch_watches,):
            watch.destroy()

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as object has it
        _look_all(self._poptorch_watches)
        plain = object.__new__(self.plain_class)
        plain.__dict__.update(self.__dict__)
        make, arguments, *rest = cast("tuple[Any, ...]", plain.__reduce_ex__(protocol))
        if make is copyreg.__newobj__:  # type: ignore[attr-defined] # which pickle refuses for another class
            make = object.__new__
        return make, arguments, *rest
