"""The checks of the steps of models and of optimizers: what is compared, watched and found.

Checks that cost time are made in a model's first three steps and then in every 100th, as what goes wrong mostly
does so from the start, or goes on for long. All instances count the same number of a step when they begin it.
Outside of steps nothing is checked, so an evaluation on some instances never waits for the others.
"""

import hashlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from popdist import context, torch_private
from popdist.checks.python_state import PythonState, next_fault
from popdist.checks.tensor_changes import (
    OtherParameters,
    ParameterSums,
    UntrackedBuffers,
    compare_copies,
    compare_weights,
    find_difference,
    sum_parameters,
    sum_tensors,
)
from popdist.errors import (
    BackendError,
    GradientError,
    MicroBatchError,
    OptimizerError,
    PopdistWarning,
)
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.optimizer_steps import closure_of, is_reduced, parameters_of, training_loop, with_closure
from popdist.gradients.step_headers import NOT_DEALT, BeginHeader, ModelChecks, StepChecks
from popdist.groups import Group
from popdist.layout import ReplicaLayout
from popdist.local_tensors import is_distributed
from popdist.training.micro_batches import Nest, batches_of_loaders, children_of, is_list_of_strings
from popdist.training.model_steps import ModelSteps
from popdist.training.outside_step import LOOP
from popdist.training.step import (
    joint_modules,
    lost_steps,
    modules_in,
    reduced_modules,
    running_steps,
)
from popdist.weights import bytes_of

NUM_FIRST: Final = 3
"""So many first steps are checked."""

EVERY: Final = 100
"""And every so many-th."""


def is_checked(number: int) -> bool:
    """Whether step ``number`` of a model, counted from 1, is one in which the checks are made that cost time."""
    return number <= NUM_FIRST or number % EVERY == 0


class CheckedSteps:
    """The steps of one model, counted: ``number`` is that of the next one, from 1."""

    def __init__(self) -> None:
        self.number = 1

    def is_next_checked(self) -> bool:
        """Whether the next step, which begins now, is checked; never with ``popdist.init(checks="off")``."""
        return is_checked(self.number) and context.current_job().is_checked

    def end_step(self) -> None:
        """Count a step that has ended with a gradient on all instances."""
        self.number += 1


R = TypeVar("R")

_MOST_TENSORS: Final = 4
_MOST_NUMBERS: Final = 4096
"""Tensors of a batch, and numbers of each, that are read: enough to tell it from others."""


@cache
def install() -> None:
    """Have these checks made in the steps of all models, and of all optimizers of torch, from now on."""
    ModelSteps.make_checks = _make_checks
    register_optimizer_step_pre_hook(_check_optimizer_step)


def _make_checks(module: nn.Module, buffers: ReplicaBuffers, layout: ReplicaLayout) -> ModelChecks:
    """The checks of one model's steps: none with ``popdist.init(checks="off")``."""
    if context.is_initialized() and not context.current_job().is_checked:
        return ModelChecks()
    return ReplicaChecks(module, buffers, layout)


