"""Gradients of which each instance has only a part: the elements that this instance's optimizer updates.

That is so where all trained parameters belong to a sharded optimizer. What reads such a ``.grad`` and cannot do it
element by element first gathers all gradients of the step, and all instances must come to it.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.nn import Parameter

from popdist.exchange.groups import Group
from popdist.gradients.flat_buffers import FlatGradient, GradientLayout, joined, num_real_elements, scatter_sum
from popdist.gradients.optimizer_steps import mark_reduced
from popdist.gradients.shards import Ranges, ShardExchange, group_by_kind, ranges_of
from popdist.ground import torch_private
from popdist.ground.layout import ReplicaLayout

_aten: Final = torch.ops.aten
_SCALING: Final = frozenset({_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar})


class GradientElsewhere(Tensor):
    """A gradient of which some or all elements are not in this tensor's own memory."""

    @property
    def whole(self) -> Tensor:
        """The whole gradient as an ordinary tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` as for ordinary tensors, so that all results are ordinary tensors."""
        del types
        return Tensor.__torch_function__(func, (), args, kwargs)  # type: ignore[no-untyped-call] # torch's

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub leaves out the first argument
        cls,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run torch's operator ``func``, of which at least one argument is a GradientElsewhere."""
        del types
        if (unscaler := torch_private.unscaler_of(func)) is not None:
            return cls.unscale(unscaler, *args)
        return cls.compute(func, args, kwargs or {})

    @classmethod
    def unscale(
        cls, unscaler: Callable[..., None], gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor
    ) -> None:
        """Divide ``gradients`` by a GradScaler's scale; set ``found_inf`` if an element is NaN or infinity."""
        raise NotImplementedError

    @classmethod
    def compute(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run any operator ``func`` on gradients, except the unscaling of a GradScaler."""
        raise NotImplementedError


def with_wholes(value: Any, wholes: list[Tensor]) -> Any:
    """Return the argument ``value`` with each GradientElsewhere as a whole tensor; append these to ``wholes``."""
    if isinstance(value, dict):
        return {key: with_wholes(it, wholes) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(with_wholes(it, wholes) for it in value)
    if not isinstance(value, GradientElsewhere):
        return value
    wholes.append(value.whole)
    return wholes[-1]


def is_number(value: object) -> bool:
    """Whether an operator's argument ``value`` is one number, or a tensor of one number with its own memory."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, GradientElsewhere)
    return not isinstance(value, list | tuple)


class PartialGradient(GradientElsewhere):
    """A gradient of which this instance has only the elements that its optimizer updates."""

    content: Tensor  # room for all elements; only this instance's are right, unless ``is_whole``
    title: str
    ranges: Ranges
    is_whole: bool
    _step: "StepGradients"

    def __new__(cls, content: Tensor, *_: object) -> Self:
        """Make a tensor with the shape, dtype and device of ``content`` that has no memory of its own."""
        return torch_private.wrapper_tensor(cls, content)

    def __init__(self, content: Tensor, title: str, ranges: Ranges, step: "StepGradients") -> None:
        self.content = content
        self.title = title
        self.ranges = ranges
        self.is_whole = not content.numel()
        self._step = step

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes more
        """Return the name, shape and dtype, but no elements, because other instances have some of them."""
        return f"PartialGradient({self.title}, {tuple(self.shape)}, {self.dtype})"

    @property
    def whole(self) -> Tensor:
        """The whole gradient as an ordinary tensor; if parts are missing, all instances gather them."""
        if not self.is_whole:
            self._step.gather()
        return self.content

    @property
    def data(self) -> Tensor:
        """The attribute ``data`` of the whole gradient; setting ``data`` changes the whole gradient."""
        return self.whole.data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.whole.data = value

    @property
    def is_cut(self) -> bool:
        """Whether the elements of this gradient are spread over several instances, and not yet gathered here."""
        return not self.is_whole and sum(map(bool, self.ranges)) > 1

    @property
    def holder(self) -> int:
        """The index of the instance that has most elements of this gradient."""
        return max(range(len(self.ranges)), key=lambda instance: len(self.ranges[instance]))

    @property
    def here(self) -> Tensor:
        """The elements of this gradient that this instance has."""
        if self.is_whole:
            return self.content
        mine = self.ranges[self._step.instance_index]
        return self.content.as_strided((self.content.numel(),), (1,))[mine.start : mine.stop]

    @classmethod
    def unscale(
        cls, unscaler: Callable[..., None], gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor
    ) -> None:
        """Divide ``gradients`` by a GradScaler's scale; set all instances' ``found_inf`` at NaN or infinity."""
        parts = [gradient for gradient in gradients if isinstance(gradient, PartialGradient)]
        group = parts[0]._step.group  # noqa: SLF001 - the attribute belongs to the same class
        text = f"unscale {len(gradients)} gradients, look for NaN and infinity"
        with group.undivided(text):
            group.agree(text)
            here = [gradient.here if isinstance(gradient, PartialGradient) else gradient for gradient in gradients]
            unscaler([part for part in here if part.numel()], found_inf, inv_scale)
            found_inf.copy_(group.backend.all_gather(found_inf.reshape(1)).amax().reshape(found_inf.shape))

    @classmethod
    def compute(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run ``func`` on this instance's elements if ``func`` only scales or zeroes; else on whole gradients."""
        if func is _aten.zero_.default or (func in _SCALING and is_number(args[1])):
            # torch chooses the dtype by the number of dimensions
            func(args[0].here if args[0].dim() else args[0].content, *args[1:])
            return args[0]
        return func(*with_wholes(args, []), **with_wholes(kwargs, []))


def _read_whole(name: str) -> Any:
    return lambda gradient, *args, **kwargs: getattr(gradient.whole, name)(*args, **kwargs)


_READS_OF_MEMORY: Final = (
    "numpy __array__ __dlpack__ tolist data_ptr untyped_storage share_memory_ __deepcopy__ __reduce_ex__"
)
"""Methods that read a tensor's memory without an operator of torch; such a gradient has no memory to read."""

for _name in _READS_OF_MEMORY.split():
    setattr(GradientElsewhere, _name, _read_whole(_name))


class StepGradients:
    """The gradients of one step of which each instance has only a part; one call gathers all their parts."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.instance_index = group.backend.instance_index
        self._members: list[tuple[weakref.ref[Parameter], weakref.ref[PartialGradient]]] = []

    def replace_grad(self, name: str, parameter: Parameter, ranges: Ranges) -> None:
        """Replace ``parameter.grad``, unless it is None, by a tensor of which each instance has only a part."""
        if parameter.grad is not None:
            gradient = PartialGradient(parameter.grad, name, ranges, self)
            parameter.grad = gradient
            mark_reduced(gradient)
            self._members.append((weakref.ref(parameter), weakref.ref(gradient)))

    def gather(self) -> None:
        """Gather the elements of all gradients of the step into ordinary tensors. All instances must call this."""
        pairs = [(parameter(), gradient()) for parameter, gradient in self._members]
        text = f"gather {len(pairs)} gradients, in parts because of a ShardedOptimizer: read them on all instances"
        with self.group.undivided(text):
            self.group.agree(text)
            gather_parts(self.group, [gradient for _, gradient in pairs if gradient is not None])
        for parameter, gradient in pairs:
            if parameter is not None and gradient is not None and parameter.grad is gradient:
                _restore_grad(parameter, gradient)


def _restore_grad(parameter: Parameter, gradient: PartialGradient) -> None:
    """Set ``parameter.grad`` to the whole gradient, unless the parameter is being moved to another device."""
    # while torch moves the parameter to another device, torch itself replaces the gradient
    if (parameter.dtype, parameter.device) == (gradient.dtype, gradient.device):
        parameter.grad = gradient.content


@torch.no_grad()
def gather_parts(group: Group, gradients: Sequence[PartialGradient]) -> None:
    """Gather all elements of ``gradients`` on every instance; all instances call this with the same list."""
    for kind in group_by_kind([gradient for gradient in gradients if not gradient.is_whole]):
        ShardExchange(kind, group.backend).run()
    for gradient in gradients:
        gradient.is_whole = True


class GradientParts:
    """The elements of a model's gradients that each instance needs, because its optimizer updates only these."""

    def __init__(self, gradients: GradientLayout, ranges: Sequence[Ranges]) -> None:
        self.ranges = ranges
        self._buffers = gradients.flat_buffers
        self._names = gradients.names
        self._wanted: list[list[list[range]]] = []
        for buffer in gradients.flat_buffers:
            runs: list[list[range]] = [[] for _ in ranges[0]]
            for index, parameter, start in buffer.members:
                times = num_real_elements(parameter) // max(1, parameter.numel())
                for wanted, run in zip(runs, ranges[index], strict=True):
                    wanted.append(range(start + times * run.start, start + times * run.stop))
            self._wanted.append([joined(wanted_runs) for wanted_runs in runs])
        digest = hashlib.blake2b(repr(ranges).encode(), digest_size=7).digest()
        self.number = 1 + int.from_bytes(digest, "little")

    def add(self, group: Group, layout: ReplicaLayout, own: Sequence[FlatGradient], over: float) -> FlatGradient:
        """Return the sum over all replicas, divided by ``over``; only this instance's elements are correct."""
        for nodes, wanted in zip(zip(*(node.tensors for node in own), strict=True), self._wanted, strict=True):
            scatter_sum(group, layout, nodes, wanted)
            if over != 1:
                for run in wanted[group.backend.instance_index]:
                    nodes[0][run.start : run.stop].div_(over)
        return own[0]

    def replace_grads(self, group: Group) -> None:
        """Replace every ``.grad`` of the model by a tensor of which each instance has only a part."""
        step = StepGradients(group)
        for buffer in self._buffers:
            for index, parameter, _ in buffer.members:
                step.replace_grad(self._names[index], parameter, self.ranges[index])


_known: Final[weakref.WeakKeyDictionary[GradientLayout, GradientParts]] = weakref.WeakKeyDictionary()


def parts_of(gradients: GradientLayout) -> GradientParts | None:
    """Return the parts of ``gradients`` that the instances update; None if an instance may need more elements."""
    parameters = {index: parameter for buffer in gradients.flat_buffers for index, parameter, _ in buffer.members}
    ranges = [ranges_of(parameters[index]) for index in range(len(parameters))]
    found = [own_ranges for own_ranges in ranges if own_ranges is not None]
    if not found or len(found) < len(ranges) or not torch_private.has_wrapper_tensors:
        return None
    known = _known.get(gradients)
    if known is None or known.ranges != found:
        known = _known[gradients] = GradientParts(gradients, found)
    return known
