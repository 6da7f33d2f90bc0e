"""Blocks of poptorch: what an annotation leaves alone, how blocks are dealt to stages, and what a pipeline needs.

Holds poptorch.blocks.annotations, poptorch.blocks.pipeline_stages and poptorch.options.execution_strategies.
"""

import copy
import io
import logging
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from poptorch._logging import logger
from poptorch.blocks.pipeline_stages import EnteredBlock, check_stages, recorded_forward, recording

AUTO = poptorch.AutoStage


class Layers(nn.Module):
    """Four layers in a row, of 8 x 8 and 8 numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all of them."""
        for layer in self.layers:
            x = layer(x)
        return x


class Named(nn.Module):
    """Statements in blocks of every form, begun by ``begin``."""

    def __init__(self, begin: Callable[[], object]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.begin = begin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two blocks, the second one decorated."""
        self.begin()
        with poptorch.Block(ipu_id=0):
            x = self.first(x)
        return self.rest(x)  # type: ignore[no-any-return]  # a tensor

    @poptorch.BlockFunction(ipu_id=1)
    def rest(self, x: torch.Tensor) -> Any:
        """The second block."""
        return self.second(x)


def _annotated() -> Layers:
    model = Layers()
    for number, layer in enumerate(model.layers):
        assert poptorch.BeginBlock(layer, f"block{number}", ipu_id=number) is layer
    return model


def _run(model: nn.Module, options: poptorch.Options, *, is_training: bool = True) -> list[EnteredBlock]:
    with recording() as seen:
        model(torch.ones(2, 8))
    check_stages(seen.blocks, options, is_training=is_training)
    return seen.blocks


def _options(accumulation: int = 1, iterations: int = 1) -> poptorch.Options:
    options = poptorch.Options().deviceIterations(iterations)
    options.Training.gradientAccumulation(accumulation)
    return options


def test_a_block_leaves_a_module_as_it_was() -> None:
    """Its names, its state, its listing and its class, as far as anybody sees."""
    plain, model = Layers(), _annotated()

    assert list(plain.state_dict()) == list(model.state_dict())
    assert dir(plain.layers[0]) == dir(model.layers[0])
    assert vars(model.layers[0]).keys() == vars(plain.layers[0]).keys()
    assert isinstance(model.layers[0], nn.Linear)
    assert repr(plain) == repr(model)


def test_what_is_saved_is_plain() -> None:
    """A pickle and torch.save have the module's own class; the module itself keeps its block."""
    model = _annotated()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)

    for restored in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):  # noqa: S301 - ours
        assert type(restored.layers[0]) is nn.Linear
        assert torch.equal(restored(torch.ones(2, 8)), model(torch.ones(2, 8)))
    assert type(model.layers[0]) is not nn.Linear
    with pytest.raises(poptorch.Error, match="already been assigned to a block"):
        poptorch.BeginBlock(model.layers[0])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_the_block(copied: Callable[[Any], Any]) -> None:
    """And is another module."""
    layer = poptorch.BeginBlock(nn.Linear(2, 2), user_id=1, ipu_id=2)
    made = copied(layer)

    assert poptorch.module_repr(made) == poptorch.module_repr(layer)
    assert made is not layer
    poptorch.removeBlocks(made)
    assert type(made) is nn.Linear
    assert type(layer) is not nn.Linear


def test_a_representation_shows_blocks() -> None:
    """That of torch otherwise."""
    model = nn.Sequential(nn.Linear(1, 2), nn.Sequential(nn.ReLU()))
    assert poptorch.module_repr(model) == repr(model)
    poptorch.BeginBlock(model[0], user_id=1, ipu_id=2)
    poptorch.BeginBlock(model[1])

    assert "(0): BeginBlock(user_id=1, ipu_id=2) Linear(in_features=1" in poptorch.module_repr(model)
    assert "(1): BeginBlock(user_id=None, ipu_id=None) Sequential(\n    (0): ReLU()" in poptorch.module_repr(model)
    poptorch.removeBlocks(model)
    assert poptorch.module_repr(model) == repr(model)