class ReplicaChecks(ModelChecks):
    """The checks of one model's steps."""

    def __init__(self, module: nn.Module, buffers: ReplicaBuffers, layout: ReplicaLayout) -> None:
        self._module = module
        self._layout = layout
        self._buffers = buffers
        self._steps = CheckedSteps()
        self._python_state = PythonState(module)
        self._passes_before = training_loop.num_loader_passes
        self._inputs = 0

    def begin_step(self, batch: Nest = None) -> StepChecks:
        """The checks of the step that begins; in one that is not checked only what others found is passed on."""
        if not self._steps.is_next_checked():
            return UncheckedStep()
        compare_copies(self._module)
        is_first = self._steps.number == 1
        num_passes = training_loop.num_loader_passes - self._passes_before
        if self._layout.num_replicas == 1:
            return CheckedStep(None, None, batch, num_passes, is_first=is_first)
        others = OtherParameters(self._module, self._buffers.other_modules())
        step = CheckedStep(sum_parameters(self._module), others, batch, num_passes, is_first=is_first)
        step.inputs, self._inputs = self._inputs, 0
        return step

    def end_step(self) -> None:
        """Count a step that has ended with a gradient on all instances."""
        if self._steps.is_next_checked():  # a pass that was found is not found again
            self._passes_before = training_loop.num_loader_passes
        self._steps.end_step()

    def note_inputs(self, inputs: Nest) -> None:
        """Note what is passed to the model outside of micro batches, if the next step is checked."""
        if self._layout.num_instances > 1 and self._steps.is_next_checked():
            self._inputs = digest_of(inputs)

    def watch(self, forward: Callable[[], R]) -> R:
        """Call the module's forward pass; in a checked step find out what it keeps in Python."""
        if self._steps.is_next_checked() and self._python_state.is_watched(self._steps.number):
            return self._python_state.watch(forward)
        return forward()


class UncheckedStep(StepChecks):
    """A step in which nothing is looked for."""

    def fault(self) -> str | None:
        """What was found in a forward pass of any model."""
        return next_fault()


class CheckedStep(UncheckedStep):
    """A step in which weights, samples, passes over loaders and buffers are compared."""

    is_on = True

    def __init__(
        self,
        sums: ParameterSums | None,  # None where the job has one replica
        others: OtherParameters | None,
        batch: Nest,
        num_passes: int,
        *,
        is_first: bool,
    ) -> None:
        self._sums = sums
        self._others = others
        self._buffers: UntrackedBuffers | None = None
        self._is_first = is_first
        self.inputs = 0  # a digest of what was passed to the model outside of micro batches
        self.checksum = 0 if sums is None else sums.word
        if context.environment().contract.layout.num_instances > 1 and batch is not None:
            self.num_loader_passes = num_passes
            self.digest = 0 if batches_of_loaders(batch) else digest_of(batch)

    def compare_weights(
        self, group: Group, checksums: Sequence[int], timeout_seconds: float | None = None
    ) -> None:
        """Raise an error, on every instance, that names the first parameter which differs."""
        compare_weights(group, checksums, self._sums, timeout_seconds)

    def compare_batches(self, group: Group, headers: Sequence[BeginHeader]) -> None:
        """Warn of instances that bring the same samples, or that read a loader alone."""
        own = headers[group.instances.index(group.backend.instance_index)]
        _warn_of_equal(group, [header.digest for header in headers])
        passes = [header.num_loader_passes for header in headers if header.epoch != NOT_DEALT]
        most = max(passes, default=0)
        if own.num_loader_passes == most > min(passes, default=0) and own.epoch != NOT_DEALT:
            _warn(
                f"this instance has read loaders of popdist.data_loader {most} times since the last check, and "
                f"another one {min(passes)} times: a loader that is read on some instances only, as in "
                "`if is_main():`, gives them their share of the samples. Evaluate on all instances and join what "
                "they find by popdist.weighted_mean or popdist.gather, or read a DataLoader of torch's there"
            )

    def compare_inputs(self, group: Group) -> None:
        """Warn of instances that pass the same samples to the model in a loop without micro batches."""
        if len(group.instances) > 1:
            _warn_of_equal(group, [it for (it,) in group.start("compare the samples", [self.inputs]).wait()])

    def fault(self) -> str | None:
        """The first parameter that was written in this step, or what was found in a forward pass."""
        if found := next_fault():
            return found
        place = None if self._sums is None else self._sums.first_change()
        if self._sums is not None and place is not None:
            return (
                f"{self._sums.names[place]} was written in a micro batch: so the result depends on how many micro "
                "batches an instance computes, and this step has no gradient on any instance. Write a parameter "
                "once for all replicas, outside of the loop over micro batches (as after optimizer.step()); or "
                "make it a buffer, which is combined over the replicas"
            )
        return None if self._others is None else self._others.fault()

    def begin_loop(self) -> None:
        """Look for buffers of modules that nothing wraps, in a model's first step, on the main instance."""
        if self._is_first and self._sums is not None and context.instance_index() == 0:
            self._buffers = UntrackedBuffers()

    def end_loop(self, *, is_complete: bool) -> None:
        """Warn of those that changed."""
        if self._buffers is not None:
            self._buffers.close(warns=is_complete)


