"""The buffers of all wrapped models, such as the statistics of BatchNorm, in a step that runs several replicas.

Every replica starts a step from the same buffers. After the step a floating-point buffer is the mean over all
replicas, and any other buffer has the value of replica 0. Buffers of other models are included, because the step
of a generator runs the discriminator. A buffer that a replica creates or reshapes is only compared.
"""

import hashlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from popdist.errors import WeightsError, name_first
from popdist.exchange.groups import Group
from popdist.gradients.flat_buffers import FlatTensors, RepeatedSum, add_flat, flatten, unflatten, wide_dtype
from popdist.ground.layout import ReplicaLayout
from popdist.ground.local_tensors import local_part
from popdist.ground.torch_private import num_writes
from popdist.ground.tree import TreeSum
from popdist.job.weights import sums_of

R = TypeVar("R")

Kind: TypeAlias = tuple[torch.device, torch.dtype]
"""The device of a buffer and the dtype of its sum. Buffers of the same kind are added together."""

LARGE: Final = 1 << 16
"""A buffer with more elements is large. If torch has counted no write, only checked steps compare the buffer."""

_NEVER: Final = -1
"""A number of writes that no tensor has: a buffer with this number counts as written."""


@dataclass(slots=True, kw_only=True)
class ModelBuffer:
    """One buffer of a model: its module, its tensor, and a copy of the tensor from the beginning of a step."""

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor  # may be a DTensor; only the local part of a DTensor is used
    version: int  # torch's count of writes when the buffer was last equal to ``start``
    start: Tensor  # a copy from the beginning of the step
    is_uncounted: bool = False  # whether a program wrote the buffer through ``.data``, which torch does not count

    @property
    def is_unwritten(self) -> bool:
        """Whether this buffer is large, and torch has counted no write to the buffer since it was copied."""
        # Some operations write to small buffers and are not counted, such as BatchNorm.
        if self.is_uncounted or self.start.numel() <= LARGE:
            return False
        return num_writes(self.tensor) == self.version

    @property
    def is_of_same_form(self) -> bool:
        """Whether the copy ``start`` has the shape, dtype and device that the buffer has now."""
        now, start = local_part(self.tensor), self.start
        return now.shape == start.shape and now.dtype == start.dtype and now.device == start.device

    def now(self) -> Tensor | None:
        """Return the module's present tensor of this buffer; None if it is gone or has another shape or dtype."""
        now = getattr(self.owner, self.key, None)
        if not isinstance(now, Tensor):
            return None
        now = local_part(now)
        if now.shape != self.start.shape or now.dtype != self.start.dtype:
            return None
        return now

    def set(self, value: Tensor) -> None:
        """Write ``value`` into the tensor that the buffer had at the step's start, and restore this tensor."""
        local_part(self.tensor).copy_(value)
        if getattr(self.owner, self.key, None) is not self.tensor:
            setattr(self.owner, self.key, self.tensor)
        self.version = num_writes(self.tensor)

    def assign(self, value: Tensor) -> None:
        """Write ``value`` into the buffer, and mark the buffer as changed since the beginning of the step."""
        self.set(value)
        self.version = _NEVER


