"""The stages of a pipeline: counted by the blocks that a model's first forward enters, and checked."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final

from torch import nn

from poptorch._logging import logger
from poptorch.enums import AutoStage
from poptorch.errors import Error
from poptorch.options import Options
from poptorch.options.execution_strategies import ExecutionStrategy, PipelinedExecution, ShardedExecution


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredBlock:
    """A block that a forward entered."""

    user_id: str | None  # what the program calls it; None for a block without a name
    ipu_id: int | None  # the virtual IPU that the program gave it; None for none
    module: nn.Module | None = None  # the module that begins it; None for a block of statements


class FirstForward:
    """The blocks that one forward of a model enters, in order."""

    def __init__(self) -> None:
        self.blocks: list[EnteredBlock] = []
        self.num_automatic: int | None = None  # blocks that were named by their number; None before useAutoId()

    def enter(self, block: EnteredBlock) -> None:
        """Record that the forward enters ``block``."""
        if block.user_id is None and self.num_automatic is not None:
            block = replace(block, user_id=str(self.num_automatic))
            self.num_automatic += 1
        self.blocks.append(block)


recorded_forward: Final[ContextVar[FirstForward | None]] = ContextVar("recorded_forward", default=None)
"""The forward that is recorded in this thread; None otherwise."""


@contextmanager
def recording() -> Iterator[FirstForward]:
    """Record the forward that runs within."""
    token = recorded_forward.set(seen := FirstForward())
    try:
        yield seen
    finally:
        recorded_forward.reset(token)


def count_stages(strategy: ExecutionStrategy, blocks: Sequence[EnteredBlock]) -> int:
    """The stages of a forward that enters ``blocks``; an Error if a block has no stage."""
    if strategy.stages:
        _check_named(strategy, blocks)
        return len(strategy.stages) if blocks else 1
    if strategy.auto_stage is AutoStage.AutoIncrement:
        return max(1, len({block.user_id or block.module or place for place, block in enumerate(blocks)}))
    return 1 + max((block.ipu_id or 0 for block in blocks), default=0)


def _check_named(strategy: ExecutionStrategy, blocks: Sequence[EnteredBlock]) -> None:
    named = [stage.blocks for stage in strategy.stages]
    for block in blocks:
        if not any(block.user_id in names for names in named):
            name = "without a user_id" if block.user_id is None else repr(block.user_id)
            raise Error(
                f"the model has a block {name}, and no stage of {type(strategy).__name__} names it: {named}"
            )


def check_stages(blocks: Sequence[EnteredBlock], options: Options, *, is_training: bool) -> None:
    """Refuse a call that does not fill the pipeline."""
    strategy = options._execution_strategy  # noqa: SLF001 - PopTorch's programs read the attribute by this name
    num_stages = count_stages(strategy, blocks)
    logger.debug("poptorch.Options enablePipelining set to value %d", is_pipeline(options) and num_stages > 1)
    if not is_pipeline(options):
        return
    accumulation, iterations = options.Training.gradient_accumulation, options.device_iterations
    if is_training and accumulation < 2 * num_stages - 1:
        raise Error(
            f"options.Training.gradientAccumulation is {accumulation}, and must be greater than or equal to the "
            f"number of pipeline stages ({2 * num_stages - 1}) of training: {num_stages} forward, "
            f"{num_stages - 1} backward"
        )
    if not is_training and iterations < num_stages:
        raise Error(
            f"options.deviceIterations must be greater than or equal to the number of pipeline stages "
            f"({num_stages}) in inference, and is {iterations}"
        )


def is_pipeline(options: Options) -> bool:
    """Whether the stages of the options' strategy work at the same time, so that a call must fill them."""
    strategy = options._execution_strategy  # noqa: SLF001 - PopTorch's programs read the attribute by this name
    return isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution)