def _warn_of_equal(group: Group, digests: Sequence[int]) -> None:
    """Warn on the first instance whose digest equals this instance's; the digest 0 stands for no samples."""
    place = group.instances.index(group.backend.instance_index)
    equal = [it for it, digest in zip(group.instances, digests, strict=True) if digest == digests[place]]
    if digests[place] and len(equal) > 1 and equal[0] == group.backend.instance_index:
        _warn(
            f"{group.name(equal)} train on the same samples in this step: what draws the batches, such as "
            "a torch DataLoader with shuffle=True, gives all of the data to each instance. Have it dealt: "
            "popdist.data_loader(dataset, micro_batch_size, shuffle=True)"
        )


def _warn(text: str) -> None:
    warnings.warn(text, PopdistWarning, stacklevel=3)


def digest_of(batch: Nest) -> int:
    """A number that tells this batch from others by the first numbers of its first tensors; 0 if all equal."""
    digest, has_content = hashlib.blake2b(digest_size=7), False
    for tensor in islice(_dense_tensors(batch), _MOST_TENSORS):
        head = tensor.detach().reshape(-1)[:_MOST_NUMBERS]
        has_content |= bool((head != head[0]).any())
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(bytes_of(head))
    return int.from_bytes(digest.digest(), "little") if has_content else 0


def _dense_tensors(nest: Nest) -> Iterator[Tensor]:
    if isinstance(nest, torch.Tensor):
        if (nest.is_cpu or nest.is_cuda) and nest.layout == torch.strided and nest.numel():
            yield nest
    elif not is_list_of_strings(nest):
        for _, child in children_of(nest):
            yield from _dense_tensors(child)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedParameter:
    """A parameter in memory that the instances of a host share; only its owner, an optimizer, may step on it."""

    parameter: weakref.ref[Parameter]
    address: int  # elsewhere in memory it is no longer shared
    owner: weakref.ref[object]  # when it has gone, no optimizer may step


_shared: Final[dict[int, _SharedParameter]] = {}
"""The shared parameters, by identity."""


def reserve(parameters: Iterable[Parameter], owner: object) -> None:
    """From now on let ``owner`` alone step on ``parameters``, as long as they stay where they are now."""
    for parameter in parameters:
        key = id(parameter)
        reference = weakref.ref(parameter, lambda _, key=key: _shared.pop(key, None))  # type: ignore[misc] # mypy takes no defaults here
        _shared[key] = _SharedParameter(
            parameter=reference, address=parameter.data_ptr(), owner=weakref.ref(owner)
        )


def _check_optimizer_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Check a step that begins; one with a closure, which makes the gradients, whenever that has been called."""
    makes_gradients = closure_of(args, kwargs) is not None
    if _shared:
        _refuse_shared(optimizer)
    if running_steps or lost_steps:
        _refuse_incomplete(optimizer, makes_gradients=makes_gradients)
    if context.num_replicas() > 1:
        if reduced_modules:
            _check_all_are_wrapped(optimizer)
        if not makes_gradients:
            _check_gradients(optimizer)
    return with_closure(optimizer, args, kwargs, lambda: _check_gradients(optimizer))


def _check_gradients(optimizer: Optimizer) -> None:
    """Check the gradients that a step of ``optimizer`` will use."""
    _compare_gradients(optimizer)
    _refuse_lone_gradients(optimizer)


@dataclass(slots=True)
class LoneSteps:
    """The steps of optimizers on gradients of this instance alone, which nothing has shown to be a mistake."""

    number: int = 0


lone_steps: Final = LoneSteps()
"""Those of this process, of which poprun tells at its end: see `popdist.startup.lone_training`."""

_sent: Final[weakref.WeakKeyDictionary[Optimizer, tuple[int, int]]] = weakref.WeakKeyDictionary()
"""What this process had sent to other replicas at an optimizer's last step: bytes of popdist, calls of torch."""