def _dtype_of_sum(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sum of buffers of ``dtype`` over replicas: int64; for floats, float32 or float64."""
    return wide_dtype(dtype) if dtype.is_floating_point or dtype.is_complex else torch.int64


def find_changed(buffers: Mapping[str, ModelBuffer], *, all_of_them: bool = False) -> dict[str, Tensor]:
    """Return, by name, the buffers that this step has changed. Skip large buffers that torch's version counter
    shows as unwritten, unless ``all_of_them`` is true.
    """
    found: dict[str, Tensor] = {}
    others: dict[str, tuple[Tensor, Tensor]] = {}  # on accelerators: compared together, because a wait costs time
    for name, buffer in buffers.items():
        now = buffer.now()
        if now is None or (not all_of_them and now is buffer.tensor and buffer.is_unwritten):
            continue
        if not now.is_cpu:
            others[name] = now, buffer.start
        elif not torch.equal(now, buffer.start) and _has_other_bits(now, buffer.start):
            found[name] = now
    found |= {name: others[name][0] for name in _changed_on_accelerators(others)}
    for name, now in found.items():
        buffers[name].is_uncounted |= now is buffers[name].tensor and buffers[name].is_unwritten
    return found


def _changed_on_accelerators(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> list[str]:
    """Return the names of those ``pairs`` (buffer, copy) that differ; wait for an accelerator once per dtype."""
    kinds: dict[Kind, list[str]] = {}
    for name, (now, _) in pairs.items():
        if now.numel():
            kinds.setdefault((now.device, now.dtype), []).append(name)
    found = []
    for names in kinds.values():
        now, start = (torch.cat([pairs[name][side].reshape(-1) for name in names]) for side in (0, 1))
        ends = torch.tensor([pairs[name][0].numel() for name in names], dtype=torch.int64, device="cpu").cumsum(0)
        counts = _other_bits(now, start).cumsum(0)[ends.to(now.device) - 1].tolist()
        found += [name for name, last, count in zip(names, [0, *counts], counts, strict=False) if count > last]
    return found


def mark_of(tensor: Tensor) -> tuple[int, int]:
    """Return the Python id of ``tensor`` and torch's count of writes to it: a later change changes one of them."""
    return id(tensor), num_writes(tensor)


class ReplicaBuffers:
    """The buffers of one model, which each replica changes separately in a step. During the model's step they
    include the buffers of all other models that run no step of their own.
    """

    def __init__(self, module: nn.Module, label: str | None) -> None:
        self.module = module
        self.buffers: dict[str, ModelBuffer] = {}  # by name; a tied buffer occurs once
        # Marks of buffers that a replica has created or reshaped: a step ignores them until their mark changes.
        self.apart: dict[str, tuple[int, int] | None] = {}
        self._described: tuple[list[int], str] = ([], "no buffers")
        self.label = label  # equal on all instances; None for a model that only some instances have
        self.is_in_step = False
        self.fault: str | None = None
        self._others: dict[str, ReplicaBuffers] = {}
        self._tracked: dict[str, ModelBuffer] = {}
        self._copies: list[dict[str, Tensor] | None] = []
        self._outside: dict[str, Tensor] = {}
        self._sum = RepeatedSum()
        self.is_checked = False
        if label is not None:
            _models[label] = weakref.ref(self)

    def __str__(self) -> str:
        """Return the number of buffers and a digest of names, dtypes and shapes, to compare between instances."""
        key = [id(buffer.tensor) for buffer in self.buffers.values()]
        if key != self._described[0]:
            forms = [f"{name} {it.start.dtype} {tuple(it.start.shape)}" for name, it in self.buffers.items()]
            digest = hashlib.blake2b("\n".join(forms).encode(), digest_size=4).hexdigest()
            self._described = (key, f"{len(forms)} buffers, names and shapes {digest}")
        return self._described[1]

    @property
    def has_none(self) -> bool:
        """Whether the module has no buffers now, and had none when :meth:`remember` last copied its buffers."""
        return not self.buffers and next(self.module.buffers(), None) is None

    def found(self) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
        """Yield every buffer that the model has now: its full name, its module, its name there, its tensor."""
        for path, owner in self.module.named_modules():
            for key, tensor in owner.named_buffers(recurse=False, remove_duplicate=False):
                yield f"{path}.{key}" if path else key, owner, key, tensor

    def remember(self, *, is_checked: bool = False) -> list[str]:
        """Copy every buffer. If instances compare buffers in this step (``is_checked``), return the names of large
        buffers that differ from their last copy although torch has counted no write.
        """
        if self.has_none:
            return []
        known = {id(buffer.tensor): buffer for buffer in self.buffers.values()}
        seen: set[int] = set()
        self.buffers, faults = {}, []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, owner, key, tensor in self.found():
            if id(tensor) in seen or tensor.layout != torch.strided or is_lazy(tensor):
                continue
            seen.add(id(tensor))
            if name in self.apart:
                self.apart[name] = mark_of(tensor)
                continue
            buffer = known.get(id(tensor))
            if buffer is None or not buffer.is_of_same_form:
                start = local_part(tensor).detach().clone()
                buffer = ModelBuffer(
                    name=name, owner=owner, key=key, tensor=tensor, version=num_writes(tensor), start=start
                )
            elif not buffer.is_unwritten:
                buffer.name, buffer.owner, buffer.key = name, owner, key
                buffer.version = num_writes(tensor)
                targets.append(buffer.start)
                sources.append(local_part(tensor))
            elif is_checked and not torch.equal(buffer.start, local_part(tensor)):
                faults.append(name)
            self.buffers[name] = buffer
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)  # one call: four times faster than copies one by one
        return faults

    def begin_step(self, *, is_checked: bool = False) -> None:
        """Begin a step: copy the buffers of all models, so that every replica starts from the same values."""
        written = self.written_outside()
        self.fault = None if not written else _outside_fault(written, self.module)
        self._outside = {name: self._outside[name] for name in written}
        self._begin(self._idle_models(), is_checked=is_checked)
        self.is_in_step = True
        for other in _all_models():
            if other is not self:
                other.leave_out(self)

    def _idle_models(self) -> list["ReplicaBuffers"]:
        """Return the other models that all instances have and that are not in a step at the moment."""
        return [it for it in _all_models() if it is not self and not it.is_in_step]

    def other_modules(self) -> list[nn.Module]:
        """Return the torch modules of all other models of this process that every instance also has."""
        return [it.module for it in _all_models() if it is not self]

    def begin_pass(self) -> None:
        """Copy all models' buffers before a forward pass outside of the micro batches, to find later changes."""
        self._begin([], is_checked=False)
        for other in self._idle_models():
            other.remember()

    def _begin(self, others: Iterable["ReplicaBuffers"], *, is_checked: bool) -> None:
        self._copies = []
        self.is_checked = is_checked
        uncounted = self.remember(is_checked=is_checked)
        self._tracked = dict(self.buffers)
        self._others = {}
        seen = {id(buffer.tensor) for buffer in self.buffers.values()}
        for other in others:
            uncounted += [
                f"{name} of {type(other.module).__name__}" for name in other.remember(is_checked=is_checked)
            ]
            self._track(other, seen)
        if uncounted and self.fault is None:
            self.fault = _uncounted_fault(uncounted)

    def _track(self, other: "ReplicaBuffers", seen: set[int]) -> None:
        self._others[str(other.label)] = other
        for name, buffer in other.buffers.items():
            if id(buffer.tensor) not in seen:
                seen.add(id(buffer.tensor))
                self._tracked[f"{other.label} {name}"] = buffer

    def leave_out(self, other: "ReplicaBuffers") -> None:
        """Remove the buffers of the model ``other`` from this step, because a step of ``other`` begins."""
        if self._others.pop(str(other.label), None) is not None:
            self._tracked = {key: it for key, it in self._tracked.items() if not key.startswith(f"{other.label} ")}
            own = set(self._tracked)
            self._copies = [it and {key: value for key, value in it.items() if key in own} for it in self._copies]

    def end_step(self) -> None:
        """Record that this model's step has ended, so that the steps of other models include its buffers again."""
        self.is_in_step = False

    def end_replica(self, *, has_run: bool) -> None:
        """Save the buffers that the current replica changed, and restore them for this instance's next replica."""
        self._copies.append(self.store() if has_run else None)

    def store(self) -> dict[str, Tensor]:
        """Return copies of the buffers that the current replica changed; reset these to the step's start."""
        changed = find_changed(self._tracked, all_of_them=self.is_checked)
        if not changed:
            return {}
        with torch.no_grad():
            copies = {key: now.clone() for key, now in changed.items()}
            for key in changed:
                self._tracked[key].set(self._tracked[key].start)
        return copies

    @torch.no_grad()
    def load(self, copies: Mapping[str, Tensor]) -> None:
        """Write ``copies``, which :meth:`store` returned, into the buffers, so that a replica can continue."""
        for key, value in copies.items():
            self._tracked[key].assign(value)

    def end_pass(self) -> None:
        """End a forward pass outside of the micro batches: keep the changed buffers as a replica's changes."""
        seen = {id(buffer.tensor) for buffer in self._tracked.values()}
        for other in self._idle_models():
            self._track(other, seen)
            other.clear_outside_writes()
        self.clear_outside_writes()
        self.end_replica(has_run=True)

    @torch.no_grad()
    def undo(self) -> None:
        """Set all buffers back to their values at the step's start; discard the changes of all replicas."""
        for key in find_changed(self._tracked, all_of_them=self.is_checked):
            self._tracked[key].set(self._tracked[key].start)
        self._copies = []

    @property
    def start_sums(self) -> list[tuple[str, int]]:
        """Names and checksums of this model's buffers at the step's start, if instances compare buffers in this
        step (``is_checked``); otherwise empty.
        """
        if not self.is_checked:
            return []
        starts = {name: it.start for name, it in self.buffers.items() if type(it.start) is Tensor}
        return list(zip(starts, sums_of(starts.values()), strict=True))

    def changed(self) -> tuple[int, list[str]]:
        """Return the buffers that the step changed: this model's as a bit mask, other models' by their names."""
        keys = set().union(*filter(None, self._copies))
        if not keys:
            return 0, []
        own = sum(1 << i for i, name in enumerate(self.buffers) if name in keys)
        return own, sorted(keys - set(self.buffers))

    def irregular_now(self) -> dict[str, Tensor | None]:
        """Return, by name, the buffers that a replica created, removed (value None), or gave another shape or
        dtype: these buffers have no mean over the replicas.
        """
        found: dict[str, Tensor | None] = {}
        for label, model in {"": self, **self._others}.items():
            if model.has_none:
                continue
            prefix = f"{label} " if label else ""
            places = {(id(buffer.owner), buffer.key): buffer for buffer in model.buffers.values()}
            tensors = {id(buffer.tensor) for buffer in model.buffers.values()}
            for name, owner, key, tensor in model.found():
                buffer = places.pop((id(owner), key), None)
                if buffer is not None and buffer.now() is not None:
                    continue
                if buffer is None and (id(tensor) in tensors or tensor.layout != torch.strided):
                    continue
                if name not in model.apart or model.apart[name] != mark_of(tensor):
                    found[prefix + name] = tensor
            found |= {f"{prefix}{buffer.name}": None for buffer in places.values()}
        return found

    def set_apart(self, keys: Iterable[str]) -> None:
        """Compute no mean of the buffers ``keys`` from now on; if they change, compare them between instances."""
        for key in keys:
            model, name = self._model_of(key)
            model.apart[name] = None

    def tensor_of(self, key: str) -> Tensor | None:
        """Return the present tensor of the buffer ``key`` (a name); None if there is no such buffer now."""
        model, name = self._model_of(key)
        return next((tensor for other, _, _, tensor in model.found() if other == name), None)

    def describe(self, key: str) -> str:
        """Return the buffer's name for an error message; for a buffer of another model, add the model's class."""
        model, name = self._model_of(key)
        return name if model is self else f"{name} of {type(model.module).__name__}"

    def _model_of(self, key: str) -> tuple["ReplicaBuffers", str]:
        label, _, name = key.rpartition(" ")
        return (self._others[label] if label else self), name

    @property
    def labels(self) -> list[str]:
        """The sorted labels (names equal on all instances) of the other models whose buffers this step copies."""
        return sorted(self._others)

    @torch.no_grad()
    def combine(self, group: Group, layout: ReplicaLayout, own: int, others: Iterable[str]) -> None:
        """Set each changed buffer to the mean over all replicas, or if not floating-point, to replica 0's value.
        All instances must pass the same ``own`` (a bit mask) and ``others`` (keys) of changed buffers.
        """
        kinds: dict[Kind, list[str]] = {}
        for key in [name for i, name in enumerate(self.buffers) if own >> i & 1] + sorted(others):
            start = self._tracked[key].start
            kinds.setdefault((start.device, _dtype_of_sum(start.dtype)), []).append(key)
        first = layout.replicas_of(group.backend.instance_index).start
        tree: TreeSum[FlatTensors] = TreeSum(layout.num_replicas, add_flat, start=first)
        for replica, copies in enumerate(self._copies, first):
            tree.push([self._term(kind, keys, copies, replica) for kind, keys in kinds.items()])
        for keys, total in zip(kinds.values(), self._sum.finish(group, layout, tree.nodes), strict=True):
            flat = total[:-1] / total[-1] if total.is_floating_point() else total[:-1]
            values = unflatten(flat, [self._tracked[key].start for key in keys])
            for key, value in zip(keys, values, strict=True):
                self._tracked[key].assign(value)

    def _term(self, kind: Kind, keys: Sequence[str], copies: Mapping[str, Tensor] | None, replica: int) -> Tensor:
        """Return what a replica adds to the sum of buffers, as one flat tensor: its buffers and the number 1, to
        count replicas. Return zeros for a replica without samples, or for integers unless it is replica 0.
        """
        device, dtype = kind
        one = torch.ones(1, dtype=dtype, device=device)
        flat = flatten([*((copies or {}).get(key, self._tracked[key].start) for key in keys), one], dtype)
        counts = copies is not None if dtype.is_floating_point else replica == 0
        return flat if counts else flat.zero_()

    def run_outside(self, forward: Callable[[], R]) -> R:
        """Call ``forward``, a training pass outside of all micro batches; copy the buffers that it changed."""
        if not self._outside:
            self._begin([], is_checked=False)
        try:
            return forward()
        finally:
            with torch.no_grad():
                self._outside = {name: it.clone() for name, it in find_changed(self.buffers).items()}

    def clear_outside_writes(self) -> None:
        """Forget writes to buffers outside of the micro batches, so that no WeightsError is raised for them."""
        self._outside = {}

    def written_outside(self) -> list[str]:
        """Return the names of buffers that still have the value that a training pass outside of a step wrote."""
        now = {name: self.buffers[name].now() for name in self._outside}
        return [name for name, value in self._outside.items() if _has_same_bits(now[name], value)]