def test_a_function_can_begin_a_block() -> None:
    """What takes its place can be pickled, and called."""
    made = poptorch.BeginBlock(torch.relu, user_id="r", ipu_id=3)
    again = pickle.loads(pickle.dumps(made))  # noqa: S301 - ours

    assert (again._user_id, again._ipu_id) == ("r", 3)
    assert again(torch.tensor(-1.0)) == 0
    for wrong in (made, 5):
        with pytest.raises(poptorch.Error, match=r"BeginBlock takes a module|already been assigned"):
            poptorch.BeginBlock(wrong)


@pytest.mark.parametrize(
    ("strategy", "needed"),
    [
        (poptorch.PipelinedExecution(), 7),
        (poptorch.PipelinedExecution(AUTO.AutoIncrement), 7),
        (poptorch.PipelinedExecution(poptorch.Stage("block0", "block1"), poptorch.Stage("block2", "block3")), 3),
        (poptorch.PipelinedExecution(poptorch.Stage("block0", "block1", "block2", "block3")), 1),
        (poptorch.ShardedExecution(), 1),
        (poptorch.ParallelPhasedExecution("block0", "block1", "block2", "block3"), 1),
        (poptorch.SerialPhasedExecution(["block0", "block1"], poptorch.Phase("block2", "block3")), 1),
    ],
)
def test_a_pipeline_needs_micro_batches(strategy: Any, needed: int) -> None:
    """In training two for each stage but one; other strategies need none."""
    _run(_annotated(), _options(needed).setExecutionStrategy(strategy))
    if needed > 1:
        short = _options(needed - 1).setExecutionStrategy(strategy)
        with pytest.raises(
            poptorch.Error, match="must be greater than or equal to the number of pipeline stages"
        ) as e:
            _run(_annotated(), short)
        assert f"({needed})" in str(e.value)


def test_inference_needs_one_iteration_a_stage() -> None:
    """Accumulation does not count there, and a model without blocks needs none."""
    _run(_annotated(), _options(1, 4), is_training=False)
    _run(Layers(), _options(), is_training=False)
    with pytest.raises(poptorch.Error, match="deviceIterations must be greater"):
        _run(_annotated(), _options(8, 3), is_training=False)


def test_only_the_first_forward_is_looked_at() -> None:
    """A later one costs nothing, and one that fails leaves nothing behind."""
    model = _annotated()
    with pytest.raises(poptorch.Error):
        _run(model, _options(1))
    model(torch.ones(2, 8))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), recording():
        model(torch.ones(2, 3))

    assert recorded_forward.get() is None


