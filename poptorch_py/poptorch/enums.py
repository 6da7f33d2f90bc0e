"""The choices that PopTorch's programs make by name. What each member does, the setter that takes it says."""

from enum import Enum, IntEnum, StrEnum


class DataLoaderMode(Enum):
    """Where a loader reads: in the program's own time, or beside it in a process that reads ahead."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(Enum):
    """How the process that reads ahead is started."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class OutputMode(Enum):
    """Which micro batches' outputs a call returns: the last, each N-th, all, or their sum."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class ReductionType(Enum):
    """How gradients of micro batches and of replicas become one."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(Enum):
    """When the sum of gradients is divided to make a mean."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class ConnectionType(Enum):
    """When a device is attached; ``Never`` only compiles."""

    Always = 0
    OnDemand = 1
    Never = 2


class SyncPattern(Enum):
    """Which devices wait for each other."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class HalfFloatCastingBehavior(Enum):
    """The dtype of an operation on half and float values."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class AutoStage(Enum):
    """Which stage a block without one gets."""

    SameAsIpu = 0
    AutoIncrement = 1


class OverlapMode(Enum):
    """Whether input and output go on while the model computes."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


class CommGroupType(IntEnum):
    """Which replicas form a group."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(IntEnum):
    """Which replicas' values of a parameter are read back."""

    OnePerGroup = 0
    AllReplicas = 2


class MatMulSerializationMode(StrEnum):
    """Along which dimension a large matrix product is cut."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class Liveness(Enum):
    """How long tensors of a phase stay."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class MultiConvPlanType(Enum):
    """Whether convolutions that could run at once are planned so, or in turn."""

    Parallel = 0
    Serial = 1


class MultiConvPartialsType(Enum):
    """The dtype of sums within a convolution."""

    Float = 0
    Half = 1
