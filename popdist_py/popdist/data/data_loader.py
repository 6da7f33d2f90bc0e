"""The loader of one instance's replicas: torch's DataLoader, but each micro batch is collated by itself."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from torch.utils.data import default_collate

from popdist.data.dealt_streams import ShardedIterable, StreamFetcher, StreamLoader
from popdist.data.epoch import EpochPlan, EpochPosition, check_sizes, length_of, plan_epochs
from popdist.data.replica_loader import Collate, Collation, MapFetcher, ReplicaLoader
from popdist.data.sampler import EpochShares, SampledLoader, SampledPosition, SampledShares, check_sampler
from popdist.errors import DatasetError, check_callable, check_flags
from popdist.job import context

_DEALING_OPTIONS: Final = frozenset({"batch_size", "batch_sampler", "in_order"})


class LoaderPlan(NamedTuple):
    """The arguments of :func:`data_loader` that define a step; all instances must pass the same values."""

    micro_batch_size: int
    accumulation: int
    shuffle: bool
    seed: int
    drop_last: bool

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in zip(self._fields, self, strict=True))


class LoaderMaker(Protocol):
    """An object, such as ``packing.Packing``, that makes a loader of rows, each with several samples."""

    def make_loader(
        self,
        dataset: Any,
        plan: LoaderPlan,
        collate_fn: Collate | None,
        options: Mapping[str, Any],
    ) -> ReplicaLoader:
        """Make a loader that reads ``dataset`` with the micro batch size, the order and the seed of ``plan``."""


def data_loader(  # noqa: PLR0913 - torch's options, and the sizes of a step
    dataset: Any,
    micro_batch_size: int | None = None,
    accumulation: int = 1,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    sampler: Iterable[int] | None = None,
    collate_fn: Collate | None = None,
    packing: LoaderMaker | None = None,
    **options: Any,
) -> ReplicaLoader:
    """Make a torch DataLoader that yields, for each step, the samples of this instance's replicas.

    The loader deals samples as :class:`ReplicaSampler` does: which samples a replica gets in a step depends on the
    number of the job's replicas, not on the number of instances. The loader yields :class:`Batch` objects for
    ``ReplicatedModel.micro_batches``. Each micro batch is collated by itself, so that padding, graphs, strings and
    dicts need no splitting. The loader's state counts what the loop has received, not what workers have read.

    The dataset may draw random numbers for a sample, from Python's, numpy's and torch's CPU generators. They
    follow from ``seed``, the epoch and the sample's index, or the sample's place in the order of a ``sampler``.
    Numbers for ``collate_fn`` follow from the first sample. The number of instances or workers changes no number.
    Random states of the process do not change. (A dataset with ``__getitems__`` is seeded once a micro batch.)

    Args:
        dataset: Map-style: a length, and a sample for each index. Pass a stream as ``shard_iterable(stream)``.
        micro_batch_size: Samples of one replica in one forward and backward pass. Must be given. At least 1.
        accumulation: Micro batches whose gradients a replica adds in one step. At least 1.
        shuffle: Whether each epoch has another order; otherwise every epoch has the order of the dataset.
        seed: Seed of the orders and of the random numbers. Must be the same on all instances.
        drop_last: Whether to leave out a remainder smaller than a full step.
        sampler: Iterable that gives all indices of each epoch on every instance, like torch's samplers.
        collate_fn: Function that makes a micro batch of a list of samples; None means torch's own.
        packing: ``popdist.packing.Packing(...)`` puts several samples into one row. Both sizes then count rows.
        **options: Any other argument of DataLoader, such as ``num_workers=4`` or ``pin_memory=True``.

    Raises:
        DatasetError: If the dataset has no length or fewer samples than the job has replicas, a size is below 1,
            or an option deals samples itself.
        CollectiveError: If sizes, seed or length of the dataset differ between instances, or some instances do not
            make the loader. If the loader is made before ``popdist.init()``, the first iteration raises the error.
    """
    _refuse_dealing(options)
    if micro_batch_size is None:
        raise DatasetError("data_loader(dataset, micro_batch_size): say how many samples a micro batch has")
    plan = LoaderPlan(micro_batch_size, accumulation, shuffle, seed, drop_last)
    _check_arguments(dataset, plan, sampler, collate_fn, packing)
    if packing is not None:
        return packing.make_loader(dataset, plan, collate_fn, options)
    collation = Collation(
        collate_fn=collate_fn or default_collate,
        num_replicas=context.num_local_replicas(),
        accumulation=accumulation,
        seed=seed,
    )
    if sampler is not None:
        return _sampled_loader(dataset, sampler, plan, collation, options)
    make = _stream_loader if isinstance(dataset, ShardedIterable) else _map_loader
    return make(dataset, plan, collation, options)


def _refuse_dealing(options: dict[str, Any]) -> None:
    if "batch_size" in options:
        raise DatasetError(
            f"batch_size={options['batch_size']!r}: say micro_batch_size, the batch of one replica, as under "
            "DistributedDataParallel; a step has micro_batch_size x accumulation x replicas samples"
        )
    if refused := sorted(_DEALING_OPTIONS & options.keys()):
        raise DatasetError(
            f"{' and '.join(refused)}: data_loader deals the samples itself; say micro_batch_size, accumulation, "
            "shuffle, seed and drop_last, or give a sampler="
        )


def _check_arguments(
    dataset: object, plan: LoaderPlan, sampler: object, collate_fn: object, packing: object
) -> None:
    """Raise DatasetError for a wrong argument of ``data_loader``, or for two arguments that exclude each other."""
    if isinstance(dataset, int | float):
        raise DatasetError(
            f"data_loader({dataset!r}, ...): the dataset comes first, and then the sizes: write "
            "data_loader(dataset, micro_batch_size, accumulation)"
        )
    check_callable(DatasetError, collate_fn=collate_fn)
    check_flags(DatasetError, shuffle=plan.shuffle, drop_last=plan.drop_last)
    is_stream = isinstance(dataset, ShardedIterable)
    if sampler is None:
        if packing is not None and not hasattr(packing, "make_loader"):
            raise DatasetError(f"packing={packing!r} must be a popdist.packing.Packing(...)")
        if is_stream and plan.shuffle and packing is None:
            raise DatasetError("shuffle=True: a stream has no indices to shuffle; shuffle it where it is made")
        return
    if plan.shuffle:
        raise DatasetError("sampler= with shuffle=True: the sampler makes the order, so leave shuffle out")
    if packing is not None:
        raise DatasetError("sampler= with packing=: rows are packed from all samples, so leave one of them out")
    if is_stream:
        raise DatasetError("sampler= with a stream, which has no samples at indices: leave the sampler out")
    check_sampler(sampler)


def _sampled_loader(
    dataset: Any,
    sampler: Iterable[int],
    plan: LoaderPlan,
    collation: Collation,
    options: dict[str, Any],
) -> ReplicaLoader:
    check_sizes(plan.micro_batch_size, plan.accumulation)
    epochs = EpochPlan(
        length=length_of(dataset),
        num_replicas=context.num_replicas(),
        samples_per_replica=plan.micro_batch_size * plan.accumulation,
        drop_last=plan.drop_last,
    )
    position = SampledPosition(
        "data_loader with a sampler",
        {"num_samples": epochs.length, "sampler": True, "seed": plan.seed},
        f"data_loader of {epochs.length} samples with a {type(sampler).__name__}, {plan}",
        dataset,
    )
    own = {"sampler": SampledShares(sampler, epochs, position)}
    return SampledLoader(MapFetcher(dataset, collation), position, plan.accumulation, own | options)


def _map_loader(
    dataset: Any,
    plan: LoaderPlan,
    collation: Collation,
    options: dict[str, Any],
) -> ReplicaLoader:
    epochs = plan_epochs(
        dataset, context.num_replicas(), plan.micro_batch_size, plan.accumulation, drop_last=plan.drop_last
    )
    position = EpochPosition(
        "data_loader",
        {"length": epochs.length, "shuffle": plan.shuffle, "seed": plan.seed},
        f"data_loader of {epochs.length} samples, {plan}",
        dataset,
    )
    own = {"sampler": EpochShares(epochs, position)}
    return ReplicaLoader(MapFetcher(dataset, collation), position, plan.accumulation, own | options)


def _stream_loader(
    dataset: ShardedIterable,
    plan: LoaderPlan,
    collation: Collation,
    options: dict[str, Any],
) -> ReplicaLoader:
    check_sizes(plan.micro_batch_size, plan.accumulation)
    position = EpochPosition("data_loader", {"seed": plan.seed}, f"data_loader of a stream, {plan}")
    num_samples = plan.micro_batch_size * plan.accumulation
    fetcher = StreamFetcher(dataset, collation, num_samples, drop_last=plan.drop_last)
    return StreamLoader(fetcher, position, plan.accumulation, options)