def _sent_now() -> tuple[int, int]:
    num_bytes = context.current_job().group.num_bytes if context.is_initialized() else 0
    is_shared = context.environment().contract.parallelism.is_shared
    return num_bytes, torch_private.num_collectives(context.instances_of_replica() if is_shared else ())


def _refuse_lone_gradients(optimizer: Optimizer) -> None:
    """Refuse a step on this instance's gradients, where the program has its share of the samples or weights."""
    if context.num_replicas() == 1:
        return
    (bytes_before, calls_before), (num_bytes, num_calls) = _sent.get(optimizer, (0, 0)), _sent_now()
    _sent[optimizer] = num_bytes, num_calls
    alone = [it.grad for it in parameters_of(optimizer) if it.grad is not None and not is_reduced(it.grad)]
    is_said = context.is_initialized() and context.current_job().group.is_limited
    if reduced_modules or is_said or not alone or num_calls > calls_before:
        return
    if num_bytes - bytes_before >= sum(it.nbytes for it in alone):
        return  # the program adds them over the instances by itself
    if not training_loop.num_loader_passes and not any(map(is_distributed, alone)):
        lone_steps.number += 1  # perhaps all instances train the same, or each something of its own
        return
    raise OptimizerError(
        f"{type(optimizer).__name__}.step() would move the weights by the gradients of this instance alone: the "
        f"job has {context.num_replicas()} replicas, and nothing has added up their gradients. Wrap the model, "
        f"and write\n{LOOP}\n\nor call popdist.all_reduce_gradients(model) before the step. Where an instance "
        "trains a model for itself, or adds up gradients in a way that popdist does not see, say so: "
        "popdist.execute_on_instances({popdist.instance_index()}, optimizer.step)"
    )


def _refuse_shared(optimizer: Optimizer) -> None:
    for parameter in parameters_of(optimizer):
        if _belongs_to_another(parameter, optimizer):
            raise OptimizerError(
                f"{type(optimizer).__name__}.step() on a parameter of shape {tuple(parameter.shape)} that all "
                "instances of this host share, because a ShardedOptimizer was made for it: step with that one, or "
                "give each instance a copy of its own first (parameter.data = parameter.data.clone())"
            )


def _belongs_to_another(parameter: Tensor, optimizer: Optimizer) -> bool:
    """Whether another optimizer alone may step on ``parameter``: each instance would update the one copy."""
    known = _shared.get(id(parameter))
    return (
        known is not None
        and known.parameter() is parameter
        and known.address == parameter.data_ptr()
        and known.owner() is not optimizer
    )


def _refuse_incomplete(optimizer: Optimizer, *, makes_gradients: bool) -> None:
    """Refuse a step on a model that is in the middle of its step, or whose last step was lost."""
    updated = set(map(id, parameters_of(optimizer)))
    modules = [module for state in tuple(running_steps) if (module := state.module) is not None]
    if any(id(parameter) in updated for module in modules for parameter in module.parameters()):
        raise MicroBatchError(
            "optimizer.step() before the gradients of all replicas are there: call it after the "
            "micro_batches loop, or after model.reduce_gradients()"
        )
    for state in tuple(lost_steps):
        module = state.module
        if module is not None and not makes_gradients and _has_nothing_for(updated, module):
            raise MicroBatchError(
                "optimizer.step() without a gradient: the last step of this model was lost on all instances, "
                "because a loop over its micro batches was left before its end (by break, return or an exception, "
                "or beside another one in zip() without strict=True), or raised an error, here or on another "
                "instance. Begin the next step, which works on all instances; where an exception is caught, go on "
                "with the next batch in place of this call"
            )


