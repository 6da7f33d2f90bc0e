"""What the first call of a model fixes, the check of later calls against it, and the split into micro batches."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from poptorch.custom_types import Structure, flatten, unflatten
from poptorch.errors import Error
from poptorch.options import Options
from poptorch.options.combined_batch import count_parts, parts_of_micro_batches

_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_CPU: Final = torch.device("cpu")
_ALIGNMENT_BYTES: Final = 64  # where torch's allocator begins a tensor

_STARRED: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _Form(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


MicroBatch = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of one forward, by position and by name


class _Parameters:
    def __init__(self, forward: Callable[..., Any]) -> None:
        found = _parameters_of(forward)
        empty = inspect.Parameter.empty
        self.positional = [one.name for one in found if one.kind in _POSITIONAL]
        self.defaults = {one.name: one.default for one in found if one.default is not empty}
        self.mandatory = [one.name for one in found if one.default is empty and one.kind not in _STARRED]
        self.starred = next((one.name for one in found if one.kind is inspect.Parameter.VAR_POSITIONAL), None)
        self.takes_any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name; the first one of ``*args`` is called ``args[0]``."""
        bound = dict(zip(self.positional, args, strict=False))
        for place, value in enumerate(args[len(self.positional) :]):
            bound[f"{self.starred or 'args'}[{place}]"] = value
        if kwargs:
            if twice := [name for name in kwargs if name in bound]:
                raise Error(f"Arguments given by position and by name: {', '.join(twice)}.")
            bound.update(kwargs)
        return bound

    def check_first(self, args: tuple[Any, ...], bound: dict[str, Any]) -> None:
        """Refuse what ``forward`` cannot be called with; where it has ``*args``, Python itself does."""
        if self.starred is not None:
            return
        for name in self.mandatory:
            if name not in bound:
                raise Error(f"Mandatory parameter {name} missing: forward takes it, and has no default for it")
        if len(args) > len(self.positional):
            raise Error(
                f"Too many arguments: forward takes {len(self.positional)} by position and was given {len(args)}"
            )
        known = {*self.positional, *self.mandatory, *self.defaults}
        if not self.takes_any_name and (unknown := [name for name in bound if name not in known]):
            raise Error(f"Unexpected arguments: {', '.join(unknown)}. forward has no such parameters")


def _parameters_of(forward: Any) -> list[inspect.Parameter]:
    if not isinstance(forward, torch.ScriptMethod):
        return [*inspect.signature(forward).parameters.values()]
    return [
        inspect.Parameter(
            *(one.name, inspect.Parameter.POSITIONAL_OR_KEYWORD),
            default=one.default_value if one.has_default_value() else inspect.Parameter.empty,
        )
        for one in forward.schema.arguments[1:]  # without self
    ]


