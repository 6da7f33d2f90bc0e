"""What the instances say to each other in a step, and what may be checked in it.

A step has two headers: one where a loop over a whole batch begins, and one where the step ends. Some of their
numbers serve checks against misuse, which are made by `popdist.checks` and cost time: steps are handed an object
that makes them, or :data:`NO_CHECKS`.
"""

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

from popdist.errors import CollectiveError, name_instances
from popdist.groups import Group, as_floats

R = TypeVar("R")

MeanOrSum: TypeAlias = Literal["mean", "sum"]
"""What becomes of the weighted gradients: their sum, or that divided by the sum of the weights."""

CANNOT_SPLIT: Final = -1.0
IN_ANOTHER_LOOP: Final = -2.0
REFUSALS: Final = {
    CANNOT_SPLIT: "could not split the batch into micro batches (see the error there)",
    IN_ANOTHER_LOOP: "began this loop in the middle of another one over the same model (see the error there)",
}
"""Sent in place of the heaviest weight by an instance that cannot make the step, and what each means."""

STATES: Final = ("mean", "sum", "abandoned", "not finite", "fault")
"""What an instance says at the end of its step: how it wants its gradients reduced, or why it has none."""

NOT_DEALT: Final = -1


class BatchPosition(NamedTuple):
    """The place of a batch in a loader of popdist: its epoch, and the position at which the next batch begins.

    The epoch of a batch that is the program's own is ``NOT_DEALT``.
    """

    epoch: int = NOT_DEALT
    stop: int = 0


class BeginHeader(NamedTuple):
    """What an instance says where a loop over a whole batch begins.

    ``heaviest`` is the weight of its heaviest micro batch, as a word; ``early`` stands for the gradients that it
    would send while the backward pass runs; ``old`` for gradients of before that nothing has used. ``epoch`` and
    ``stop`` are the batch's position. The rest serves checks, and is 0 where there are none: a checksum of the
    weights, a digest of the samples, and how often loaders were read.
    """

    heaviest: int
    early: int = 0
    old: int = 0
    epoch: int = NOT_DEALT
    stop: int = 0
    checksum: int = 0
    digest: int = 0
    num_loader_passes: int = 0

    @property
    def heaviest_weight(self) -> float:
        """The weight, or the reason why the instance makes no step."""
        return as_floats([self.heaviest])[0]


class EndHeader(NamedTuple):
    """What an instance says where its step ends, before the weights of its tree nodes.

    ``state`` is a position in ``STATES``. ``changes`` is a digest of what was used and changed. ``way`` says how
    gradients are added: 0 all of them at the end, a positive number in parts, a negative one for sums that are
    there already. ``checksum`` and ``old`` are those of :class:`BeginHeader`, if there was none.
    """

    state: int
    changes: int
    way: int
    checksum: int
    old: int


def refuse_other_positions(group: Group, headers: Sequence[BeginHeader]) -> None:
    """Refuse batches that loaders of popdist have dealt in different steps: all must bring those of one step."""
    owners: dict[tuple[int, int], list[int]] = {}
    for instance, header in zip(group.instances, headers, strict=True):
        if header.epoch != NOT_DEALT:
            owners.setdefault((header.epoch, header.stop), []).append(instance)
    if len(owners) > 1:
        brought = "; ".join(
            f"{name_instances(instances)}: epoch {epoch} up to position {stop}"
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
    """What is checked in one step. This one checks nothing.

    ``is_on`` says whether checks are made that cost time; ``checksum``, ``digest`` and ``num_loader_passes`` are
    those of the headers.
    """

    is_on = False
    checksum = 0
    digest = 0
    num_loader_passes = 0

    def compare_weights(
        self, group: Group, checksums: Sequence[int], timeout_seconds: float | None = None
    ) -> None:
        """Compare the weights of all instances, each of which has sent a checksum, or 0."""

    def compare_batches(self, group: Group, headers: Sequence[BeginHeader]) -> None:
        """Compare what the instances say of their batches and loaders."""

    def fault(self) -> str | None:
        """What was found wrong on this instance by the end of the step, in words."""
        return None

    def begin_loop(self) -> None:
        """Begin to watch what the loop over micro batches writes."""

    def end_loop(self, *, is_complete: bool) -> None:
        """Stop to watch; warn of what was found, if the loop came to its end."""


NO_CHECKS: Final = StepChecks()


class ModelChecks:
    """What is checked in the steps of one model. This one checks nothing."""

    def begin_step(self, batch: object = None) -> StepChecks:
        """The checks of the step that begins; None stands for a step without a whole batch."""
        del batch
        return NO_CHECKS

    def end_step(self) -> None:
        """Count a step that has ended with a gradient on all instances."""

    def watch(self, forward: Callable[[], R]) -> R:
        """Call the module's forward pass, and find out what it changes."""
        return forward()
