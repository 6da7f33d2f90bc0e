"""The headers that instances exchange in a step, and the interface of the checks of a step.

A step has two headers: one when a loop over a whole batch begins, and one when the step ends. The parameters that
replicas have used and the buffers that they have changed are almost always equal on all instances. So each
instance sends a digest of the changes in the last header, and the full list only if digests differ.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from popdist.errors import CollectiveError, WeightsError
from popdist.exchange.groups import Group, as_floats
from popdist.gradients.buffers import ReplicaBuffers
from popdist.job.collectives import gather_bytes, gather_json
from popdist.job.weights import bytes_of

R = TypeVar("R")

MeanOrSum: TypeAlias = Literal["mean", "sum"]
"""Whether the weighted gradients are only added, or also divided by the sum of the weights."""

CANNOT_SPLIT: Final = -1.0
IN_ANOTHER_LOOP: Final = -2.0
REFUSALS: Final = {
    CANNOT_SPLIT: "could not split the batch into micro batches (see the error there)",
    IN_ANOTHER_LOOP: "began this loop in the middle of another one over the same model (see the error there)",
}
"""Values that replace the heaviest weight if an instance cannot make the step, with their meanings."""

STATES: Final = ("mean", "sum", "abandoned", "not finite", "fault", "goes on")
"""The states of an instance at the end of its step: how to reduce its gradients, or why it has none.

An instance that goes on adds gradients in its last backward pass, and waits for the other instances.
"""

NOT_DEALT: Final = -1


class BatchPosition(NamedTuple):
    """The epoch and the end of a batch in a loader of popdist; for other batches ``epoch`` is ``NOT_DEALT``."""

    epoch: int = NOT_DEALT
    stop: int = 0


class BeginHeader(NamedTuple):
    """The numbers that an instance sends to all instances when its loop over a batch's micro batches begins."""

    heaviest: int  # the weight of the heaviest micro batch, as a 64-bit word
    early: int = 0  # a digest of the gradients that would be sent during the backward pass
    old: int = 0  # a digest of earlier gradients that no optimizer has used
    epoch: int = NOT_DEALT
    stop: int = 0
    checksum: int = 0  # of the weights; 0, like the following numbers, if nothing is checked
    digest: int = 0  # a digest of the samples
    num_loader_passes: int = 0
    writes: int = 0  # a digest of the writes to the weights since the step before

    @property
    def heaviest_weight(self) -> float:
        """The largest weight of the sender's micro batches; below 0 if the sender cannot make the step."""
        return as_floats([self.heaviest])[0]


class EndHeader(NamedTuple):
    """The numbers at the start of the message that an instance sends to all instances when its step ends."""

    state: int  # index in ``STATES``
    changes: int  # a digest of used parameters and changed buffers
    way: int  # when gradients are added: 0 at the end, above 0 in parts, below 0 already added; or the place
    checksum: int  # like ``old`` and ``writes`` as in `BeginHeader`, if no `BeginHeader` was sent
    old: int
    writes: int


def refuse_other_positions(group: Group, headers: Sequence[BeginHeader]) -> None:
    """Raise CollectiveError if the instances' batches from popdist's loaders belong to different steps."""
    owners: dict[tuple[int, int], list[int]] = {}
    for instance, header in zip(group.instances, headers, strict=True):
        if header.epoch != NOT_DEALT:
            owners.setdefault((header.epoch, header.stop), []).append(instance)
    if len(owners) > 1:
        brought = "; ".join(
            f"{group.name(instances)}: epoch {epoch} up to position {stop}"
            for (epoch, stop), instances in owners.items()
        )
        raise CollectiveError(
            f"the instances bring batches of different steps of their loaders: {brought}. One has left out a "
            "batch that others have not, as by `continue` or after an exception that it alone has caught; has "
            "read a loader alone, or loaded its state; has made more steps with a batch, as LBFGS with a closure "
            "that returns a loss of its own; or they choose between loaders by chance. Do it alike on all "
            "instances"
        )


