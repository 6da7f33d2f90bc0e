"""How a model's blocks are dealt to stages. They change what a compiler does, and no number that a model gives."""

from poptorch.enums import AutoStage


class Stage:
    """Blocks that run one after the other on one device.

    Args:
        *block_ids: What the blocks are called.
    """

    def __init__(self, *block_ids: str) -> None:
        if not block_ids or not all(isinstance(block, str) for block in block_ids):
            raise AssertionError(f"Stage takes the names of its blocks, and was given {block_ids}")
        self.blocks = list(block_ids)
        self._ipu: int | None = None

    def ipu(self, ipu: int) -> "Stage":
        """Run on device ``ipu`` of the replica."""
        self._ipu = ipu
        return self


class PipelinedExecution:
    """Each stage works on another micro batch at the same time.

    Args:
        *stages: An ``AutoStage``; or stages in order, each a ``Stage`` or the name of a block; none for
            ``AutoStage.SameAsIpu``.
    """

    _execution_mode = 0

    def __init__(self, *stages: AutoStage | Stage | str) -> None:
        self.auto_stage = stages[0] if stages and isinstance(stages[0], AutoStage) else AutoStage.SameAsIpu
        named = [stage for stage in stages if not isinstance(stage, AutoStage)]
        if (named and len(named) < len(stages)) or len(stages) - len(named) > 1:
            raise AssertionError(f"{type(self).__name__} takes one AutoStage, or stages, and was given {stages}")
        self.stages = [stage if isinstance(stage, Stage) else Stage(stage) for stage in named]

    def stage(self, number: int) -> Stage:
        """Stage ``number`` of those that were given."""
        return self.stages[number]


class ShardedExecution(PipelinedExecution):
    """The stages of one micro batch run one after the other."""

    _execution_mode = 1
