"""The parts of `Options`: what each one's setters take, and what becomes of it."""

from collections.abc import Mapping
from typing import Any, Final, Self

import torch

from popdist.errors import whole_number
from poptorch.enums import HalfFloatCastingBehavior, MeanReductionStrategy, ReductionType
from poptorch.environment import NUM_PROCESSES, PROCESS_ID, process_in, process_of_job
from poptorch.errors import is_whole
from poptorch.options.option_values import OptionValues, at_least_one, plain

_FEWEST_IO_TILES: Final = 32
_MOST_IO_TILES: Final = 192


class _TrainingOptions(OptionValues):
    """``options.Training``: how gradients become one."""

    def __init__(self) -> None:
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=MeanReductionStrategy.Post,
            auto_loss_scaling=False,
            convolution_dithering=False,
        )

    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """Micro batches of each replica in a step of the optimizer; part of the combined batch."""
        return self.set(gradient_accumulation=at_least_one("gradient_accumulation", gradient_accumulation))

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """Mean or sum of the gradients of micro batches and replicas."""
        return self.set(accumulation_and_replication_reduction_type=reduction_type)

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> Self:
        """When a mean is divided. No effect: gradients are added in float32 and divided once."""
        return self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)

    def setAutomaticLossScaling(self, enabled: bool) -> Self:
        """Whether the loss scaling follows the gradients."""
        return self.set(auto_loss_scaling=enabled)

    def setConvolutionDithering(self, enabled: bool) -> Self:
        """Where convolutions lie on the tiles. No effect: there are no tiles."""
        return self.set(convolution_dithering=enabled)


class _PrecisionOptions(OptionValues):
    """``options.Precision``: dtypes and rounding."""

    def __init__(self) -> None:
        super().__init__(
            partials_type=None,
            stochastic_rounding=False,
            floating_point_exceptions=False,
            half_float_casting=HalfFloatCastingBehavior.FloatDowncastToHalf,
            running_statistics_always_float=True,
        )

    def setPartialsType(self, dtype: torch.dtype) -> Self:
        """The dtype of sums within a product, float or half. No effect: torch chooses it."""
        if dtype not in (torch.float, torch.half):
            raise AssertionError(f"setPartialsType takes torch.float or torch.half, and was given {dtype}")
        return self.set(partials_type=dtype)

    def enableStochasticRounding(self, enabled: bool) -> Self:
        """Whether updates of half-precision weights are rounded at random."""
        return self.set(stochastic_rounding=enabled)

    def enableFloatingPointExceptions(self, enabled: bool) -> Self:
        """Stop at NaN and overflow. No effect: torch computes on."""
        return self.set(floating_point_exceptions=enabled)

    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> Self:
        """The dtype of operations on half and float. No effect: weights follow the input, else torch's rules."""
        return self.set(half_float_casting=half_float_casting)

    def runningStatisticsAlwaysFloat(self, value: bool) -> Self:
        """Keep the statistics of BatchNorm in float. No effect: they have the dtype of the module."""
        return self.set(running_statistics_always_float=value)


class _DistributedOptions(OptionValues):
    """``options.Distributed``: which process of the job this one is; at first what the launcher says."""

    def __init__(self) -> None:
        super().__init__(distributed_process_id=0, num_distributed_processes=1)
        self.configureProcessId(*process_of_job())

    def disable(self) -> Self:
        """Be process 0 of 1, whatever the environment says."""
        return self.configureProcessId(0, 1)

    def setEnvVarNames(self, var_num_processes: str = NUM_PROCESSES, var_process_id: str = PROCESS_ID) -> Self:
        """Read the number of processes and this one's index from other variables."""
        names = (var_num_processes, var_process_id)
        if not all(isinstance(name, str) for name in names):
            raise AssertionError(f"setEnvVarNames takes two names, and was given {names}")
        return self.configureProcessId(*process_in(var_process_id, var_num_processes))

    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """Be process ``process_id`` of ``num_processes``; one process may be each of them in turn."""
        num_processes = at_least_one("num_processes", num_processes)
        process_id = whole_number("process_id", process_id, AssertionError, minimum=0, maximum=num_processes - 1)
        return self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)

    @property
    def processId(self) -> int:
        """This process, 0 to ``numProcesses - 1``."""
        return int(self.distributed_process_id)

    @property
    def numProcesses(self) -> int:
        """Processes that the data are divided among."""
        return int(self.num_distributed_processes)


