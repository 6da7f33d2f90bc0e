"""The buffers of all wrapped models, such as statistics of BatchNorm, while replicas take turns on them.

Every replica starts a step from the same values. Afterwards a buffer of floats becomes the mean of what the
replicas made of it, added in the tree over all replicas, and any other buffer what replica 0 made of it; so they
are equal on all instances and have the same bits for any split. That holds in a step of any model for the buffers
of each: the step of a generator runs the discriminator, too. Only buffers that some replica has changed are added
and exchanged: a table of constants costs one copy, and a model without buffers nothing.

A buffer that a replica makes, or gives another shape or dtype, stays as it is: it is a table that grows, or a
state that nobody can combine. The instances compare what they have (`popdist.gradients.buffer_changes`).
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from popdist.errors import WeightsError
from popdist.gradients.exchange import ReplicaTree
from popdist.gradients.flat_buffers import flatten, unflatten, wide_dtype
from popdist.gradients.model_buffers import LARGE, ModelBuffer, ModelBuffers, find_changed, mark_of
from popdist.groups import Group
from popdist.layout import ReplicaLayout
from popdist.weights import broadcast_tensors, sums_of

R = TypeVar("R")


class ReplicaBuffers(ModelBuffers):
    """The buffers of a wrapped model and, in a step of it, those of all others that have no step at the moment.

    Args:
        module: The model.
        label: What the model is called on all instances; None for one that only some of them have.
    """

    def __init__(self, module: nn.Module, label: str | None) -> None:
        super().__init__(module)
        self.label = label
        self.is_in_step = False
        self.fault: str | None = None
        self._others: dict[str, ReplicaBuffers] = {}
        self._tracked: dict[str, ModelBuffer] = {}
        self._made: list[dict[str, Tensor] | None] = []
        self._outside: dict[str, Tensor] = {}
        self.is_checked = False
        if label is not None:
            _models[label] = weakref.ref(self)

    def begin_step(self, *, is_checked: bool = False) -> None:
        """Remember what every replica starts from, of all models.

        Args:
            is_checked: Whether to compare large buffers, too, of which torch has counted no write.
        """
        written = self.written_outside()
        self.fault = None if not written else _outside_fault(written, self.module)
        self._outside = {name: self._outside[name] for name in written}
        others = _others_than(self)
        self._begin([it for it in others if not it.is_in_step], is_checked=is_checked)
        self.is_in_step = True
        for other in others:
            other.leave_out(self)

    def other_modules(self) -> list[nn.Module]:
        """The modules of the other models that all instances have."""
        return [other.module for other in _others_than(self)]

    def begin_pass(self) -> None:
        """Remember what the next pass outside of the micro batches starts from, of this and all other models."""
        self._begin([], is_checked=False)
        for other in _others_than(self):
            if not other.is_in_step:
                other.remember()

    def _begin(self, others: Iterable["ReplicaBuffers"], *, is_checked: bool) -> None:
        self._made = []
        self.is_checked = is_checked
        uncounted = self.remember(is_checked=is_checked)
        self._tracked = dict(self.buffers)
        self._others = {}
        seen = {id(buffer.tensor) for buffer in self.buffers.values()}
        for other in others:
            uncounted += [f"{name} of {_kind(other.module)}" for name in other.remember(is_checked=is_checked)]
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
        """The step of ``other`` begins: its buffers no longer belong to this step."""
        if self._others.pop(str(other.label), None) is not None:
            self._tracked = {key: it for key, it in self._tracked.items() if not key.startswith(f"{other.label} ")}
            own = set(self._tracked)
            self._made = [it and {key: value for key, value in it.items() if key in own} for it in self._made]

    def end_step(self) -> None:
        """The step has ended, with a gradient or without."""
        self.is_in_step = False

    def end_replica(self, *, has_run: bool) -> None:
        """Keep what the next local replica made of the buffers, and put them back for the one after it."""
        self._made.append(self.park() if has_run else None)

    def park(self) -> dict[str, Tensor]:
        """What the replica that computes has made of the buffers, by key; they hold what the step began with."""
        changed = find_changed(self._tracked, all_of_them=self.is_checked)
        if not changed:
            return {}
        with torch.no_grad():
            made = {key: now.clone() for key, now in changed.items()}
            for key in changed:
                self._tracked[key].set(self._tracked[key].start)
        return made

    @torch.no_grad()
    def resume(self, made: Mapping[str, Tensor]) -> None:
        """Let a replica go on with what :meth:`park` took away."""
        for key, value in made.items():
            self._tracked[key].become(value)

    def end_pass(self) -> None:
        """The pass outside of the micro batches has ended: also what was written in other models is its."""
        seen = {id(buffer.tensor) for buffer in self._tracked.values()}
        for other in _others_than(self):
            if not other.is_in_step:
                self._track(other, seen)
                other.forgive()
        self.forgive()
        self.end_replica(has_run=True)

    @torch.no_grad()
    def undo(self) -> None:
        """Put back what the step began with."""
        for key in find_changed(self._tracked, all_of_them=self.is_checked):
            self._tracked[key].set(self._tracked[key].start)
        self._made = []

    @property
    def start_sums(self) -> list[tuple[str, int]]:
        """In a checked step, the model's own buffers by name with a checksum of what each was when it began."""
        if not self.is_checked:
            return []
        starts = {name: it.start for name, it in self.buffers.items() if type(it.start) is Tensor}
        return list(zip(starts, sums_of(starts.values()), strict=True))

    def changed(self) -> tuple[int, list[str]]:
        """The buffers that the local replicas have changed: bit i for the i-th own one, and keys of others."""
        keys = set().union(*filter(None, self._made))
        if not keys:
            return 0, []
        own = sum(1 << i for i, name in enumerate(self.buffers) if name in keys)
        return own, sorted(keys - set(self.buffers))

    def irregular_now(self) -> dict[str, Tensor | None]:
        """The buffers, by key, that a replica has made, taken away, or given another shape or dtype."""
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
                is_new = tensor is not None and id(tensor) not in tensors and tensor.layout == torch.strided
                if buffer is None and not is_new:
                    continue
                if name not in model.apart or model.apart[name] != mark_of(tensor):
                    found[prefix + name] = tensor
            found |= {f"{prefix}{buffer.name}": None for buffer in places.values()}
        return found

    def set_apart(self, keys: Iterable[str]) -> None:
        """From now on leave these buffers alone, unless they change again."""
        for key in keys:
            model, name = self._model_of(key)
            model.apart[name] = None

    def tensor_of(self, key: str) -> Tensor | None:
        """The buffer that is there now, if there is one."""
        model, name = self._model_of(key)
        return next((tensor for other, _, _, tensor in model.found() if other == name), None)

    def describe(self, key: str) -> str:
        """The buffer in words."""
        model, name = self._model_of(key)
        return name if model is self else f"{name} of {_kind(model.module)}"

    def _model_of(self, key: str) -> tuple["ReplicaBuffers", str]:
        label, _, name = key.rpartition(" ")
        return (self._others[label] if label else self), name

    @property
    def labels(self) -> list[str]:
        """What the other models are called whose buffers belong to this step."""
        return sorted(self._others)

    @torch.no_grad()
    def combine(self, group: Group, layout: ReplicaLayout, own: int, others: Iterable[str]) -> None:
        """Give the changed buffers, the same on all instances, what all replicas made of them."""
        keys = [name for i, name in enumerate(self.buffers) if own >> i & 1] + sorted(others)
        averages = [key for key in keys if self._tracked[key].is_average]
        if averages:
            self._average(group, layout, averages)
        if rest := sorted(set(keys) - set(averages)):
            self._take_from_replica_0(group, layout, rest)

    def _average(self, group: Group, layout: ReplicaLayout, keys: list[str]) -> None:
        """The mean over the replicas that had a micro batch: each brings its values, and a 1 to be counted."""
        starts = [self._tracked[key].start for key in keys]
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, start in enumerate(starts):
            groups.setdefault((start.device, wide_dtype(start.dtype)), []).append(i)
        tree = ReplicaTree(group, layout)
        for made in self._made:
            values = [(made or {}).get(key, start) for key, start in zip(keys, starts, strict=True)]
            one = torch.ones(1, dtype=torch.float32)
            rows = [
                flatten([values[i] for i in members] + [one.to(device)], dtype)
                for (device, dtype), members in groups.items()
            ]
            tree.add([torch.zeros_like(row) for row in rows] if made is None else rows)
        for row, members in zip(tree.finish(), groups.values(), strict=True):
            means = unflatten(row[:-1] / row[-1], [starts[i] for i in members])
            for i, mean in zip(members, means, strict=True):
                self._tracked[keys[i]].become(mean)

    def _take_from_replica_0(self, group: Group, layout: ReplicaLayout, keys: list[str]) -> None:
        if 0 in layout.replicas_of(group.backend.instance_index):
            made = self._made[0] or {}
            for key in keys:
                self._tracked[key].become(made.get(key, self._tracked[key].start))
        if layout.num_instances > 1:
            broadcast_tensors(group, 0, [self._tracked[key].tensor for key in keys])
        for key in keys:
            self._tracked[key].forget()

    def run_outside(self, forward: Callable[[], R]) -> R:
        """Call ``forward``, a pass in training mode outside of all micro batches, and remember what it wrote."""
        if not self._outside:
            self._begin([], is_checked=False)
        try:
            return forward()
        finally:
            with torch.no_grad():
                self._outside = {name: it.clone() for name, it in find_changed(self.buffers).items()}

    def forgive(self) -> None:
        """What was written outside of the micro batches has been replaced, or was taken for right."""
        self._outside = {}

    def written_outside(self) -> list[str]:
        """The buffers that still hold what a pass in training mode outside of all micro batches wrote."""
        found = []
        for name, value in self._outside.items():
            now = self.buffers[name].now()
            if now is not None and now.device == value.device and _has_same_bits(now, value):
                found.append(name)
        return found


