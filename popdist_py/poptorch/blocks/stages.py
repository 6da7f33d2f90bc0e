"""Blocks dealt to stages and virtual IPUs as an execution strategy says, and whether a call fills the pipeline."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from poptorch._logging import logger
from poptorch.blocks.first_forward import EnteredBlock, FirstForward
from poptorch.enums import AutoStage
from poptorch.errors import Error
from poptorch.options import Options
from poptorch.options.execution_strategies import ExecutionStrategy, PipelinedExecution, ShardedExecution, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtBlocks:
    """Where the blocks of a forward run.

    Attributes:
        num_stages: Stages of the forward pass, at least 1.
        ipus: For each block, its virtual IPU in the replica; at first that of what runs before any block.
    """

    num_stages: int
    ipus: tuple[int, ...]


def deal_blocks(strategy: ExecutionStrategy, blocks: Sequence[EnteredBlock]) -> DealtBlocks:
    """Which stages and virtual IPUs ``blocks`` get.

    ``AutoStage.SameAsIpu`` takes a block's IPU as its stage, and without one that of the block before.
    ``AutoStage.AutoIncrement`` gives each new block the next stage, and without an IPU of its own that number.

    Raises:
        Error: If the strategy has stages, and none of them has one of the blocks.
    """
    if strategy.stages:
        found = [_stage_of(strategy, block) for block in blocks]
        ipus = [strategy.ipu_of(stage) for stage in (strategy.stages[0], *found)]
        return DealtBlocks(num_stages=len(strategy.stages) if blocks else 1, ipus=tuple(ipus))
    numbers: dict[Hashable, int] = {}
    ipus = [0]
    for position, block in enumerate(blocks):
        number = numbers.setdefault(block.user_id or block.module or position, len(numbers))
        is_next = strategy.auto_stage is AutoStage.AutoIncrement
        otherwise = number if is_next else ipus[-1]
        ipus.append(otherwise if block.ipu_id is None else block.ipu_id)
    counted = len(numbers) if strategy.auto_stage is AutoStage.AutoIncrement else max(ipus) + 1
    return DealtBlocks(num_stages=max(1, counted), ipus=tuple(ipus))


def _stage_of(strategy: ExecutionStrategy, block: EnteredBlock) -> Stage:
    for stage in strategy.stages:
        if block.user_id in stage.blocks:
            return stage
    name = "without a user_id" if block.user_id is None else repr(block.user_id)
    raise Error(
        f"the model has a block {name}, and no stage of {type(strategy).__name__} names it: "
        f"{[stage.blocks for stage in strategy.stages]}"
    )


def check_num_stages(num_stages: int, options: Options, *, is_training: bool) -> None:
    """Nothing, where a call has micro batches enough for ``num_stages`` stages of a pipeline.

    Raises:
        Error: If the strategy is a pipeline, and it has not.
    """
    if not _is_pipeline(strategy_of(options)):
        return
    needed = 2 * num_stages - 1 if is_training else num_stages
    accumulation, iterations = options.Training.gradient_accumulation, options.device_iterations
    if is_training and accumulation < needed:
        raise Error(
            f"options.Training.gradientAccumulation is {accumulation}, and must be greater than or equal to the "
            f"number of pipeline stages ({needed}) of training: {num_stages} forward, {num_stages - 1} backward"
        )
    if not is_training and iterations < needed:
        raise Error(
            f"options.deviceIterations must be greater than or equal to the number of pipeline stages ({needed}) "
            f"in inference, and is {iterations}"
        )


def check_stages(seen: FirstForward, options: Options, *, is_training: bool) -> None:
    """Deal the blocks of a forward to virtual IPUs, which ``seen`` has then.

    Raises:
        Error: If a block is in none of the strategy's stages, or a call has too few micro batches for the stages:
            in training 2 x stages - 1 are needed, in inference as many as stages.
    """
    strategy = strategy_of(options)
    seen.ipus = (dealt := deal_blocks(strategy, seen.blocks)).ipus
    is_pipelined = _is_pipeline(strategy) and dealt.num_stages > 1
    logger.debug("poptorch.Options enablePipelining set to value %d", is_pipelined)
    check_num_stages(dealt.num_stages, options, is_training=is_training)


def strategy_of(options: Options) -> ExecutionStrategy:
    """What ``setExecutionStrategy`` was given."""
    return options._execution_strategy  # noqa: SLF001 - programs read it so too


def _is_pipeline(strategy: ExecutionStrategy) -> bool:
    return isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution)
