"""How a model's blocks are dealt to stages and phases. No number of the model depends on them."""

from collections.abc import Sequence
from typing import Self

from poptorch.enums import AutoStage, Liveness
from poptorch.errors import is_whole


class Stage:
    """Blocks that are one stage."""

    def __init__(self, *block_ids: str) -> None:
        if not block_ids or not all(isinstance(block, str) for block in block_ids):
            raise AssertionError(f"Stage takes the names of its blocks, and was given {block_ids}")
        self.blocks = list(block_ids)
        self.ipu_id: int | None = None

    def ipu(self, ipu: int) -> Self:
        """Run on device ``ipu`` of the replica, from 0. No effect: a replica computes on its first device."""
        if not is_whole(ipu) or ipu < 0:
            raise AssertionError(f"Stage.ipu takes a whole number from 0, and was given {ipu!r}")
        self.ipu_id = ipu
        return self


class Phase:
    """Stages that are on the devices at the same time. No effect: a replica computes on its first device.

    Args:
        *arguments: Its stages; or names of blocks, which are then its only stage.
    """

    def __init__(self, *arguments: Stage | str) -> None:
        self.stages = [argument for argument in arguments if isinstance(argument, Stage)]
        if not self.stages:
            self.stages = [Stage(*arguments)]  # type: ignore[arg-type] # which says what is no name
        elif len(self.stages) < len(arguments):
            raise AssertionError(f"Phase takes stages, or names of blocks, and was given {arguments}")

    def stage(self, number: int) -> Stage:
        """Stage ``number`` of this phase."""
        return self.stages[number]

    def ipus(self, *ipus: int) -> None:
        """Run the stages on these devices of the replica, one for each. No effect: as of ``Stage.ipu``."""
        if len(ipus) != len(self.stages):
            raise AssertionError(f"{len(self.stages)} stages take as many IPUs, and were given {ipus}")
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)


class ExecutionStrategy:
    """What ``options.setExecutionStrategy`` takes."""

    _execution_mode: int

    def __init__(self, auto_stage: AutoStage, stages: list[Stage]) -> None:
        self.auto_stage = auto_stage  # where blocks go that no stage names
        self.stages = stages  # those that were given, in order

    def stage(self, which: int | str) -> Stage:
        """The stage of that number, or the one that has a block of that name; a KeyError if none has."""
        if isinstance(which, int):
            return self.stages[which]
        for stage in self.stages:
            if which in stage.blocks:
                return stage
        raise KeyError(f"no stage has a block {which!r}: {[stage.blocks for stage in self.stages]}")


class PipelinedExecution(ExecutionStrategy):
    """Each stage works on another micro batch at the same time.

    Args:
        *stages: An ``AutoStage``; or stages in order, each a ``Stage`` or the name of a block; none for
            ``AutoStage.SameAsIpu``.
    """

    _execution_mode = 0

    def __init__(self, *stages: AutoStage | Stage | str) -> None:
        auto_stage = stages[0] if stages and isinstance(stages[0], AutoStage) else AutoStage.SameAsIpu
        named = [stage for stage in stages if not isinstance(stage, AutoStage)]
        if len(stages) > max(1, len(named)):
            raise AssertionError(f"{type(self).__name__} takes one AutoStage, or stages, and was given {stages}")
        super().__init__(auto_stage, [stage if isinstance(stage, Stage) else Stage(stage) for stage in named])


class ShardedExecution(PipelinedExecution):
    """The stages of one micro batch run one after the other."""

    _execution_mode = 1


class _PhasedExecution(ExecutionStrategy):
    """Phases of a micro batch run one after the other, and leave the devices between."""

    _execution_mode = 2

    def __init__(self, *phases: AutoStage | Phase | Sequence[Stage | str] | str) -> None:
        auto_stage = phases[0] if phases and isinstance(phases[0], AutoStage) else AutoStage.AutoIncrement
        self.phases = [_phase(phase) for phase in phases if not isinstance(phase, AutoStage)]
        if len(phases) > max(1, len(self.phases)):
            raise AssertionError(f"{type(self).__name__} takes one AutoStage, or phases, and was given {phases}")
        super().__init__(auto_stage, [stage for phase in self.phases for stage in phase.stages])

    def phase(self, number: int) -> Phase:
        """Phase ``number`` of those that were given."""
        return self.phases[number]

    def useSeparateBackwardPhase(self, use: bool = True) -> Self:
        """Whether the backward pass has phases of its own. No effect: torch orders it."""
        del use
        return self


class SerialPhasedExecution(_PhasedExecution):
    """Phases in turn on the same devices. No effect: each block must have a phase, if phases are given."""

    def setTensorsLiveness(self, liveness: Liveness) -> Self:
        """How long tensors stay on the devices. No effect: torch frees what is not used any more."""
        if not isinstance(liveness, Liveness):
            raise AssertionError(f"setTensorsLiveness takes a poptorch.Liveness, and was given {liveness!r}")
        return self


class ParallelPhasedExecution(_PhasedExecution):
    """Even phases on even devices, odd ones on odd ones. No effect: as of ``SerialPhasedExecution``."""


def _phase(given: Phase | Sequence[Stage | str] | str) -> Phase:
    if isinstance(given, Phase):
        return given
    return Phase(*given) if isinstance(given, list | tuple) else Phase(given)  # type: ignore[arg-type] # as above
