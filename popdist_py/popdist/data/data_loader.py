"""The loader that feeds one instance's replicas: torch's DataLoader, with the micro batches made one by one."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

from torch.utils.data import Sampler, default_collate

from popdist import context
from popdist.data.batch import Share
from popdist.data.epoch import EpochPlan, check_sizes, deal_epoch, plan_epochs
from popdist.data.fetching import Collate, Collation, MapFetcher
from popdist.data.position import EpochPosition
from popdist.data.replica_loader import ReplicaLoader
from popdist.data.streams import ShardedIterable, StreamFetcher, StreamLoader
from popdist.errors import DatasetError

_DEALING_OPTIONS: Final = frozenset({"batch_size", "sampler", "batch_sampler", "in_order"})


class EpochShares(Sampler[Share]):
    """This instance's share of each step of the epoch that is being started."""

    def __init__(self, plan: EpochPlan, replicas: range, position: EpochPosition) -> None:
        self._plan = plan
        self._replicas = replicas
        self._position = position

    def __len__(self) -> int:
        return self._plan.num_steps()

    def set_epoch(self, epoch: int) -> None:
        """As the loader's, for programs that know it of DistributedSampler."""
        self._position.set_epoch(epoch)

    def __iter__(self) -> Iterator[Share]:
        return self._shares(self._position.epoch, deal_epoch(self._plan, self._replicas, self._position))

    def _shares(self, epoch: int, steps: Iterator[tuple[range, list[int]]]) -> Iterator[Share]:
        for number, (step, indices) in enumerate(steps):
            yield Share(epoch=epoch, step=number, stop=step.stop, num_samples_job=len(step), indices=indices)


class LoaderPlan(NamedTuple):
    """What a loader was asked for; see :func:`data_loader`."""

    micro_batch_size: int
    accumulation: int
    shuffle: bool
    seed: int
    drop_last: bool


class LoaderMaker(Protocol):
    """What makes a loader of something else than samples, such as ``popdist.packing.Packing``."""

    def make_loader(
        self,
        dataset: Any,  # noqa: ANN401 - anything with a length and items
        plan: LoaderPlan,
        collate_fn: Collate | None,
        options: Mapping[str, Any],
    ) -> ReplicaLoader:
        """The loader of ``dataset``."""


