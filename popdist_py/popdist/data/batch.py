"""The batches of a loader; a batch has the micro batches of one step of this instance."""

from collections.abc import Iterator
from dataclasses import dataclass
from dis import opmap
from inspect import currentframe
from types import FrameType
from typing import Any, Final, NamedTuple, NoReturn

from popdist.errors import BatchError
from popdist.ground.layout import micro_batch_rows

_UNPACK: Final = opmap["UNPACK_SEQUENCE"]
"""The bytecode instruction of Python that assigns the items of an iterable to several names."""


def _num_names_unpacked() -> int:
    """Return how many variables the caller's caller assigns, as 2 in ``x, y = batch``; 0 if there are none."""
    caller = _caller_of(_caller_of(currentframe()))  # a variable for this frame would keep loop workers alive
    if caller is None:
        return 0
    code, place = caller.f_code.co_code, caller.f_lasti
    return code[place + 1] if code[place] == _UNPACK else 0


def _caller_of(frame: FrameType | None) -> FrameType | None:
    return None if frame is None else frame.f_back


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one replica in one forward and backward pass.

    A micro batch unpacks in the order of its attributes: ``replica, step, num_samples, content = micro_batch``.

    Attributes:
        replica: Job-wide number of the replica.
        step: Number of the micro batch among the replica's micro batches of this step, from 0.
        num_samples: Number of samples; may be 0.
        content: Result of ``collate_fn`` for the samples; None if there are no samples.
    """

    replica: int
    step: int
    num_samples: int
    content: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self.replica, self.step, self.num_samples, self.content))


running_loops: Final[dict[object, tuple["Batch", ...]]] = {}
"""The loaders' batches in each running loop over micro batches; the key is the model of the loop."""


class Share(NamedTuple):
    """The samples of one step that one instance processes: their indices, and the step's position in the epoch."""

    epoch: int
    step: int  # number of the step, counted from where the epoch was begun or resumed
    stop: int  # position in the epoch at which the next step begins, over all replicas
    num_samples_job: int  # samples of the step, over all replicas of the job
    indices: list[int]  # of this instance's samples in the dataset, or in the stream, replica by replica
    positions: range | None = None  # positions in a sampler's order, because a sampler may repeat an index

    def split(self, num_replicas: int, accumulation: int) -> list[list[int]]:
        """Return a list of sample indices for each micro batch of this instance, replica by replica."""
        rows = micro_batch_rows(len(self.indices), num_replicas, accumulation)
        return [self.indices[row.start : row.stop] for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples of one step of this instance, as micro batches for ``ReplicatedModel.micro_batches``.

    Iteration yields the contents of the micro batches that have samples. If no gradients are wanted, write this
    loop: ``for x, y in batch``. An instance may have no samples. To number micro batches for
    ``ReplicatedModel.micro_batch``, count ``micro_batches``. A batch cannot be used as a tensor or a sample:
    ``batch[0]`` and ``model(batch)`` raise a BatchError that shows the loop to write, and ``batch.to(device)``
    raises an AttributeError. ``for x, y in loader``, which unpacks a batch into two names, also raises a
    BatchError; ``list(batch)`` has the micro batches.

    Attributes:
        micro_batches: ``accumulation`` micro batches of each local replica, replica by replica.
        epoch: Number of the epoch, from 0.
        step: Number of the step in its epoch, from 0, counted from where the epoch was begun or resumed.
        indices: Indices of the samples in the dataset, or numbers in the stream, in the order of the rows.
        num_samples_job: Number of samples of the step over all replicas of the job.
        stop: Position in the epoch at which the next step begins, over all replicas.
    """

    micro_batches: tuple[MicroBatch, ...]
    epoch: int
    step: int
    indices: tuple[int, ...]
    num_samples_job: int
    stop: int

    @classmethod
    def of(cls, share: Share, contents: list[Any], replicas: range, accumulation: int) -> "Batch":
        """Make the Batch of ``share``, an instance's samples of one step, from the collated micro batches."""
        rows = micro_batch_rows(len(share.indices), len(replicas), accumulation)
        owners = [replica for replica in replicas for _ in range(accumulation)]
        steps = [*range(accumulation)] * len(replicas)
        return cls(
            micro_batches=tuple(map(MicroBatch, owners, steps, map(len, rows), contents)),
            epoch=share.epoch,
            step=share.step,
            indices=tuple(share.indices),
            num_samples_job=share.num_samples_job,
            stop=share.stop,
        )

    @property
    def num_samples(self) -> int:
        """Number of samples that this instance has in the batch; may be 0."""
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        if (num_names := _num_names_unpacked()) > 1:
            raise BatchError(_taken_apart(f"unpacked into {num_names} names"))
        return self._contents()

    def _contents(self) -> Iterator[Any]:
        for micro in self.micro_batches:
            if micro.num_samples:
                if running_loops and not any(self is it for batches in running_loops.values() for it in batches):
                    raise BatchError(
                        "a batch of popdist.data_loader was iterated over within a loop over the micro batches of "
                        "another one, as by zip(model.micro_batches(a), b): where a replica has no samples of one "
                        "of them, the pairs would be others than on other instances. Write `for (x, y), z in "
                        "model.micro_batches((a, b)):`, or make a list of the batch before the loop"
                    )
                yield micro.content

    def __getitem__(self, key: object) -> NoReturn:
        raise BatchError(_taken_apart(f"asked for [{key!r}]"))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_taken_apart(f"asked for .{name}"), name=name, obj=self)

    def keys(self) -> NoReturn:
        """Raise BatchError, because ``model(**batch)`` would use the batch as a dict of tensors."""
        raise BatchError(_taken_apart("taken for a dict"))

    def _calculate(self, *_: object) -> NoReturn:
        """Raise BatchError, because ``batch / 255`` would use the batch as a tensor."""
        raise BatchError(_taken_apart("calculated with"))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _calculate

    @classmethod
    def __torch_function__(cls, function: Any, *_: object) -> NoReturn:
        """Raise BatchError, because ``model(batch)`` would use the batch as a tensor."""
        raise BatchError(_taken_apart(f"given to {getattr(function, '__name__', function)}"))

    def __len__(self) -> int:
        return sum(micro.num_samples > 0 for micro in self.micro_batches)


def _taken_apart(how: str) -> str:
    """Return the error message for a program that uses a Batch as if it were tensors, in the way ``how``."""
    return (
        f"a batch of popdist.data_loader was {how}, and it holds this instance's micro batches, not one batch of "
        """tensors. Write

    for batch in loader:
        for x, y in model.micro_batches(batch):
            loss_fn(model(x), y).backward()
        optimizer.step()

and, where no gradients are wanted, `for batch in loader:` and `for x, y in batch:`"""
    )
