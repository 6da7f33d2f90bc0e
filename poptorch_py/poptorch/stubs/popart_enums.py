"""The enumerations of PopART that programs pass to ``options._Popart.set``: names and numbers, and nothing behind.

Options keep what they are given, and no compiler reads it (https://docs.graphcore.ai/projects/popart-user-guide,
"SessionOptions").
"""

from enum import IntEnum
from typing import NoReturn

_MEMBERS = {
    "AccumulateOuterFragmentSchedule": "Scheduler Serial OverlapCycleOptimized OverlapMemoryOptimized",
    "AutodiffStitchStrategy": "RecomputeMinimal RecomputeAllNonInputs AddFwdOutputs SafeAddFwdOutputs",
    "BatchSerializationBatchSchedule": "Scheduler Isomorphic OverlapOnIo OverlapOnCompute",
    "BatchSerializationMethod": "UnrollDynamic UnrollStatic Loop",
    "BatchSerializationTransformContext": "Fwd Bwd",
    "DeviceConnectionType": "Always OnDemand Never",
    "ExecutionPhaseIOSchedule": "Preload OnDemand",
    "ExecutionPhaseSchedule": "Interleaving Batch BatchClusteredIO",
    "GradientTensorTrackingMethod": (
        "AllNonViewChangingGradientTensors ConvAndMatmulGradients GradientsOfUserSpecifiedTensors"
    ),
    "Instrumentation": "Outer Inner",
    "MeanReductionStrategy": "Running Post",
    "MergeVarUpdateType": "None All AutoLoose AutoTight",
    "PatternsLevel": "NoPatterns Minimal Default All",
    "RecomputationType": "None Standard NormOnly Pipeline RecomputeAll",
    "ReplicatedTensorSharding": "Off On",
    "SubgraphCopyingStrategy": "OnEnterAndExit JustInTime",
    "SyntheticDataMode": "Off Zeros RandomNormal RandomUniform",
    "TensorStorage": "OnChip OffChip",
    "TileSet": "Compute IO",
    "VirtualGraphMode": "Off Manual Auto ExecutionPhases",
}
"""The members of each enumeration, numbered from 0."""

globals().update({name: IntEnum(name, members, start=0, module=__name__) for name, members in _MEMBERS.items()})

__all__ = list(_MEMBERS)


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"popart has no {name!r} here: PopART is not installed, and poptorch stands for the enumerations that "
        "programs hand to options._Popart.set"
    )