def _has_nothing_for(updated: set[int], module: nn.Module) -> bool:
    """Whether parameters of ``module`` are to be updated, and none of them has a gradient."""
    trained = [it for it in module.parameters() if it.requires_grad and id(it) in updated]
    return bool(trained) and all(it.grad is None for it in trained)


@dataclass(slots=True)
class _Comparison:
    """The number of parameters and models when an optimizer was compared with these, and its steps since."""

    sizes: tuple[int, int] = (0, 0)
    num_steps: int = 0


_compared: Final[weakref.WeakKeyDictionary[Optimizer, _Comparison]] = weakref.WeakKeyDictionary()


def _check_all_are_wrapped(optimizer: Optimizer) -> None:
    """Refuse a step that moves a parameter beside those of wrapped models with one instance's gradient."""
    sizes = sum(len(group["params"]) for group in optimizer.param_groups), len(reduced_modules)
    known = _compared.get(optimizer)
    if known is None or known.sizes != sizes:
        known = _compared[optimizer] = _Comparison(sizes)
    known.num_steps += 1
    if not is_checked(known.num_steps):
        return
    wrapped = {id(it) for module in modules_in(reduced_modules) for it in module.parameters()}
    if not any(id(parameter) in wrapped for parameter in parameters_of(optimizer)):
        return
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.requires_grad and parameter.grad is not None and id(parameter) not in wrapped:
                name = (group.get("param_names") or {place: f"parameter {place} of group {number}"})[place]
                raise OptimizerError(
                    f"{type(optimizer).__name__}.step() would move {name}, of shape {tuple(parameter.shape)}, by "
                    "the gradient of this instance alone: the optimizer holds it beside the parameters of a "
                    "ReplicatedModel, and nothing wraps it. Wrap all that is trained, together "
                    "(popdist.ReplicatedModel(nn.ModuleDict({...}))) or each module by itself; give what each "
                    "instance trains for itself an optimizer of its own"
                )


_unreduced_steps: Final[weakref.WeakKeyDictionary[Optimizer, CheckedSteps]] = weakref.WeakKeyDictionary()
"""For each optimizer, its steps on gradients that popdist has not reduced."""


def _unreduced(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """The gradients that popdist has not reduced, of parameters that are the same on all instances; with names."""
    found = [it for it in parameters_of(optimizer) if it.grad is not None and not is_reduced(it.grad)]
    if not found:
        return []
    modules = modules_in(joint_modules)
    names = {id(parameter): name for module in modules for name, parameter in module.named_parameters()}
    return [(names[id(it)], it.grad) for it in found if id(it) in names and it.grad is not None]


def _compare_gradients(optimizer: Optimizer) -> None:
    """Check that gradients which popdist has not reduced are equal on all instances, if the step is checked."""
    if not context.is_initialized() or (number := context.environment().contract.layout.num_instances) == 1:
        return
    group = context.data_parallel_group()
    if len(group.instances) < number or not (gradients := _unreduced(optimizer)):
        return
    steps = _unreduced_steps.setdefault(optimizer, CheckedSteps())
    is_next_checked = steps.is_next_checked()
    steps.end_step()
    if not is_next_checked:
        return
    text = f"{type(optimizer).__name__}.step() on gradients that popdist has not reduced"
    sums = sum_tensors(gradients)
    try:
        words = [word for (word,) in group.start(text, [sums.word]).wait()]
        difference = find_difference(group, "gradients", words, sums)
    except BackendError:
        return  # an instance has left, or was lost: the next call that needs it will say so
    if difference is not None:
        raise GradientError(
            f"{text}, and they are not equal on all instances: {difference}. They were set by hand, or come from "
            "backward() under no_sync(). Compute them in a loop over model.micro_batches(batch), or add them over "
            "the instances first, as popdist.all_reduce_gradients(model) does"
        )