class StepChecks:
    """The checks that instances have equal weights and batches of one step. This base class checks nothing."""

    is_on = False  # whether to make the checks that cost time
    checksum = 0
    digest = 0
    num_loader_passes = 0
    writes = 0

    def compare_weights(
        self, group: Group, checksums: Sequence[int], timeout_seconds: float | None = None
    ) -> None:
        """Compare the model's weights on all instances by ``checksums``, one for each instance; 0 if unknown."""

    def compare_written(self, group: Group, writes: Sequence[int], timeout_seconds: float | None = None) -> None:
        """Compare all instances' weights if ``writes``, digests of how often weights were written, differ."""

    def compare_batches(self, group: Group, headers: Sequence[BeginHeader]) -> None:
        """Compare the batches and loaders of all instances by the messages with which they begin the step."""

    def compare_inputs(self, group: Group) -> None:
        """Compare the model's inputs on all instances, for a step without a loop over micro batches."""

    def fault(self) -> str | None:
        """Return as text a mistake of the program on this instance in the step; None if there is no mistake."""
        return None

    def begin_loop(self) -> None:
        """Begin to watch, in a loop over micro batches, the buffers of modules that no wrapped model has."""

    def end_loop(self, *, is_complete: bool) -> None:
        """Stop watching buffers outside of wrapped models; after a complete loop, warn of changed buffers."""


NO_CHECKS: Final = StepChecks()


class ModelChecks:
    """The checks of the steps of one model. This base class checks nothing."""

    def begin_step(self, batch: object = None) -> StepChecks:
        """Return the checks of the step that begins; ``batch`` is None if micro batches come one by one."""
        del batch
        return NO_CHECKS

    def end_step(self) -> None:
        """Count a step that has ended on all instances; the count decides which later steps are checked."""

    def note_inputs(self, inputs: object) -> None:
        """Record the model's inputs in a training pass outside of micro batches, to compare instances later."""

    def watch(self, forward: Callable[[], R]) -> R:
        """Call ``forward``, a module's forward pass; return its result; record the module's changed attributes."""
        return forward()

    def watch_evaluation(self, forward: Callable[[], R]) -> R:
        """Call ``forward``, an evaluation in training mode outside of micro batches, and return its result."""
        return forward()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChanges:
    """The parameters that got a gradient and the buffers that were changed in a step."""

    mask: int = 0  # bits of the parameters with a gradient, then of the model's changed buffers
    others: tuple[str, ...] = ()  # keys of changed buffers of other models
    irregular: tuple[tuple[str, str], ...] = ()  # keys and descriptions of buffers made or changed in form
    starts: tuple[tuple[str, int], ...] = ()  # checksums of the model's buffers at the beginning of a checked step

    @property
    def digest(self) -> int:
        """A 56-bit digest of the parameters used and the buffers changed: equal if these are equal."""
        return _digest(self.mask, self.others, self.irregular, self.starts)


NO_CHANGES: Final = StepChanges()


