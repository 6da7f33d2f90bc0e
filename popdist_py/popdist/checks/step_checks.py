"""The checks of a model's steps, put together: what is compared, watched and found in each checked one."""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from popdist import context
from popdist.checks.checked_steps import CheckedSteps
from popdist.checks.parameter_sums import ParameterSums, compare_weights, sum_parameters
from popdist.checks.python_state import PythonState, next_fault
from popdist.checks.untracked_changes import OtherParameters, UntrackedBuffers
from popdist.errors import PopdistWarning, name_instances
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.step_headers import NOT_DEALT, BeginHeader, ModelChecks, StepChecks
from popdist.groups import Group
from popdist.layout import ReplicaLayout
from popdist.training.micro_batches import Nest, children_of, is_list_of_strings
from popdist.training.model_steps import ModelSteps
from popdist.training_loop import training_loop
from popdist.weights import bytes_of

R = TypeVar("R")

_MOST_TENSORS: Final = 4
_MOST_NUMBERS: Final = 4096
"""Tensors of a batch, and numbers of each, that are read: enough to tell it from others."""


def install() -> None:
    """Have these checks made in the steps of all models from now on."""
    ModelSteps.make_checks = _make_checks


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

    def begin_step(self, batch: Nest = None) -> StepChecks:
        """The checks of the step that begins; in one that is not checked only what others found is passed on."""
        if not self._steps.is_next_checked():
            return UncheckedStep()
        is_first = self._steps.number == 1
        if self._layout.num_replicas == 1:
            return CheckedStep(None, batch, is_first=is_first)
        step = CheckedStep(sum_parameters(self._module), batch, is_first=is_first)
        step.watch_others(OtherParameters(self._module, self._buffers.other_modules()))
        return step

    def end_step(self) -> None:
        """Count a step that has ended with a gradient on all instances."""
        self._steps.end_step()

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

    def __init__(self, sums: ParameterSums | None, batch: Nest, *, is_first: bool) -> None:
        self._sums = sums
        self._others: OtherParameters | None = None
        self._buffers: UntrackedBuffers | None = None
        self._is_first = is_first
        self.checksum = 0 if sums is None else sums.word
        if context.environment().contract.num_instances > 1 and batch is not None:
            self.num_loader_passes = training_loop.num_loader_passes
            self.digest = 0 if hasattr(batch, "micro_batches") else digest_of(batch)

    def watch_others(self, parameters: OtherParameters) -> None:
        """Look for writes of other models' parameters, too."""
        self._others = parameters

    def compare_weights(
        self, group: Group, checksums: Sequence[int], timeout_seconds: float | None = None
    ) -> None:
        """Raise an error, on every instance, that names the first parameter which differs."""
        compare_weights(group, checksums, self._sums, timeout_seconds)

    def compare_batches(self, group: Group, headers: Sequence[BeginHeader]) -> None:
        """Warn of instances that bring the same samples, or that read a loader alone."""
        own = headers[group.instances.index(group.backend.instance_index)]
        equal = [it for it, header in zip(group.instances, headers, strict=True) if header.digest == own.digest]
        if own.digest and len(equal) > 1 and equal[0] == group.backend.instance_index:
            _warn(
                f"{name_instances(equal)} train on the same samples in this step: what draws the batches, such as "
                "a torch DataLoader with shuffle=True, gives all of the data to each instance. Have it dealt: "
                "popdist.data_loader(dataset, micro_batch_size, shuffle=True)"
            )
        passes = [header.num_loader_passes for header in headers if header.epoch != NOT_DEALT]
        most = max(passes, default=0)
        if own.num_loader_passes == most > min(passes, default=0) and own.epoch != NOT_DEALT:
            _warn(
                f"this instance has read loaders of popdist.data_loader {most} times, and another one "
                f"{min(passes)} times: a loader that is read on some instances only, as in `if is_main():`, gives "
                "them their share of the samples. Evaluate on all instances and join what they find by "
                "popdist.weighted_mean or popdist.gather, or read a DataLoader of torch's there"
            )

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


def _warn(text: str) -> None:
    warnings.warn(text, PopdistWarning, stacklevel=3)


def digest_of(batch: Nest) -> int:
    """A number that tells this batch from others by the first numbers of its first tensors on the CPU.

    0 for a batch without tensors, and for one in which all numbers are the same.
    """
    digest, has_content = hashlib.blake2b(digest_size=7), False
    for tensor in islice(_cpu_tensors(batch), _MOST_TENSORS):
        head = tensor.detach().reshape(-1)[:_MOST_NUMBERS]
        has_content |= bool((head != head[0]).any())
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(bytes_of(head))
    return int.from_bytes(digest.digest(), "little") if has_content else 0


def _cpu_tensors(nest: Nest) -> Iterator[Tensor]:
    if isinstance(nest, torch.Tensor):
        if nest.is_cpu and nest.layout == torch.strided and nest.numel():
            yield nest
    elif not is_list_of_strings(nest):
        for _, child in children_of(nest):
            yield from _cpu_tensors(child)
