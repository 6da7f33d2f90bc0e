"""State that a module keeps in Python from one forward pass to the next, found in checked steps.

Buffers and the random states of the process belong to the replica. A hidden state in an attribute, a counter that
``forward`` advances and a generator of the module's own do not: an instance with two replicas moves them twice
where two instances move theirs once. Such state can be told from caches and records, which are harmless:

- a cache changes now and then; a state that is carried over changes in each forward pass,
- a record of the last pass is written before it is read; a state that is carried over is read first, as the code
  of ``forward`` and of the methods that it calls tells.

What changed in each of the passes that were looked at, three of them or more, and is read before it is written, is
an error. What changed so and is not to be found in that code, as other code may write it, is a warning.
"""

import dis
import hashlib
import inspect
import pickle
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from popdist.errors import PopdistWarning
from popdist.weights import bytes_of

R = TypeVar("R")

ENOUGH: Final = 3
"""In so many passes, all that were looked at, an attribute must have changed."""

MOST_PASSES: Final = 12
"""How many passes are looked at in one step: a model without steps of its own would be looked at for ever."""

MOST_ITEMS: Final = 64
"""Of a larger list, tuple or dict only the length and the identity count."""

MOST_DEPTH: Final = 3

LARGE_BYTES: Final = 1 << 20
"""Of a larger tensor or array only torch's count of writes and the identity count."""

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))

Print = object
"""What tells a value from another one: equal ones are equal values."""


@dataclass(slots=True)
class _Seen:
    """How often an attribute was looked at, and had changed, and whether it was the same object then."""

    num_passes: int = 0
    num_changes: int = 0
    is_same_object: bool = True


class PythonState:
    """What the modules of one model keep in Python.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._told: set[tuple[str, str]] = set()
        self._step = -1
        self._num_passes = 0

    def looks(self, step: int) -> bool:
        """Whether to look at the next pass of step ``step``, which is a checked one."""
        if step != self._step:
            self._step, self._num_passes = step, 0
            self._told.clear()
        return self._num_passes < MOST_PASSES

    def watch(self, forward: Callable[[], R]) -> R:
        """Call ``forward``, and see what it changes."""
        self._num_passes += 1
        before = {key: (it, _print_of(it)) for key, it in self._attributes()}
        result = forward()
        for key, now in self._attributes():
            if key in before:
                was, printed = before[key]
                seen = self._seen.setdefault(key, _Seen())
                seen.num_passes += 1
                if _has_changed(printed, _print_of(now)):
                    seen.num_changes += 1
                    seen.is_same_object &= now is was
                    self._judge(key, seen)
        return result

    def _attributes(self) -> Iterator[tuple[tuple[str, str], object]]:
        """The attributes of the program's own modules, with their paths and names."""
        for path, module in self._module.named_modules():
            if type(module).__module__.partition(".")[0] != "torch":
                for name, value in tuple(vars(module).items()):
                    if name not in _OF_EVERY_MODULE and not _is_computed(module, name):
                        yield (path, name), value

    def _judge(self, key: tuple[str, str], seen: _Seen) -> None:
        if seen.num_changes < ENOUGH or seen.num_changes < seen.num_passes or key in self._told:
            return
        self._told.add(key)
        path, name = key
        module = self._module.get_submodule(path)
        use = _first_use(module, "forward", name, set())
        if use == "write":
            return
        what = f"the attribute {name} of {type(module).__name__}" + (f" ({path})" if path else "")
        if use == "read" and (seen.is_same_object or _writes(module, "forward", name, set())):
            _faults.append(
                f"{what} changes in each forward pass, and the next pass reads it: an instance with several "
                "replicas changes it more often than one with a single one, so the result would depend on how "
                "the replicas are dealt to instances. Make a number or tensor a buffer (register_buffer), which "
                "belongs to the replica; change it once a step, outside of forward; hand a state that follows "
                "the samples to forward and return it; draw from torch's global generator in place of one of the "
                "module's own. popdist.init(checks='off') leaves out this check"
            )
        else:
            warnings.warn(
                f"{what} changes in each forward pass: if the next pass reads it, the result depends on how the "
                "replicas are dealt to instances",
                PopdistWarning,
                stacklevel=2,
            )


_faults: Final[list[str]] = []
"""What was found in any model, until the end of a step takes it."""


def take_fault() -> str | None:
    """What was found since this was called last, in words: the first of it."""
    fault = next(iter(_faults), None)
    _faults.clear()
    return fault


def _is_computed(module: nn.Module, name: str) -> bool:
    """Whether a hook makes the attribute anew from a parameter, as old spectral_norm and weight_norm do."""
    return any(parameter.startswith(f"{name}_") for parameter in module._parameters)  # noqa: SLF001 - of this module alone


def _print_of(value: object, depth: int = 0) -> Print:
    """What tells ``value`` from another one; None of what is no plain state, such as a function."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return (type(value).__name__, repr(value))
    if isinstance(value, Tensor):
        return _print_of_tensor(value)
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
        return _print_of_items(value, depth)
    return None


def _print_of_tensor(value: Tensor) -> Print:
    if value.requires_grad or value.layout != torch.strided or value.device.type == "meta":
        return None  # torch itself refuses a graph that is carried over
    if value.nbytes > LARGE_BYTES:
        return ("tensor", id(value), value._version)  # noqa: SLF001 - torch's only name for it
    return ("tensor", value.dtype, tuple(value.shape), _digest(bytes_of(value)))


def _print_of_items(value: Any, depth: int) -> Print:  # noqa: ANN401 - a list, tuple, deque or mapping
    if depth == MOST_DEPTH or len(value) > MOST_ITEMS:
        return ("many", len(value), id(value))
    if isinstance(value, Mapping):
        return {repr(key): _print_of(item, depth + 1) for key, item in value.items()}
    kind = tuple if isinstance(value, tuple) else list
    return kind(_print_of(item, depth + 1) for item in value)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _has_changed(before: Print, now: Print) -> bool:
    """Whether a value has changed; a list or dict that has only grown is a log or a cache."""
    if isinstance(before, list) and isinstance(now, list):
        return now[: len(before)] != before
    if isinstance(before, dict) and isinstance(now, dict):
        return any(key not in now or now[key] != it for key, it in before.items())
    return before != now


Use = Literal["read", "write"]


def _first_use(module: nn.Module, method: str, name: str, known: set[CodeType]) -> Use | None:
    """How ``method``, with the methods that it calls, uses the attribute first; None if it does not name it."""
    return next((use for use in _uses(module, method, known) if use[1] == name), (None, ""))[0]


def _writes(module: nn.Module, method: str, name: str, known: set[CodeType]) -> bool:
    return any(use == ("write", name) for use in _uses(module, method, known))


def _uses(module: nn.Module, method: str, known: set[CodeType]) -> Iterator[tuple[Use, str]]:
    """The attributes that a method reads and writes, in the order of its code, with those of methods it calls."""
    found = inspect.getattr_static(module, method, None)
    function: Any = found.fget if isinstance(found, property) else found
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if isinstance(code, CodeType) and (method == "forward" or not hasattr(nn.Module, method)):
        yield from _uses_of_code(module, code, known)


def _uses_of_code(module: nn.Module, code: CodeType, known: set[CodeType]) -> Iterator[tuple[Use, str]]:
    if code in known:
        return
    known.add(code)
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, CodeType):
            yield from _uses_of_code(module, instruction.argval, known)
        elif instruction.opname in ("STORE_ATTR", "DELETE_ATTR"):
            yield ("write", instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield ("read", instruction.argval)
            yield from _uses(module, instruction.argval, known)