_num_copies: Final[Counter[str]] = Counter()


def label_of_copy(label: str | None) -> str | None:
    """Return a name for the next copy of the model ``label``, such as ``label.1``; None if ``label`` is None."""
    if label is None:
        return None
    _num_copies[label] += 1
    return f"{label}.{_num_copies[label]}"


def check_buffers(module: nn.Module) -> None:
    """Raise WeightsError if a forward pass outside of the micro batches has written a buffer in ``module``."""
    for model in _models_in(module):
        if written := model.written_outside():
            raise WeightsError(_outside_fault(written, model.module))


def accept_buffers(module: nn.Module) -> None:
    """Accept the current buffers of all wrapped models in ``module``, because they are equal on all instances."""
    for model in _models_in(module):
        model.clear_outside_writes()


def _models_in(module: nn.Module) -> list["ReplicaBuffers"]:
    inside = set(module.modules())
    return [model for model in _all_models() if model.module in inside]


_models: Final[dict[str, "weakref.ref[ReplicaBuffers]"]] = {}
"""The wrapped models of this process, by label, in the order in which they were created."""


def _all_models() -> Iterator[ReplicaBuffers]:
    """Yield the buffers of each wrapped model of this process that still exists, the newest model first."""
    for label, reference in reversed(tuple(_models.items())):
        model = reference()
        if model is None:
            del _models[label]
        else:
            yield model


