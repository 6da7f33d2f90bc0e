"""Detection of state that a module keeps in Python from one forward pass to the next.

Buffers and random states belong to the replica. A hidden state in an attribute, a counter or the module's own
generator belongs to the process, so an instance with two replicas changes it twice. Caches and records are
harmless. So an attribute is reported only if it changes in several watched passes in a row, and is changed in
place, read by the next pass, or a counter.
"""

import hashlib
import pickle
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isclose, nan
from types import ModuleType
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from popdist.errors import PopdistWarning
from popdist.ground.torch_private import num_writes
from popdist.job.weights import bytes_of

R = TypeVar("R")

ENOUGH: Final = 3
"""The number of watched passes in a row that have changed an attribute, before the attribute is reported."""

MOST_PASSES: Final = 12
"""The most passes watched in one step; a model outside of steps would otherwise be watched for ever."""

MOST_ITEMS: Final = 64
"""The most items of a container that are compared; with more items, only length and identity are compared."""

MOST_DEPTH: Final = 3

LARGE_BYTES: Final = 1 << 20
"""The largest tensor or array whose values are compared; otherwise only writes and identity are compared."""

_GENERATORS: Final = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

_GLOBAL: Final = (torch.default_generator, random.seed.__self__, np.random.rand.__self__)  # type: ignore[attr-defined]

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))

Fingerprint = object
"""A digest of a value: equal fingerprints mean equal values."""


@dataclass(slots=True)
class _Seen:
    """The changes of a module's attribute in the last watched forward passes, each of which has changed it."""

    num_changes: int = 0
    is_same_object: bool = True  # whether the attribute was only changed in place
    is_read: bool = False  # whether a pass gave torch a tensor that the attribute had before the pass
    differences: list[float] = field(default_factory=list)  # the change of a number in each pass
    factors: list[float] = field(default_factory=list)  # the factor by which a number changed in each pass


class PythonState:
    """The attributes that the modules of one model keep in Python, and the changes of these attributes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._reported: set[tuple[str, str]] = set()
        self._step = -1
        self._num_passes = 0

    def is_watched(self, step: int) -> bool:
        """Whether changes of attributes are watched in the next forward pass of the checked step ``step``."""
        if step != self._step:
            self._step, self._num_passes = step, 0
            self._reported.clear()
        return self._num_passes < MOST_PASSES

    def watch(self, forward: Callable[[], R]) -> R:
        """Call ``forward`` and return its result; record which attributes of the modules change."""
        self._num_passes += 1
        before = {key: (it, _fingerprint_of(it)) for key, it in self._attributes()}
        # only after two changes, because torch.compile compiles again for the mode that sees operations
        suspects = {key for key, seen in self._seen.items() if seen.num_changes >= ENOUGH - 1}
        tensors = {id(it): key for key in suspects & before.keys() for it in _tensors_in(before[key][0])}
        if tensors:
            with _Reads(set(tensors)) as reads:
                result = forward()
            for identity in reads.found:
                self._seen[tensors[identity]].is_read = True
        else:
            result = forward()
        for key, now in self._attributes():
            if key in before:
                self._compare(key, *before[key], now)
        return result

    def _compare(self, key: tuple[str, str], was: object, printed: Fingerprint, now: object) -> None:
        if not _has_changed(printed, _fingerprint_of(now)):
            self._seen.pop(key, None)  # a counter may begin late, and a cache ends to change
            return
        seen = self._seen.setdefault(key, _Seen())
        seen.num_changes += 1
        seen.is_same_object &= now is was
        if isinstance(was, int | float) and isinstance(now, int | float):
            seen.differences.append(now - was)
            seen.factors.append(now / was if was else nan)
        if seen.num_changes >= ENOUGH and key not in self._reported:
            self._report(key, seen)

    def _attributes(self) -> Iterator[tuple[tuple[str, str], object]]:
        """Yield the attributes of the program's own modules, with the path of the module and the name."""
        for path, module in self._module.named_modules():
            kind = type(module)
            if not (kind.__module__.startswith("torch.") or _is_of_library(kind, "torchmetrics.")):
                for name, value in tuple(vars(module).items()):
                    if name not in _OF_EVERY_MODULE and not _is_computed(module, name):
                        yield (path, name), value

    def _report(self, key: tuple[str, str], seen: _Seen) -> None:
        if not (seen.is_same_object or seen.is_read or _is_counter(seen)):
            return
        self._reported.add(key)
        path, name = key
        owner = type(self._module.get_submodule(path))
        what = f"the attribute {name} of {owner.__name__}{f' ({path})' if path else ''}"
        text = (
            f"{what} changes in each forward pass, and the next pass reads it: an instance with several replicas "
            "changes it more often than one with a single one, so the result would depend on how the replicas are "
            "dealt to instances. Make a number or tensor a buffer (register_buffer), which belongs to the "
            "replica; change it once a step, outside of forward and training_step; hand a state that follows the "
            "samples to forward and return it; draw from torch's global generator in place of one of the module's "
            "own. popdist.init(checks='off') leaves out this check"
        )
        if _is_of_library(owner, "lightning."):  # whose training_step may count what no loss depends on
            warnings.warn(text, PopdistWarning, stacklevel=2)
        else:
            _faults.append(text)


