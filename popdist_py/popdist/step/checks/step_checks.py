"""Checks of the steps of models: comparisons between instances, and faults in forward passes.

Checks that cost time are made in a model's first three steps and then in every 100th step, because most faults
occur from the start or go on for long. All instances count the same number of a step when they begin the step.
Outside of steps nothing is checked, so an evaluation on some instances never waits for other instances.
"""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from popdist.errors import PopdistWarning
from popdist.exchange.groups import Group
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.optimizer_steps import digest_of_rates, training_loop
from popdist.gradients.step_headers import NOT_DEALT, BeginHeader, ModelChecks, StepChecks
from popdist.ground import torch_private
from popdist.ground.layout import ReplicaLayout
from popdist.job import context
from popdist.job.weights import bytes_of
from popdist.step.checks.python_state import PythonState, next_fault
from popdist.step.checks.tensor_changes import (
    ParameterSums,
    UntrackedBuffers,
    compare_copies,
    compare_weights,
    sum_others,
    sum_parameters,
)
from popdist.step.training.micro_batches import Nest, batches_of_loaders, leaves_of
from popdist.step.training.model_steps import ModelSteps

NUM_FIRST: Final = 3
"""The number of first steps that are checked."""

EVERY: Final = 100
"""The number of steps from one checked step to the next checked step, after the first steps."""


def is_checked(number: int) -> bool:
    """Whether a model's step ``number`` (from 1) makes the slow checks: the first 3 steps, then every 100th."""
    return number <= NUM_FIRST or number % EVERY == 0


class CheckedSteps:
    """A counter of the steps of one model; ``number`` is the number of the next step, from 1."""

    def __init__(self) -> None:
        self.number = 1

    def is_next_checked(self) -> bool:
        """Whether the next step is checked; always false with ``popdist.init(checks="off")``."""
        return is_checked(self.number) and context.current_job().is_checked

    def end_step(self) -> None:
        """Count a step that has ended with a gradient on all instances."""
        self.number += 1


R = TypeVar("R")

_MOST_USELESS_COMPARISONS: Final = 3

_MOST_TENSORS: Final = 4
_MOST_NUMBERS: Final = 4096
"""The most tensors of a batch, and numbers of each tensor, in a digest: enough to recognise the batch."""


@cache
def install() -> None:
    """Make all models compare instances and watch forward passes in their steps, from now on."""
    ModelSteps.make_checks = _make_checks


def _make_checks(module: nn.Module, buffers: ReplicaBuffers, layout: ReplicaLayout) -> ModelChecks:
    """Return the checks of one model's steps; no checks with ``popdist.init(checks="off")``."""
    if context.is_initialized() and not context.current_job().is_checked:
        return ModelChecks()
    return ReplicaChecks(module, buffers, layout)


class ReplicaChecks(ModelChecks):
    """The checks of one model's steps: comparisons between instances, and faults in forward passes."""

    def __init__(self, module: nn.Module, buffers: ReplicaBuffers, layout: ReplicaLayout) -> None:
        self._module = module
        self._layout = layout
        self._buffers = buffers
        self._steps = CheckedSteps()
        self._python_state = PythonState(module)
        self._passes_before = training_loop.num_loader_passes
        self._inputs = 0
        self._written = WrittenWeights(module)
        self._may_warn_of_draws = True

    def begin_step(self, batch: Nest = None) -> StepChecks:
        """Return the checks of the step that begins: all checks, or in an unchecked step only the cheap checks."""
        writes = self._written.since_before() if self._layout.num_instances > 1 else 0
        if not self._steps.is_next_checked():
            return UncheckedStep(self._written, writes)
        compare_copies(self._module)
        is_first = self._steps.number == 1
        num_passes = training_loop.num_loader_passes - self._passes_before
        if self._layout.num_replicas == 1:
            return CheckedStep(None, None, batch, num_passes, is_first=is_first)
        others = sum_others(self._module, self._buffers.other_modules())
        step = CheckedStep(sum_parameters(self._module), others, batch, num_passes, is_first=is_first)
        step.inputs, self._inputs = self._inputs, 0
        return step

    def end_step(self) -> None:
        """Count a step that has ended with a gradient on all instances."""
        if self._steps.is_next_checked():  # so that a reported pass is not reported again
            self._passes_before = training_loop.num_loader_passes
            trained = [it for it in self._module.parameters() if it.requires_grad]
            if trained and all(it.grad is None for it in trained) and context.instance_index() == 0:
                _warn(
                    "this step has no gradient: backward() was called in no micro batch of any replica. Call it "
                    "for each micro batch; where no gradients are wanted, write `for batch in loader:` and "
                    "`for x, y in batch:`"
                )
        self._steps.end_step()

    def note_inputs(self, inputs: Nest) -> None:
        """Record the digest of a model's ``inputs`` outside of micro batches, if the next step is checked."""
        if self._layout.num_instances > 1 and self._steps.is_next_checked():
            self._inputs = digest_of_batch(inputs)

    def watch(self, forward: Callable[[], R]) -> R:
        """Call ``forward`` and return its result; in a checked step, watch the Python state of the module."""
        if self._steps.is_next_checked() and self._python_state.is_watched(self._steps.number):
            return self._python_state.watch(forward)
        return forward()

    def watch_evaluation(self, forward: Callable[[], R]) -> R:
        """Call ``forward`` and return its result; warn at the first such pass that draws random numbers."""
        if not self._may_warn_of_draws:
            return forward()
        before = torch.get_rng_state()
        result = forward()
        if not torch.equal(before, torch.get_rng_state()):
            self._may_warn_of_draws = False
            _warn(
                "the model drew random numbers in training mode outside of its micro batches, as dropout does. "
                "The results depend on the number of instances: call model.eval() before an evaluation, and "
                "model.train() after it"
            )
        return result