class TensorLocationSettings(OptionValues):
    """Where tensors of one kind lie, for the setters of ``options.TensorLocations``."""

    def minElementsForOffChip(self, min_elements: int) -> Self:
        """Smaller tensors stay on the chip. No effect: there is none."""
        return self.createOrSet(minElementsForOffChip=min_elements)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> Self:
        """Smaller tensors are not sharded. No effect: each instance has an even part of all elements."""
        return self.createOrSet(minElementsForReplicatedTensorSharding=min_elements)

    def useOnChipStorage(self, use: bool = True) -> Self:
        """On the chip, or in the host's memory. No effect: tensors lie in torch's memory."""
        return self.createOrSet(onChip=use)

    def useReplicatedTensorSharding(self, use: bool = True) -> Self:
        """Each instance holds a part of the optimizer's state."""
        if not isinstance(use, bool):
            raise AssertionError(f"useReplicatedTensorSharding takes True or False, and was given {use!r}")
        return self.createOrSet(useReplicatedTensorSharding=use)

    def useIOTilesToLoad(self, use: bool = True) -> Self:
        """Read by the tiles that communicate. No effect: there are no tiles."""
        return self.createOrSet(useIOTilesToLoad=use)

    def useIOTilesToStore(self, use: bool = True) -> Self:
        """Written by the tiles that communicate. No effect: there are no tiles."""
        return self.createOrSet(useIOTilesToStore=use)


class _TensorLocationOptions(OptionValues):
    """``options.TensorLocations``: where tensors lie."""

    def __init__(self) -> None:
        super().__init__(
            location_activation={},
            location_weight={},
            location_optimizer={},
            location_accumulator={},
            numIOTiles=None,
        )

    def numIOTiles(self, num_tiles: int) -> Self:
        """Tiles for communication, an even number from 32 to 192. No effect: there are no tiles."""
        if not is_whole(num_tiles) or num_tiles % 2 or not _FEWEST_IO_TILES <= num_tiles <= _MOST_IO_TILES:
            raise AssertionError(
                f"numIOTiles must be an even number between {_FEWEST_IO_TILES} and {_MOST_IO_TILES}, "
                f"and is {num_tiles!r}"
            )
        return self.set(numIOTiles=num_tiles)

    def setActivationLocation(self, location: TensorLocationSettings) -> Self:
        """Where activations lie. No effect: in torch's memory."""
        return self._locate("activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> Self:
        """Where weights lie. No effect: in torch's memory."""
        return self._locate("weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> Self:
        """Where the state of the optimizer lies, and whether each replica holds a part of it."""
        return self._locate("optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> Self:
        """Where gradients are added. No effect: in torch's memory."""
        return self._locate("accumulator", location)

    def _locate(self, what: str, location: TensorLocationSettings) -> Self:
        if not isinstance(location, TensorLocationSettings):
            raise AssertionError(
                f"a location is a poptorch.TensorLocationSettings, and this is a {type(location).__name__}"
            )
        return self.set(**{f"location_{what}": location.toDict()})

    def toDict(self) -> dict[str, Any]:
        """What was set."""
        return {name: value for name, value in super().toDict().items() if value not in (None, {})}


class _JitOptions(OptionValues):
    """``options.Jit``: how the model was traced."""

    def __init__(self) -> None:
        super().__init__(trace_model=False)

    def traceModel(self, trace_model: bool) -> Self:
        """Trace with torch.jit. No effect: nothing is traced."""
        return self.set(trace_model=trace_model)


class _PopartOptions(OptionValues):
    """``options._Popart``: options of PopART by their own names, in whatever version of PopART."""

    def __init__(self) -> None:
        super().__init__(options={}, patterns_level=2, patterns={})

    def set(self, *key_and_value: Any, **values: Any) -> Self:
        """Set one option of PopART. No effect: there is no compiler."""
        if not key_and_value:
            return super().set(**values)
        key, value = key_and_value
        if not isinstance(key, str):
            raise AssertionError(f"_Popart.set takes the name of an option, and was given {key!r}")
        self.checkIsFrozen(key)
        self._values["options"][key] = plain(value)
        return self

    def setPatterns(self, patterns: Mapping[str, bool], level: int = 2) -> Self:
        """Switch patterns of PopART on and off. No effect: there is no compiler."""
        return self.set(patterns=dict(patterns), patterns_level=level)

    def setEngineOptions(self, engine_options: Mapping[str, str]) -> Self:
        """Options of Poplar's engine. No effect: there is none."""
        return self.set("engineOptions", {**self.options.get("engineOptions", {}), **engine_options})

    def toDict(self) -> dict[str, Any]:
        """PopART's options under their own names, and the patterns."""
        return {**self.options, "patterns_level": self.patterns_level, "patterns": dict(self.patterns)}