class CallArguments:
    """What the first call fixes for later ones: structure, shapes, dtypes, and values that are no tensors."""

    def __init__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],  # of the first call, by position
        kwargs: dict[str, Any],  # of the first call, by name
        options: Options,
        device: torch.device = _CPU,  # where the model begins, to which the micro batches are moved
    ) -> None:
        self._device = device
        self._parameters = parameters = _Parameters(forward)
        self._num_parts = count_parts(options)
        self._part_of_each = parts_of_micro_batches(options)
        self._num_positional = len(args)
        bound = parameters.bind(args, kwargs)
        parameters.check_first(args, bound)
        self._given = frozenset(bound)
        self._defaults = {name: _default(value) for name, value in parameters.defaults.items()}
        self._tensor_defaults = {
            name: value
            for name, value in parameters.defaults.items()
            if isinstance(value, Tensor) and name not in bound
        }
        tensors: list[Tensor] = []
        given = {name: flatten(value, tensors) for name, value in bound.items()}
        self._first = given | {name: it for name, it in self._defaults.items() if name not in bound}
        self._forms = [_Form(tensor.shape, tensor.dtype) for tensor in tensors]
        are_tensors = all(self._first[name].kind is Tensor for name in bound)
        self._is_whole = self._num_parts == 1 and are_tensors and not kwargs and device == _CPU
        for path, (_, detail) in _listed(self._first, self._forms).items():
            if isinstance(detail, _Form):
                _check_size(path, detail.shape, options)

    def micro_batches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MicroBatch]:
        """Check a call, and split its tensors along dim 0, by iteration, step of accumulation and replica."""
        if self._is_whole and not kwargs and len(args) == len(self._forms) and all(map(_fits, args, self._forms)):
            return [(args, kwargs)]  # which is most of a small model's calls, and fast
        bound = self._parameters.bind(args, kwargs)
        late = {name: self._split(bound.pop(name)) for name in self._late_tensors(bound)}
        structures, tensors = self._read(args, bound)
        split = [*map(self._split, tensors)]
        names = tuple(bound)
        num_positional = self._num_positional if late else len(args)
        made: list[MicroBatch] = []
        for part in self._part_of_each:
            parts = iter([pieces[part] for pieces in split])
            values = {name: unflatten(structures[name], parts) for name in self._first if name in bound}
            by_position = tuple(values[name] for name in names[:num_positional])
            by_name = {name: values[name] for name in names[num_positional:]}
            made.append((by_position, by_name | {name: pieces[part] for name, pieces in late.items()}))
        return made

    def _split(self, tensor: Tensor) -> list[Tensor]:
        """The part of ``tensor`` that each part of the batch gets."""
        tensor = (tensor.detach() if tensor.requires_grad else tensor).to(
            self._device, non_blocking=self._device.type != "cpu"
        )
        if not tensor.dim():
            return [tensor] * self._num_parts
        return [*map(_aligned, tensor.split(tensor.shape[0] // self._num_parts))]

    def _late_tensors(self, bound: dict[str, Any]) -> list[str]:
        """The arguments that the first call left at their default, a tensor, and this one gives; of its form."""
        late = [name for name in bound if name in self._tensor_defaults and isinstance(bound[name], Tensor)]
        for name in late:
            default, found = self._tensor_defaults[name], bound[name]
            shape = (default.shape[0] * self._num_parts, *default.shape[1:]) if default.dim() else ()
            expected = Tensor, _Form(torch.Size(shape), default.dtype)
            given = Tensor, _Form(found.shape, found.dtype)
            if expected != given:
                raise Error(_in_words(name, expected, given))
        return late

    def _read(self, args: tuple[Any, ...], bound: dict[str, Any]) -> tuple[dict[str, Structure], list[Tensor]]:
        """Structures by name, and all tensors, in the order of the first call."""
        tensors: list[Tensor] = []
        found = {
            name: flatten(bound[name], tensors, like=expected) if name in bound else self._defaults.get(name)
            for name, expected in self._first.items()
        }
        structures = {name: structure for name, structure in found.items() if structure is not None}
        forms = [_Form(tensor.shape, tensor.dtype) for tensor in tensors]
        if (
            forms == self._forms
            and bound.keys() <= structures.keys() == self._first.keys()
            and all(_is_alike(expected, structures[name]) for name, expected in self._first.items())
        ):
            return structures, tensors
        raise Error(self._difference(len(args), bound, structures, forms))

    def _difference(
        self, num_positional: int, bound: dict[str, Any], structures: dict[str, Structure], forms: list[_Form]
    ) -> str:
        expected, found = _listed(self._first, self._forms), _listed(structures, forms)
        lines = []
        if num_positional != self._num_positional:
            lines.append(
                f"Number of positional arguments mismatch: expected {self._num_positional} arguments but got "
                f"{num_positional}."
            )
        changed = {path for path in expected if path in found and not _is_equal(expected[path], found[path])}
        missing = [path for path in self._given if path not in bound and (path not in found or path in changed)]
        missing += [path for path in expected if path not in found and path not in missing]
        unexpected = [
            path for path in bound if path not in self._given and (path not in expected or path in changed)
        ]
        unexpected += [path for path in found if path not in expected and path not in unexpected]
        lines += [f"Missing arguments: {', '.join(sorted(missing))}."] if missing else []
        lines += [f"Unexpected arguments: {', '.join(sorted(unexpected))}."] if unexpected else []
        lines += [_in_words(path, expected[path], found[path]) for path in expected if path in changed]
        return f"{' '.join(lines)} The first call fixes all arguments but the values of tensors, until destroy()."


def _aligned(piece: Tensor) -> Tensor:
    """``piece``, or a copy that begins where torch's own tensors do: the bits of products depend on it."""
    return piece if piece.data_ptr() % _ALIGNMENT_BYTES == 0 else piece.clone()


def _fits(value: Any, form: _Form) -> bool:
    return (
        type(value) is Tensor
        and value.shape == form.shape
        and value.dtype is form.dtype
        and not value.requires_grad
    )


def _default(value: Any) -> Structure:
    """A default of ``forward``: one that holds tensors is a constant as a whole."""
    tensors: list[Tensor] = []
    structure = flatten(value, tensors)
    return Structure(None, value) if tensors else structure


def _check_size(path: str, shape: torch.Size, options: Options) -> None:
    if 0 in shape:
        raise Error(f"Zero-sized tensors are unsupported (Got shape {list(shape)} for {path})")
    if shape and shape[0] % (num_parts := count_parts(options)):
        replicas = f"Options.replicationFactor({options.replication_factor})"
        raise AssertionError(
            f"Invalid batch dimension: the first dimension of {path} ({shape[0]}) must be a multiple of "
            f"Options.deviceIterations({options.device_iterations}) * "
            f"({replicas} // Options.inputReplicaGrouping({options.input_group_size})) * "
            f"Options.Training.gradientAccumulation({options.Training.gradient_accumulation}) = {num_parts}, so "
            "that each micro batch has as many samples"
        )


def _is_alike(expected: Structure, found: Structure) -> bool:
    """Whether two calls' structures are the same, but for tensors and registered objects."""
    if expected is found:
        return True
    if expected.kind is not found.kind or expected.names != found.names or len(expected.parts) != len(found.parts):
        return False
    if expected.kind is None:
        return _is_equal((None, expected.value), (None, found.value))
    return all(map(_is_alike, expected.parts, found.parts))


def _is_equal(expected: tuple[object, object], found: tuple[object, object]) -> bool:
    (kind, detail), (other_kind, other) = expected, found
    return kind is other_kind and (detail is other or (type(detail) is type(other) and bool(detail == other)))


def _listed(structures: dict[str, Structure], forms: Sequence[_Form]) -> dict[str, tuple[Any, Any]]:
    """Each part's path → its type and what is fixed of it: a tensor's form, a container's length, or the value."""
    remaining = iter(forms)
    return {path: entry for name, part in structures.items() for path, entry in _entries(name, part, remaining)}


def _entries(path: str, structure: Structure, forms: Iterator[_Form]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if structure.kind is Tensor:
        yield path, (Tensor, next(forms))
    elif structure.kind is None:
        yield path, (type(structure.value), structure.value)
    else:
        yield path, (structure.kind, len(structure.parts))
        names = structure.names or range(len(structure.parts))
        for name, part in zip(names, structure.parts, strict=True):
            yield from _entries(f"{path}[{name!r}]", part, forms)


def _in_words(path: str, expected: tuple[Any, Any], found: tuple[Any, Any]) -> str:
    (kind, detail), (other_kind, other) = expected, found
    if kind is not other_kind:
        return f"Type mismatch for {path}: expected {kind} but got {other_kind}."
    if isinstance(detail, _Form):
        if detail.dtype is not other.dtype:
            return f"Type mismatch for {path}: expected {detail.dtype} but got {other.dtype}."
        return f"Shape mismatch for {path}: expected {detail.shape} but got {other.shape}."
    return f"Value mismatch for {path}: expected {detail} but got {other}."
