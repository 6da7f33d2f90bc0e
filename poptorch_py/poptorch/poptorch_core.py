"""What was compiled of PopTorch, as far as programs reach for it: checked options, and errors to test with."""

from enum import Enum
from typing import Any, Final

import torch

from poptorch._logging import logger
from poptorch.errors import Error as Error
from poptorch.errors import RecoverableError as RecoverableError
from poptorch.errors import UnrecoverableError as UnrecoverableError
from poptorch.options import Options

_POPART_OPTIONS: Final = frozenset(
    """
    aliasZeroCopy autoRecomputation bufferingDepthMap cachePath compileEngine constantWeights
    constantFoldingOfMultipleConsumers convolutionOptions createImplicitPipeliningFwdOnlyProgram customCodelets
    customCodeletCompileFlags decomposeGradSum defaultBufferingDepth defaultPrefetchBufferingDepth
    delayVarUpdates disableGradAccumulationTensorStreams disableOptimizerStateTensorStreams dotChecks dotOpNames
    enableDistributedReplicatedGraphs enableEfficientOverlapIOTopoCons enableEngineCaching enableExplicitIR
    enableExplicitMainLoops enableFloatingPointChecks enableFullyConnectedPass enableGradientAccumulation
    enableInplaceAmbiguityChecking enableLoadAndOffloadRNGState enableMergeExchange enableNonStableSoftmax
    enableOutlining enableOutliningCopyCostPruning enablePipelining enablePrefetchDatastreams
    enableReplicatedGraphs enableRngStateManagement enableSerializedMatmuls enableStableNorm
    enableStochasticRounding enableSupportedDataTypeCasting enableVariablesCaching engineOptions
    ensureFp32LossScaleTensor executionPhaseSettings explicitRecomputation exportPoplarComputationGraph
    exportPoplarVertexGraph finalDotOp firstDotOp gclOptions globalReplicaOffset globalReplicationFactor
    groupHostSync groupNormStridedChannelGrouping hardwareInstrumentations implicitPipelining
    instrumentWithHardwareCycleCounter kahnTieBreaker logDir looseThresholdAtPeak lstmOptions matmulOptions
    mergeVarUpdate mergeVarUpdateMemThreshold meanAccumulationAndReplicationReductionStrategy numIOTiles
    opxAliasChecking opxModifyChecking outlineSequenceBreakCost outlineThreshold partialsTypeMatMuls
    prefetchBufferingDepthMap replicatedGraphCount reportOptions rearrangeAnchorsOnHost rearrangeStreamsOnHost
    saveInitializersToFile scheduleNonWeightUpdateGradientConsumersEarly separateCallOpPdfs
    serializedPoprithmsShiftGraphsDir shouldDelayVarUpdates stashedInferenceOptions strictOpVersions
    subgraphCopyingStrategy swapLimitScheduler syntheticDataMode tensorLocationSettingsOverride
    throwIfLog2ScaleTensorNotInRange
    timeLimitScheduler transitiveClosureOptimizationThreshold updatableNamedBuffers useHostCopyOps
    useLoopCandidateCreator virtualGraphMode
    """.split()  # noqa: SIM905 - a hundred names read best as text
)

_SETTINGS: Final = (
    "accumulateOuterFragmentSettings.",
    "automaticLossScalingSettings.",
    "autodiffSettings.",
    "batchSerializationSettings.",
)

_LATE: Final = frozenset({"model_name", "use_model", "ipu_id", "ipu_version", "random_seed", "execution_mode"})
"""Those of Options that exist only once they are set."""


def _validateOptions(options: dict[str, Any]) -> None:
    """Log each option, and raise an Error for the first that nobody knows, by its name or its type."""
    if faults := log_options(options):
        raise Error(faults[0])


def log_options(options: dict[str, Any]) -> list[str]:
    """Log each option, and say in words what is wrong with those that nobody knows."""
    known = {*_LATE, *_POPART_OPTIONS, *Options().toDict(), "numIOTiles"}
    known |= {f"location_{what}" for what in ("activation", "weight", "optimizer", "accumulator")}
    faults = []
    for name, value in options.items():
        if value is not None and not isinstance(value, bool | int | float | str | list | dict | torch.dtype):
            faults.append(f"Unknown value type {type(value).__name__} for option {name}")
        elif name not in known and not name.startswith(_SETTINGS):
            faults.append(f"Unknown {type(value).__name__} option {name}")
        for line in _lines(name, value):
            logger.debug("poptorch.Options %s", line)
    return faults


def _lines(name: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [f"added {_text(part)} to {name}" for part in value]
    if isinstance(value, dict):
        return [f"set {name}[{key}] to {_text(part)}" for key, part in value.items()]
    return [] if value is None else [f"set {name} to value {_text(value)}"]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def isCompilingWithDispatcher() -> bool:
    """False: nothing is compiled."""
    return False


class TestErrorType(Enum):
    """Failures of a device that `_throwTestError` raises; none of them happens here."""

    PoplarUnrecoverable = 0
    PoplarRecoverableFullReset = 1
    PoplarLinkError = 2


def _throwTestError(kind: TestErrorType) -> None:
    """Raise what a failing device would raise, for tests of a program's own handling."""
    location = "in throwTestError::bottomLevel\nin throwTestError::topLevel"
    if kind is TestErrorType.PoplarRecoverableFullReset:
        raise RecoverableError(
            "a test asked for an error that a full reset mends",
            location,
            "poplar_recoverable_runtime_error",
            recovery_action="FULL_RESET",
        )
    if kind is TestErrorType.PoplarUnrecoverable:
        raise UnrecoverableError(
            "a test asked for an error of broken hardware", location, "poplar_unrecoverable_runtime_error"
        )
    raise Error("a test asked for an error of the linker", location, "poplar_link_error")