@pytest.mark.parametrize(("is_pipelined", "value"), [(True, 1), (False, 0)])
def test_the_log_says_whether_stages_overlap(
    is_pipelined: bool,  # noqa: FBT001 - a case
    value: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In PopTorch's words."""
    options = _options(7)
    if not is_pipelined:
        options.setExecutionStrategy(poptorch.ShardedExecution())
    logger.setLevel(logging.DEBUG)
    try:
        with caplog.at_level(logging.DEBUG, "poptorch::python"):
            _run(_annotated(), options)
    finally:
        logger.setLevel(logging.WARNING)

    assert f"enablePipelining set to value {value}" in caplog.text


def test_statements_are_blocks_too() -> None:
    """With names of their own, automatic ones, or none."""
    for begin, names in ((poptorch.Block.useAutoId, ["0", "1"]), (lambda: None, [None, None])):
        blocks = _run(Named(begin), _options(3))
        assert [(block.user_id, block.ipu_id) for block in blocks] == list(zip(names, (0, 1), strict=True))
    model = Named(lambda: poptorch.Block.start("start", ipu_id=3))
    assert [block.user_id for block in _run(model, _options(7))] == ["start", None, None]
    with pytest.raises(poptorch.Error, match="block without a user_id"):
        _run(model, _options(3).setExecutionStrategy(poptorch.PipelinedExecution("start")))


def test_a_pipeline_of_named_stages_has_a_place_for_each_block() -> None:
    """Else the error names the block and the stages."""
    strategy = poptorch.PipelinedExecution("block0", "block1", "block2")
    with pytest.raises(poptorch.Error, match=r"a block 'block3', and no stage .*\['block2'\]"):
        _run(_annotated(), _options(9).setExecutionStrategy(strategy))


def test_phases_are_checked() -> None:
    """They have stages, which can be asked for by number and by block."""
    serial = poptorch.SerialPhasedExecution([poptorch.Stage("a"), poptorch.Stage("b")], ["c"])
    parallel = poptorch.ParallelPhasedExecution([poptorch.Stage("a"), poptorch.Stage("b")], ["c"], "d")
    serial.setTensorsLiveness(poptorch.Liveness.OffChipAfterFwd).useSeparateBackwardPhase()

    parallel.phase(0).ipus(5, 6)
    assert parallel.phase(0).stage(1) is parallel.stage("b") is parallel.stage(1)
    assert parallel.stage("b").ipu_id == 6
    assert poptorch.Options().setExecutionStrategy(serial).toDict()["execution_mode"] == 2
    with pytest.raises(KeyError, match="'e'"):
        parallel.stage("e")
    wrong: list[Callable[[], object]] = [
        lambda: parallel.phase(1).ipus(1, 2),
        lambda: poptorch.Phase(poptorch.Stage("a"), "b"),
        lambda: poptorch.SerialPhasedExecution(AUTO.SameAsIpu, "a"),
        lambda: poptorch.SerialPhasedExecution(AUTO.SameAsIpu, AUTO.AutoIncrement),
        lambda: serial.setTensorsLiveness(3),  # type: ignore[arg-type]  # what is refused
    ]
    for call in wrong:
        with pytest.raises(AssertionError):
            call()


class Trained(nn.Module):
    """Two products with statistics between, and a squared error; annotated or not."""

    def __init__(self, *, is_annotated: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.is_annotated = is_annotated
        if is_annotated:
            poptorch.BeginBlock(self.first, "first", 0)
            poptorch.BeginBlock(self.last, "last", 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The product, and the error."""
        x = self.norm(self.first(x))
        if self.is_annotated:
            (x,) = poptorch.for_loop(2, lambda it: poptorch.recomputationCheckpoint(it * 0.5), [x])
            with poptorch.Block("middle", 1), poptorch.NameScope("middle"), poptorch.MultiConv():
                x = poptorch.serializedMatMul(x, torch.eye(8), poptorch.MatMulSerializationMode.ReducingDim, 4)
            (x,) = poptorch.cond(torch.tensor([True]), poptorch.nop, [x], torch.relu, [x])
            x = poptorch.set_available_memory(poptorch.dynamic_slice(x, 1, torch.tensor(0), 8), 0.1)
        else:
            x = (x * 0.5 * 0.5) @ torch.eye(8)
        x = self.last(x)
        return x, nn.functional.mse_loss(x, y)


def _model(options: poptorch.Options, *, is_annotated: bool = True) -> poptorch.PoplarExecutor:
    torch.manual_seed(3)
    model = Trained(is_annotated=is_annotated)
    return poptorch.trainingModel(model, options, poptorch.optim.Adam(model.parameters(), lr=0.1))


@pytest.mark.parametrize("strategy", [poptorch.PipelinedExecution, poptorch.ShardedExecution])
def test_an_annotated_model_trains_to_the_same_bits(strategy: Callable[[], Any]) -> None:
    """As the same model without a word of poptorch in it."""
    samples = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    states = []
    for is_annotated in (True, False):
        executor = _model(_options(3, 2).setExecutionStrategy(strategy()), is_annotated=is_annotated)
        losses = [executor(samples, samples.flip(0))[1] for _ in range(3)]
        states.append([*losses, *executor.state_dict().values()])

    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_a_model_is_checked_when_it_runs_first() -> None:
    """Each time, until it has enough; the executor shows the blocks, and the user's module keeps them."""
    batch = torch.ones(4, 8)
    executor = _model(_options(2))
    for call in (executor.compile, executor, executor):
        with pytest.raises(poptorch.Error, match=re.escape("the number of pipeline stages (3)")):
            call(batch, batch)
    assert "BeginBlock(user_id=last, ipu_id=1) Linear" in repr(executor)
    assert "BeginBlock(user_id=last, ipu_id=1) Linear" in poptorch.module_repr(executor.model)
    inference = poptorch.inferenceModel(Trained(is_annotated=True), _options(1, 1))
    with pytest.raises(poptorch.Error, match="deviceIterations must be greater"):
        inference(batch, batch)
    inference = poptorch.inferenceModel(Trained(is_annotated=True), _options(1, 2))
    assert inference(batch, batch)[0].shape == (4, 8)
