"""What a call cannot use is told in popdist's own words: what was given, and what was expected."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import popdist
from popdist import checkpoint
from popdist.errors import as_float, seed_number, whole_number

DATASET = TensorDataset(torch.ones(20, 4))


@pytest.fixture(autouse=True)
def _job_of_one() -> None:
    popdist.init()


def model(**options: Any) -> popdist.ReplicatedModel:
    """One that takes rows of four numbers."""
    return popdist.ReplicatedModel(nn.Linear(4, 2), **options)


def step(accumulation: Any = 1, scale: float = 1.0, **options: Any) -> None:
    """A whole step."""
    net = model(check_finite=True)
    for x in net.micro_batches(torch.ones(8, 4), accumulation, **options):
        (net(x).sum() * scale).backward()


def sampler(*arguments: Any, **options: Any) -> Any:
    """One that anything is given to."""
    return popdist.ReplicaSampler(*arguments, **options)


def loader(*arguments: Any, **options: Any) -> Any:
    """One that anything is given to."""
    return popdist.data_loader(*arguments, **options)


def state(**changed: object) -> dict[str, object]:
    """That of a sampler of ten, with something changed."""
    return {**sampler(10, 2).state_dict(), **changed}


def sharded() -> popdist.ShardedOptimizer:
    """One of a model."""
    return popdist.ShardedOptimizer(model(), torch.optim.SGD, lr=0.1)


def collator(fields: Any = None) -> Any:
    """One that anything is given to."""
    return popdist.packing.Collator(max_length=4, padding={"input_ids": 0}, token_fields=fields)


WEIGHT = torch.ones(2)

WRONG: Any = popdist
"""The library as a program without types sees it."""

CASES: list[tuple[Callable[[], object], type[popdist.PopdistError], str]] = [
    (lambda: WRONG.init(timeout_seconds="a"), popdist.BackendError, "timeout_seconds='a' must be a finite number"),
    (lambda: WRONG.init(backend=[]), popdist.BackendError, r"unknown backend \[\]"),
    (lambda: sampler(10, 2.0), popdist.DatasetError, "micro_batch_size=2.0 must be a whole number of at least 1"),
    (lambda: sampler(10, 2, "2"), popdist.DatasetError, "accumulation='2' must be a whole number of at least 1"),
    (lambda: sampler(True, 1), popdist.DatasetError, "bool has no length"),  # noqa: FBT003 - the mistake in question
    (lambda: sampler(10, 2, seed="a"), popdist.DatasetError, "seed='a' must be a whole number from"),
    (lambda: sampler(10, 2, seed=2**64), popdist.DatasetError, "seed=18446744073709551616 must be"),
    (lambda: sampler(10, 11, drop_last=True), popdist.DatasetError, "drop_last=True leaves nothing of 10 samples"),
    (
        lambda: sampler(10, 2).set_epoch("x"),
        popdist.DatasetError,
        "epoch='x' must be a whole number of at least 0",
    ),
    (lambda: sampler(10, 2).load_state_dict(None), popdist.DatasetError, "None is no state of a ReplicaSampler"),
    (lambda: sampler(10, 2).load_state_dict(state(epoch="x")), popdist.DatasetError, "'epoch': 'x'.* is no state"),
    (lambda: sampler(10, 2).load_state_dict(state(position=11)), popdist.DatasetError, "is no state of"),
    (lambda: loader(DATASET, 1.5), popdist.DatasetError, "micro_batch_size=1.5 must be a whole number"),
    (lambda: loader(DATASET, 21, drop_last=True), popdist.DatasetError, "leaves nothing of 20 samples"),
    (lambda: loader(DATASET, 2, seed=None), popdist.DatasetError, "seed=None must be a whole number"),
    (lambda: loader(iter([1]), 2), popdist.DatasetError, r"has no length: .* popdist\.shard_iterable"),
    (
        lambda: list(loader(DATASET, 2, collate_fn=lambda _: None)),
        popdist.BatchError,
        "returned None for 2 samples",
    ),
    (lambda: loader(DATASET, 2, shuffle="no"), popdist.DatasetError, "shuffle='no' must be True or False"),
    (lambda: sampler(10, 2, drop_last=None), popdist.DatasetError, "drop_last=None must be True or False"),
    (
        lambda: loader(DATASET, 2, collate_fn="stack"),
        popdist.DatasetError,
        "'stack' must be a function",
    ),
    (lambda: loader(DATASET, 2, packing=True), popdist.DatasetError, r"packing=True must be a popdist\.packing"),
    (lambda: loader(DATASET, 2, 10**30), popdist.DatasetError, "must be a whole number of at most 1048576"),
    (lambda: WRONG.poptorch.Options("3"), popdist.ContractError, "ipus_per_replica='3' must be a whole number"),
    (lambda: WRONG.shard_iterable(None), popdist.DatasetError, "can be iterated over, and was given None"),
    (lambda: loader(DATASET, 2).load_state_dict(3), popdist.DatasetError, "3 is no state of a data_loader"),
    (lambda: WRONG.ReplicatedModel(3), popdist.WeightsError, "wraps a torch.nn.Module, and this is a int"),
    (lambda: model(seed=1.5), popdist.BatchError, "seed=1.5 must be a whole number"),
    (lambda: model(strict_bits="no"), popdist.BatchError, "strict_bits='no' must be True or False"),
    (lambda: model(num_local_replicas=10**30), popdist.BatchError, "must be a whole number of at most 1048576"),
    (lambda: step(add="no"), popdist.BatchError, "add='no' must be True or False"),
    (lambda: step(10**30), popdist.BatchError, "must be a whole number of at most 1048576"),
    (lambda: WRONG.ReplicatedModel.reduce_gradients(model(), add=3), popdist.BatchError, "add=3 must be"),
    (lambda: model().randomness.load_state_dict(WRONG), popdist.WeightsError, "no random states of replicas"),
    (lambda: sharded().load_state_dict({}), popdist.OptimizerError, r"\{\} is no state_dict\(\) of an optimizer"),
    (lambda: WRONG.optim.LAMB([WEIGHT], betas=None), popdist.OptimizerError, "betas=None must be two numbers"),
    (
        lambda: WRONG.optim.LARS([WEIGHT], lr=torch.ones(2)),
        popdist.OptimizerError,
        "must be a number",
    ),
    (
        lambda: WRONG.packing.lpfhp([1], 10**30),
        popdist.DatasetError,
        "max_length=10* must be .* at most",
    ),
    (lambda: WRONG.packing.Packing(max_length=4, strategy=[]), popdist.DatasetError, r"strategy=\[\] must be"),
    (lambda: WRONG.packing.Collator(max_length=4, padding=3), popdist.DatasetError, "padding=3 must be a dict"),
    (lambda: collator("labels"), popdist.DatasetError, "token_fields='labels' must be names"),
    (lambda: collator()([]), popdist.BatchError, r"expected a list of rows, .* found \[\]"),
    (lambda: WRONG.packing.pack_stream(3, 4), popdist.DatasetError, "can be iterated over, and was given 3"),
    (
        lambda: WRONG.packing.pack_stream([], 4, length_of=3),
        popdist.DatasetError,
        "length_of=3 must be",
    ),
    (
        lambda: WRONG.packing.token_mean(None, WEIGHT),
        popdist.BatchError,
        "losses must be a Tensor",
    ),
    (lambda: WRONG.packing.unpack(WEIGHT, None), popdist.BatchError, "packed must be a Packed"),
    (lambda: WRONG.packing.label_counts([]), popdist.BatchError, "batch must be one of popdist.data_loader"),
    (lambda: WRONG.packing.packed_betas(None, 2), popdist.BatchError, "betas=None must lie in 0 to 1"),
    (lambda: step("2"), popdist.BatchError, "accumulation='2' must be a whole number of at least 1"),
    (lambda: step(weights=[-1]), popdist.BatchError, "weight -1 is not possible"),
    (lambda: step(weights=["1"]), popdist.BatchError, "weight '1' is not possible"),
    (lambda: step(weights=1), popdist.BatchError, "weights=1 must be a list of numbers"),
    (lambda: step(split=3), popdist.BatchError, "split=3 must be a function"),
    (lambda: step(split=lambda _: None), popdist.BatchError, "split gave a NoneType"),
    (lambda: step(scale=float("nan")), popdist.GradientError, "the gradient of weight on replica 0 holds NaN"),
    (
        lambda: WRONG.ReplicatedModel.micro_batch(model(), "a"),
        popdist.BatchError,
        "index='a' must be a whole number",
    ),
    (lambda: model().micro_batch(0, weight=WRONG), popdist.BatchError, "weight <module .* is not possible"),
    (lambda: WRONG.broadcast_weights(5), popdist.WeightsError, "expected a module or a state dict, not a int"),
    (lambda: WRONG.checksum([Tensor()]), popdist.WeightsError, "expected a module or a state dict, not a list"),
    (lambda: WRONG.all_reduce_gradients(5), popdist.BatchError, r"expected a torch\.nn\.Module"),
    (lambda: WRONG.all_reduce_gradients(nn.Linear(1, 1), "max"), popdist.BatchError, "op='max' must be"),
    (lambda: popdist.all_reduce(torch.ones(1).expand(3)), popdist.CollectiveError, r"share memory.* clone\(\) it"),
    (lambda: popdist.broadcast(torch.ones(2, 1).expand(2, 3)), popdist.CollectiveError, r"share memory"),
    (lambda: WRONG.gather(3), popdist.CollectiveError, "expected a tensor or a list of them, and found a int"),
    (lambda: WRONG.gather([[1]]), popdist.CollectiveError, "and found a list"),
    (lambda: popdist.weighted_mean(1.0, float("nan")), popdist.CollectiveError, "a finite count of at least 0"),
    (lambda: WRONG.execute_on_instances(["a"], print), popdist.CollectiveError, r"\{a\}, .* instance 0"),
    (lambda: WRONG.execute_on_instances({0}, 3), popdist.CollectiveError, "3.: expected a function to call"),
    (lambda: checkpoint.save(WRONG, x=1), popdist.CheckpointError, "is no folder: expected its path"),
    (
        lambda: WRONG.checkpoint.save("x", keep="a", x=1),
        popdist.CheckpointError,
        "keep='a' must be a whole number",
    ),
    (
        lambda: WRONG.checkpoint.save("x", step=1.5, x=1),
        popdist.CheckpointError,
        "step=1.5 must be a whole number",
    ),
    (lambda: WRONG.checkpoint.load_latest(None, x=1), popdist.CheckpointError, "None is no folder"),
]


@pytest.mark.parametrize(("call", "error", "words"), CASES)
def test_what_cannot_be_used_is_told(
    call: Callable[[], object],
    error: type[popdist.PopdistError],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is the error that the call's documentation names, and the job goes on."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words) as raised:
        call()
    assert type(raised.value) is error
    popdist.init()
    popdist.barrier()


def test_numbers_of_other_libraries_are_numbers() -> None:
    """Those of numpy and torch are taken; what only looks like one is not."""
    assert whole_number("n", np.int64(3), popdist.BatchError) == 3
    assert seed_number(torch.tensor(-5), popdist.BatchError) == -5
    assert as_float(torch.tensor(0.5)) == as_float(np.float32(0.5)) == 0.5
    assert all(np.isnan(as_float(it)) for it in ("0.5", None, [1], torch.ones(2)))
    for wrong in (np.float64(3), torch.tensor(3.0), "3", True):
        with pytest.raises(popdist.BatchError, match="must be a whole number"):
            whole_number("n", wrong, popdist.BatchError)