@lru_cache(maxsize=64)
def _digest(mask: int, *others: object) -> int:
    """Return the digest of a step that instances compare: of the changed buffers ``mask`` and of ``others``."""
    data = mask.to_bytes(mask.bit_length() // 8 + 1, "little")
    if any(others):
        data += repr(others).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


@lru_cache(maxsize=64)
def _only(used: int) -> StepChanges:
    """Return the changes of a step in which parameters were used (bits of ``used``) and no buffer has changed."""
    return StepChanges(mask=used)


def changes_of(used: int, num_parameters: int, buffers: ReplicaBuffers | None) -> StepChanges:
    """Return the parameters used and the buffers changed by this instance's replicas in the step."""
    if buffers is None:
        return _only(used)
    own, others = buffers.changed()
    found = buffers.irregular_now()
    if not own and not others and not found and not buffers.is_checked:
        return _only(used)
    irregular = tuple((key, _describe(tensor)) for key, tensor in sorted(found.items()))
    return StepChanges(
        mask=used | own << num_parameters,
        others=tuple(others),
        irregular=irregular,
        starts=tuple(buffers.start_sums),
    )


def agree_on_changes(
    group: Group, own: StepChanges, digests: Iterable[int], buffers: ReplicaBuffers | None
) -> StepChanges:
    """Return the union of the changes that all instances made in a step; raise WeightsError if buffers differ."""
    if len(set(digests)) == 1:
        return own
    labels = [] if buffers is None else buffers.labels
    message = [f"{own.mask:x}", own.others, [key for key, _ in own.irregular], labels, own.starts]
    received = gather_json(group, "exchange what a step has changed", message)
    mask = 0
    for digits, *_ in received:
        mask |= int(digits, 16)
    _compare_starts(group, [it[4] for it in received])
    others = sorted({key for it in received for key in it[1]})
    irregular = sorted({key for it in received for key in it[2]})
    for key in [*others, *irregular]:
        label = key.rpartition(" ")[0]
        if label and (
            without := [i for i, it in zip(group.instances, received, strict=True) if label not in it[3]]
        ):
            raise CollectiveError(
                f"a step has changed the buffer {key.rpartition(' ')[2]} of a model that is not on "
                f"{group.name(without)}: wrap the same models, and copy them, on all instances"
            )
    if irregular and buffers is not None:
        _compare(group, buffers, irregular)
        buffers.set_apart(irregular)
    return StepChanges(mask=mask, others=tuple(others))


def _compare_starts(group: Group, starts: Sequence[Sequence[tuple[str, int]]]) -> None:
    """Raise WeightsError on every instance if ``starts``, the buffers' checksums at the step's start, differ."""
    for (name, first), *others in zip(*starts, strict=False):
        if differing := [i for i, (_, it) in zip(group.instances[1:], others, strict=True) if it != first]:
            raise WeightsError(
                f"the buffers of the instances are no longer equal: {name} of {group.name(differing)} was not "
                f"that of {group.name(group.instances[:1])} when the step began. The usual reasons: a part of the "
                "model was called in training mode outside of all loops, on other samples on each instance; "
                "load_state_dict() on one instance only; a write of the program's own that follows the samples of "
                "one instance. popdist.broadcast_weights(model) makes them equal"
            )


def _compare(group: Group, buffers: ReplicaBuffers, keys: Sequence[str]) -> None:
    """Raise WeightsError on every instance if a buffer in ``keys`` differs between instances that have it."""
    tensors = [buffers.tensor_of(key) for key in keys]
    forms = [None if tensor is None else [str(tensor.dtype), *tensor.shape] for tensor in tensors]
    text = "compare buffers that were made in a step"
    received = gather_json(group, text, forms)
    digests = []
    for tensor, *forms_of_one in zip(tensors, *received, strict=True):
        known = [form for form in forms_of_one if form is not None]
        is_alike = len({(form[0], len(form)) for form in known}) == 1
        if tensor is None or not is_alike:
            digests.append("" if tensor is None else _describe(tensor))
            continue
        common = [min(sizes) for sizes in zip(*(form[1:] for form in known), strict=True)]
        digests.append(_describe(tensor[tuple(slice(size) for size in common)]))
    found = gather_json(group, f"{text}, contents", digests)
    for key, *own in zip(keys, *found, strict=True):
        if len(set(own) - {""}) > 1:
            first = next(digest for digest in own if digest)
            differing = [i for i, it in zip(group.instances, own, strict=True) if it not in ("", first)]
            raise WeightsError(
                f"the buffer {buffers.describe(key)} was made in a micro batch, or changed its shape or dtype "
                f"there, and differs between instances (on {group.name(differing)}): nothing tells what it is "
                "for all replicas. Register it before training, in its shape and dtype; keep in it what does not "
                "follow from the samples; or hand the state to forward() and return it"
            )


def _describe(tensor: Tensor | None) -> str:
    """Return dtype, shape and a digest of a buffer as text; equal texts mean bitwise equal buffers."""
    if tensor is None:
        return "none"
    digest = hashlib.blake2b(bytes_of(tensor), digest_size=8).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest}"


def raise_fault(group: Group, fault: str | None) -> None:
    """Raise WeightsError on all instances with the first instance's ``fault`` that is not None; all call this."""
    received = gather_bytes(group, "exchange what is wrong", (fault or "").encode())
    faults = {instance: data.decode() for instance, data in zip(group.instances, received, strict=True) if data}
    raise WeightsError(f"{next(iter(faults.values()))} (found on {group.name(faults)})")