_num_copies: Final[Counter[str]] = Counter()


def label_of_copy(label: str | None) -> str | None:
    """What the next copy of the model ``label`` is called, where all instances make the same copies."""
    if label is None:
        return None
    _num_copies[label] += 1
    return f"{label}.{_num_copies[label]}"


def check_buffers(module: nn.Module) -> None:
    """Check that no wrapped model in ``module`` holds what a pass outside of the micro batches wrote.

    Raises:
        WeightsError: If one does.
    """
    inside = set(module.modules())
    for model in _all_models():
        if model.module in inside and (written := model.written_outside()):
            raise WeightsError(_outside_fault(written, model.module))


_models: Final[dict[str, "weakref.ref[ReplicaBuffers]"]] = {}
"""The wrapped models of this process, by label, in the order in which they were made."""


def _all_models() -> Iterator[ReplicaBuffers]:
    """Those that are still there, the newest first: of two that wrap one module, the old one may soon be gone."""
    for label, reference in reversed(tuple(_models.items())):
        model = reference()
        if model is None:
            del _models[label]
        else:
            yield model


def _others_than(model: ReplicaBuffers) -> list[ReplicaBuffers]:
    return [other for other in _all_models() if other is not model]


def _has_same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether they are equal, where NaN equals NaN."""
    return left.shape == right.shape and bool(((left == right) | ((left != left) & (right != right))).all())  # noqa: PLR0124 - NaN


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _outside_fault(names: list[str], module: nn.Module) -> str:
    return (
        f"{_listed(names)} of {_kind(module)} was written by a forward pass in training mode outside of all micro "
        "batches, on what one instance has: so it would differ between instances, or depend on how the replicas "
        "are dealt to them. Call model.eval() before such a pass, or make it within a loop over micro batches; "
        "popdist.update_bn(loader, model) makes the statistics of BatchNorm anew. To go on, load the buffers as "
        "they were: model.load_state_dict(...)"
    )


def _uncounted_fault(names: list[str]) -> str:
    return (
        f"{_listed(names)} was written through .data, which torch does not count, after the first steps: so it "
        f"was not noticed, and differs between replicas. Write large buffers (above {LARGE} numbers) in place "
        "under torch.no_grad(), and not through .data"
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


_MOST_NAMES: Final = 3
"""How many buffers a message lists before it counts the rest."""