def data_loader(  # noqa: PLR0913 - torch's own options, and what a step is
    dataset: Any,  # noqa: ANN401 - anything with a length and items
    micro_batch_size: int | None = None,
    accumulation: int = 1,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    collate_fn: Collate | None = None,
    packing: LoaderMaker | None = None,
    **options: Any,  # noqa: ANN401 - torch's own
) -> ReplicaLoader:
    """A torch DataLoader that gives this instance's replicas their samples, exactly once an epoch.

    It deals samples as :class:`ReplicaSampler` does: which samples a replica sees in a step depends on the job's
    replicas, not on the instances they are dealt to. It yields :class:`Batch` objects for
    ``ReplicatedModel.micro_batches``, each micro batch collated by itself: padding, graphs, strings and dicts are
    all right, and nothing has to be split. Its state is that of the loop, not of the workers.

    Random numbers that the dataset draws for a sample (from Python's, numpy's and torch's CPU generators) follow
    from ``seed``, the epoch and the sample's index, and those of ``collate_fn`` from its first sample: neither the
    split nor the number of workers changes them, and without workers the process's own random state stays as it
    was. (A dataset that reads a list of samples at once with ``__getitems__`` draws once for each micro batch.)

    Args:
        dataset: Map-style: a length, and a sample for each index. A stream comes as ``shard_iterable(stream)``.
        micro_batch_size: Samples of one replica in one forward and backward pass, which must be said. At least 1.
        accumulation: Micro batches that a replica adds up in one step. At least 1.
        shuffle: Another order in each epoch; else the order of the dataset.
        seed: Chooses the orders and the random numbers. Must be the same on all instances.
        drop_last: Leave out a remainder smaller than a full step.
        collate_fn: Makes a micro batch of a list of samples; None means torch's own.
        packing: ``popdist.packing.Packing(...)`` puts several samples into one row. Both sizes then count rows.
        **options: Anything else that DataLoader takes, such as ``num_workers=4``, ``pin_memory=True``,
            ``prefetch_factor=4`` or ``persistent_workers=True``.

    Raises:
        DatasetError: If the dataset has no length or fewer samples than the job has replicas, a size is below 1,
            or an option is one that deals samples.
        CollectiveError: If the instances differ in sizes, seed or length of the dataset, or do not all make the
            loader; a loader that was made before ``popdist.init()`` finds out when it is first iterated over.
    """
    _refuse_dealing(options)
    if micro_batch_size is None:
        raise DatasetError("data_loader(dataset, micro_batch_size): say how many samples a micro batch has")
    if packing is not None:
        plan = LoaderPlan(micro_batch_size, accumulation, shuffle, seed, drop_last)
        return packing.make_loader(dataset, plan, collate_fn, options)
    collation = Collation(
        collate_fn=collate_fn or default_collate,
        num_replicas=context.environment().contract.layout.num_local_replicas,
        accumulation=accumulation,
        seed=seed,
    )
    if not isinstance(dataset, ShardedIterable):
        return _map_loader(dataset, micro_batch_size, collation, options, shuffle=shuffle, drop_last=drop_last)
    if shuffle:
        raise DatasetError("shuffle=True: a stream has no indices to shuffle; shuffle it where it is made")
    return _stream_loader(dataset, micro_batch_size, collation, options, drop_last=drop_last)


def _refuse_dealing(options: dict[str, Any]) -> None:
    if "batch_size" in options:
        raise DatasetError(
            f"batch_size={options['batch_size']!r}: say micro_batch_size, the batch of one replica, as under "
            "DistributedDataParallel; a step has micro_batch_size x accumulation x replicas samples"
        )
    if refused := sorted(_DEALING_OPTIONS & options.keys()):
        raise DatasetError(
            f"{' and '.join(refused)}: data_loader deals the samples itself; say micro_batch_size, accumulation, "
            "shuffle, seed and drop_last"
        )


def _map_loader(
    dataset: Any,  # noqa: ANN401 - as above
    micro_batch_size: int,
    collation: Collation,
    options: dict[str, Any],
    *,
    shuffle: bool,
    drop_last: bool,
) -> ReplicaLoader:
    contract = context.environment().contract
    accumulation, seed = collation.accumulation, collation.seed
    plan = plan_epochs(dataset, contract.num_replicas, micro_batch_size, accumulation, drop_last=drop_last)
    position = EpochPosition(
        "data_loader",
        {"length": plan.length, "shuffle": shuffle, "seed": seed},
        f"data_loader of {plan.length} samples, {micro_batch_size=}, {accumulation=}, {shuffle=}, {seed=}, "
        f"{drop_last=}",
    )
    shares = EpochShares(plan, contract.layout.replicas_of(contract.instance_index), position)
    return ReplicaLoader(MapFetcher(dataset, collation), position, accumulation, {"sampler": shares, **options})


def _stream_loader(
    dataset: ShardedIterable,
    micro_batch_size: int,
    collation: Collation,
    options: dict[str, Any],
    *,
    drop_last: bool,
) -> ReplicaLoader:
    accumulation = collation.accumulation
    check_sizes(micro_batch_size, accumulation)
    position = EpochPosition(
        "data_loader",
        {"seed": collation.seed},
        f"data_loader of a stream, {micro_batch_size=}, {accumulation=}, seed={collation.seed}, {drop_last=}",
    )
    fetcher = StreamFetcher(dataset, collation, micro_batch_size * accumulation, drop_last=drop_last)
    return StreamLoader(fetcher, position, accumulation, options, ends_with_first=drop_last)