class WrittenWeights:
    """The record of how a model's weights were written: torch's counts of writes, and learning rates.

    If an instance alone makes an optimizer step or loads weights, its number of writes differs. If a scheduler
    steps on an instance alone, the learning rate differs. A difference alone is no fault: one instance may put a
    mean of the weights in for an evaluation, and take the mean out again. So after a difference the instances only
    compare their weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.num_useless_comparisons = 0  # comparisons that found equal weights
        self._before: int | None = None

    def since_before(self) -> int:
        """Return a digest of the number of writes to the weights since the last call, and of learning rates.
        Return 0 at the first call, and after three comparisons that the digest caused have found equal weights.
        """
        if self.num_useless_comparisons == _MOST_USELESS_COMPARISONS:
            return 0
        parameters = [it for it in self.module.parameters() if not it.is_inference()]
        now = sum(map(torch_private.num_writes, parameters))
        before, self._before = self._before, now
        if before is None:
            return 0
        return hash((now - before, digest_of_rates(frozenset(map(id, parameters)))))


class UncheckedStep(StepChecks):
    """A step in which instances compare their weights only if their counts of writes to the weights differ."""

    def __init__(self, written: WrittenWeights, writes: int) -> None:
        self._written = written
        self.writes = writes

    def compare_written(self, group: Group, writes: Sequence[int], timeout_seconds: float | None = None) -> None:
        """Compare the weights of all instances if not all numbers in ``writes`` are equal.

        ``writes`` has one digest for each instance: of its writes to the weights, and of its learning rates.
        Raises WeightsError on all instances if the weights differ.
        """
        if len(set(writes)) > 1:
            sums = sum_parameters(self._written.module)
            exchange = group.start("compare weights that were not written alike", [sums.word])
            words = exchange.wait(timeout_seconds)
            compare_weights(group, [word for (word,) in words], sums, timeout_seconds)
            self._written.num_useless_comparisons += 1

    def fault(self) -> str | None:
        """Return the first fault in a forward pass of any model, as text; None if there is no fault."""
        return next_fault()


class CheckedStep(StepChecks):
    """A step that compares weights, samples and passes over loaders between instances, and watches buffers."""

    is_on = True

    def __init__(
        self,
        sums: ParameterSums | None,  # None if the job has one replica
        others: ParameterSums | None,
        batch: Nest,
        num_passes: int,
        *,
        is_first: bool,
    ) -> None:
        self._sums = sums
        self._others = others
        self._buffers: UntrackedBuffers | None = None
        self._is_first = is_first
        self.inputs = 0  # a digest of the model's inputs outside of micro batches
        self.checksum = 0 if sums is None else sums.word
        if context.environment().contract.layout.num_instances > 1 and batch is not None:
            self.num_loader_passes = num_passes
            self.digest = 0 if batches_of_loaders(batch) else digest_of_batch(batch)

    def compare_weights(
        self, group: Group, checksums: Sequence[int], timeout_seconds: float | None = None
    ) -> None:
        """Raise WeightsError on all instances if their weights differ; the error names the first such tensor."""
        compare_weights(group, checksums, self._sums, timeout_seconds)

    def compare_batches(self, group: Group, headers: Sequence[BeginHeader]) -> None:
        """Warn if instances have equal samples, or if some instances have read loaders more often than others."""
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
        """Warn if instances pass the same samples to the model in a loop without micro batches."""
        if len(group.instances) > 1:
            _warn_of_equal(group, [it for (it,) in group.start("compare the samples", [self.inputs]).wait()])

    def fault(self) -> str | None:
        """Return a text about a fault in a forward pass or a parameter written in a micro batch; else None."""
        if found := next_fault():
            return found
        if self._sums is not None and (name := self._sums.first_change()):
            return (
                f"{name} was written in a micro batch: so the result depends on how many micro "
                "batches an instance computes, and this step has no gradient on any instance. Write a parameter "
                "once for all replicas, outside of the loop over micro batches (as after optimizer.step()); or "
                "make it a buffer, which is combined over the replicas"
            )
        if self._others is not None and (name := self._others.first_change()):
            return (
                f"{name} was written in a micro batch of another model: so the result depends on how many micro "
                "batches an instance computes. Write a parameter once for all replicas, outside of the loop over "
                "micro batches: move a teacher or a target network, and step an optimizer, after it"
            )
        return None

    def begin_loop(self) -> None:
        """Begin to watch buffers outside of all wrapped models for changes, but only in step 1 on instance 0."""
        if self._is_first and self._sums is not None and context.instance_index() == 0:
            self._buffers = UntrackedBuffers()

    def end_loop(self, *, is_complete: bool) -> None:
        """Stop watching the buffers outside of wrapped models; after a complete loop, warn of changed buffers."""
        if self._buffers is not None:
            self._buffers.close(warns=is_complete)


def _warn_of_equal(group: Group, digests: Sequence[int]) -> None:
    """Warn if other instances have the same samples in this step; only the first of these instances warns."""
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


def digest_of_batch(batch: Nest) -> int:
    """Return a digest of the first numbers of the first tensors in ``batch``; 0 if all numbers are equal."""
    digest, has_content = hashlib.blake2b(digest_size=7), False
    tensors = (it for _, it in leaves_of(batch) if isinstance(it, Tensor))
    dense = (it for it in tensors if not it.is_meta and it.layout == torch.strided and it.numel())
    for tensor in islice(dense, _MOST_TENSORS):
        head = tensor.detach().reshape(-1)[:_MOST_NUMBERS]
        has_content |= bool((head != head[0]).any())
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(bytes_of(head))
    return int.from_bytes(digest.digest(), "little") if has_content else 0