def _has_same_bits(left: Tensor | None, right: Tensor) -> bool:
    """Whether two tensors have the same shape, device and elements; NaN counts as equal to NaN."""
    if left is None or left.shape != right.shape or left.device != right.device:
        return False
    return not _has_other_bits(left, right)


def _has_other_bits(left: Tensor, right: Tensor) -> Tensor:
    """Return a tensor with one bool: whether two tensors of the same shape differ; NaN equals NaN here."""
    return _other_bits(left, right).any()


def _other_bits(left: Tensor, right: Tensor) -> Tensor:
    """Return a tensor of bools: the elements in which two tensors of the same shape differ; NaN equals NaN."""
    return (left != right) & ((left == left) | (right == right))  # noqa: PLR0124 - only NaN differs from itself


def _outside_fault(names: list[str], module: nn.Module) -> str:
    return (
        f"{name_first(names)} of {type(module).__name__} was written by a forward pass in training mode outside "
        "of all micro batches, on what one instance has: so it would differ between instances, or depend on how "
        "the replicas are dealt to them. Call model.eval() before such a pass, or make it within a loop over "
        "micro batches; popdist.update_bn(loader, model) makes the statistics of BatchNorm anew. To go on, load "
        "the buffers as they were: model.load_state_dict(...)"
    )


def _uncounted_fault(names: list[str]) -> str:
    return (
        f"{name_first(names)} was written through .data, which torch does not count, after the first steps: so it "
        f"was not noticed, and differs between replicas. Write large buffers (above {LARGE} numbers) in place "
        "under torch.no_grad(), and not through .data"
    )