def _is_counter(seen: _Seen) -> bool:
    """Whether the attribute is a number that grows by the same amount, or by the same factor, in each pass."""
    if len(seen.factors) != seen.num_changes:
        return False
    return len(set(seen.differences)) == 1 or all(isclose(it, seen.factors[0]) for it in seen.factors)


class _Reads(TorchFunctionMode):
    """A context that records which of some tensors, given by their ids, are passed to an operation of torch."""

    def __init__(self, identities: set[int]) -> None:
        super().__init__()
        self._identities = identities
        self.found: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record the tensors among the arguments, call the operation, and return its result."""
        if getattr(func, "__name__", "") != "__set__":
            tensors = _tensors_in([*args, *(kwargs or {}).values()])
            self.found |= self._identities & {id(it) for it in tensors}
        return func(*args, **(kwargs or {}))


def _tensors_in(value: object, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors in ``value``, and in the containers inside ``value``."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | deque | Mapping) and depth < MOST_DEPTH and len(value) <= MOST_ITEMS:
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item, depth + 1)


_faults: Final[list[str]] = []
"""The faults that were found in any model, until the end of a step reports the faults."""


def next_fault() -> str | None:
    """Return the text of the first fault in a forward pass since the last call, else None; discard all faults."""
    fault = next(iter(_faults), None)
    _faults.clear()
    return fault


def generator_states(*owners: object) -> dict[str, Fingerprint]:
    """Return digests of the random generators in attributes of ``owners`` and of the attributes' values; without
    the global generators.
    """
    found: dict[str, Fingerprint] = {}
    for owner in owners:
        outer = getattr(owner, "__self__", owner)
        for name, value in _attributes_of(outer):
            path = f"{type(outer).__name__}.{name}"
            inner = [(path, value), *((f"{path}.{it}", attribute) for it, attribute in _attributes_of(value))]
            own = [(known, it) for known, it in inner if isinstance(it, _GENERATORS) and it not in _GLOBAL]
            found |= {known: _fingerprint_of(it) for known, it in own}
    return found


def _attributes_of(value: object) -> list[tuple[str, object]]:
    return [] if isinstance(value, type | ModuleType) else list(getattr(value, "__dict__", {}).items())


def _is_of_library(kind: type, library: str) -> bool:
    """Whether ``kind`` extends a class of ``library``, such as a metric, which counts its own updates."""
    return any(base.__module__.startswith(library) for base in kind.__mro__)


def _is_computed(module: nn.Module, name: str) -> bool:
    """Whether a hook computes the attribute from a parameter, as old spectral_norm and weight_norm do."""
    return any(parameter.startswith(f"{name}_") for parameter, _ in module.named_parameters(recurse=False))


def _fingerprint_of(value: object, depth: int = 0) -> Fingerprint:
    """Return a digest of ``value`` that is equal for equal values; None for other objects, such as a function."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return (type(value).__name__, repr(value))
    if isinstance(value, Tensor):
        return _fingerprint_of_tensor(value)
    if isinstance(value, torch.Generator):
        return ("generator", _digest(value.get_state().numpy().tobytes()))
    if isinstance(value, random.Random):
        return ("generator", _digest(repr(value.getstate()).encode()))
    if isinstance(value, np.random.Generator):
        return ("generator", _digest(pickle.dumps(value.bit_generator.state)))
    if isinstance(value, np.random.RandomState):
        return ("generator", _digest(pickle.dumps(value.get_state())))
    if isinstance(value, np.ndarray | np.generic):
        return ("array", _digest(value.tobytes()) if value.nbytes <= LARGE_BYTES else id(value))
    if isinstance(value, list | tuple | deque | Mapping):
        return _fingerprint_of_items(value, depth)
    return None


def _fingerprint_of_tensor(value: Tensor) -> Fingerprint:
    if value.requires_grad or value.layout != torch.strided or value.device.type == "meta":
        return None  # torch itself refuses a graph from an earlier pass
    if value.nbytes > LARGE_BYTES:
        return ("tensor", id(value), num_writes(value))
    return ("tensor", value.dtype, tuple(value.shape), _digest(bytes_of(value)))


def _fingerprint_of_items(value: Any, depth: int) -> Fingerprint:
    if depth == MOST_DEPTH or len(value) > MOST_ITEMS:
        return ("many", len(value), id(value))
    if isinstance(value, Mapping):
        return {repr(key): _fingerprint_of(item, depth + 1) for key, item in value.items()}
    kind = tuple if isinstance(value, tuple) else list
    return kind(_fingerprint_of(item, depth + 1) for item in value)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _has_changed(before: Fingerprint, now: Fingerprint) -> bool:
    """Whether a value has changed; mere growth of a list or dict does not count, because it may be a cache."""
    if isinstance(before, list) and isinstance(now, list):
        return now[: len(before)] != before
    if isinstance(before, dict) and isinstance(now, dict):
        return any(key not in now or now[key] != it for key, it in before.items())
    return before != now
