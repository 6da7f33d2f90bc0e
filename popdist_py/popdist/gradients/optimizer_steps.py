"""The steps of a program's optimizers: a count, which shows the ends of the loop's steps, and marks on gradients.

A parameter's ``.grad`` may have two marks. *Used* means that a step of an optimizer has read the gradient, and
nothing was added since (torch's count of writes shows that), so that the gradient may be dropped. *Reduced* means
that popdist has made the gradient, so that it is equal on all instances.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, Final
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from popdist.ground.torch_private import num_writes

_optimizers: Final[WeakSet[Optimizer]] = WeakSet()
"""The optimizers that have made at least one step."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all parameter groups of ``optimizer``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def mark_used(parameters: Iterable[Tensor]) -> None:
    """Mark the present gradients of ``parameters`` as used by an optimizer."""
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None:
            gradient._popdist_used = num_writes(gradient)  # noqa: SLF001 - an attribute of popdist, not of torch


def mark_step(optimizer: Optimizer) -> None:
    """Record that ``optimizer`` has made a step or called its closure; mark its parameters' gradients as used."""
    _optimizers.add(optimizer)
    for group in optimizer.param_groups:
        mark_used(group["params"])


def is_used(gradient: Any) -> bool:
    """Whether an optimizer has used ``gradient``, and nothing has written to ``gradient`` since."""
    return getattr(gradient, "_popdist_used", None) == num_writes(gradient)


def remove_gradients(parameters: Iterable[Tensor]) -> tuple[dict[int, Tensor], bool]:
    """Set every ``.grad`` to None. Return the gradients that no optimizer has used, by the Python id of the
    parameter, and whether an optimizer has used other gradients.
    """
    unused, are_some_used = dict[int, Tensor](), False
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            parameter.grad = None
            if is_used(gradient):
                are_some_used = True
            else:
                unused[id(parameter)] = gradient
    return unused, are_some_used


def stepped_parameters() -> set[int]:
    """Return the Python ids of the parameters of all optimizers that have made at least one step."""
    return {id(parameter) for optimizer in tuple(_optimizers) for parameter in parameters_of(optimizer)}


def digest_of_rates(parameters: Collection[int]) -> int:
    """Return a digest of the learning rates and other numeric settings with which optimizers have stepped on
    ``parameters``, which are given by Python ids. A learning rate that is a tensor is ignored.
    """
    groups = (group for optimizer in tuple(_optimizers) for group in optimizer.param_groups)
    return sum(
        hash(tuple(it for it in group.values() if isinstance(it, int | float)))
        for group in groups
        if group["params"] and id(group["params"][0]) in parameters
    )


def mark_reduced(gradient: Any, *, is_reduced: bool = True) -> None:
    """Mark whether popdist has reduced ``gradient`` over all replicas, so that it is equal on all instances."""
    gradient._popdist_reduced = is_reduced  # noqa: SLF001 - an attribute of popdist, not of torch


def is_reduced(gradient: Tensor) -> bool:
    """Whether popdist has reduced ``gradient`` over all replicas, so that it is equal on all instances."""
    return bool(getattr(gradient, "_popdist_reduced", False))


class TrainingLoop:
    """The training loop of a program: detects the end of each step, and then calls ``on_step_end``, a function."""

    def __init__(self) -> None:
        self.on_step_end: Callable[[], None] | None = None  # may raise an exception that ends the loop
        self.leaving_signals: tuple[int, ...] = ()  # signals by which the program may be asked to end
        self.num_step_ends = 0
        self.num_optimizer_steps = 0  # number of calls of ``step()`` of any optimizer
        self.num_loader_passes = 0  # equal on all instances, unless an instance reads a loader alone
        self.in_closure_of = ""  # the name of the optimizer whose closure runs
        self._num_open_loaders = 0
        self._begun: set[object] = set()
        self._num_steps_before = 0

    @contextmanager
    def read_loader(self) -> Iterator[Callable[[], None]]:
        """A context in which a program reads a loader. Yields a function that the loader calls between batches:
        this function ends the program's step if an optimizer has stepped since the last call.
        """
        num_steps_before = self.num_optimizer_steps

        # optimizer.step() is not the end of a step, because the loop updates its own counters before its next
        # batch
        def ask() -> None:
            nonlocal num_steps_before
            if self.num_optimizer_steps != num_steps_before:
                num_steps_before = self.num_optimizer_steps
                self.end_step()

        self.num_loader_passes += 1
        self._num_open_loaders += 1
        try:
            yield ask
        finally:
            self._num_open_loaders -= 1

    def begin_step(self, model: object) -> None:
        """Record that computing new gradients of ``model`` begins. If an optimizer has stepped since this was
        recorded for the model before, end the program's step first. While a program reads a loader of popdist, do
        nothing: the loader ends the steps.
        """
        if self._num_open_loaders:
            return
        # several models may have steps before one optimizer step, and a closure repeats steps before it
        if model in self._begun and self.num_optimizer_steps != self._num_steps_before:
            self.end_step()
        if not self._begun:
            self._num_steps_before = self.num_optimizer_steps
        self._begun.add(model)

    def end_step(self) -> None:
        """Record that a step of the program has ended, and call the function ``on_step_end`` if there is one."""
        self.num_step_ends += 1
        self._begun.clear()
        if self.on_step_end is not None:
            self.on_step_end()


training_loop = TrainingLoop()
"""The training loop of this process."""


@cache
def watch_optimizers() -> None:
    """Count the steps of torch's optimizers, and mark the gradients that they use, from now on."""
    register_optimizer_step_pre_hook(_wrap_closure)
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: Optimizer, *_: object) -> None:
    training_loop.num_optimizer_steps += 1
    mark_step(optimizer)


def _wrap_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of ``optimizer.step`` with a closure that also marks the gradients as used."""
    return with_closure(optimizer, args, kwargs, lambda: mark_step(optimizer))


def with_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], do_after: Callable[[], object]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of ``step`` with a closure that also calls ``do_after``; None without a closure."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return None

    @wraps(closure)
    def call(*closure_args: Any, **closure_kwargs: Any) -> Any:
        training_loop.in_closure_of, before = type(optimizer).__name__, training_loop.in_closure_of
        try:
            loss = closure(*closure_args, **closure_kwargs)
        finally:
            training_loop.in_closure_of = before
        do_after()
        return loss

    if "closure" in kwargs:
        return args, kwargs | {"closure": call}
    return (args[0], call, *args[2:]), kwargs


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the closure among the arguments of an optimizer's ``step()``; None if there is no closure."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None
