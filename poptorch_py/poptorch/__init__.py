"""poptorch: programs written for PopTorch, on CPUs and GPUs, with the replicas of popdist. No part loads late."""

import popdist
from popdist.startup import stub_finder
from poptorch import _impl as _impl
from poptorch import enums as enums
from poptorch import ops as ops
from poptorch import optim as optim
from poptorch import options as options
from poptorch import poptorch_core as poptorch_core
from poptorch import profiling as profiling
from poptorch import testing as testing
from poptorch._logging import logger as logger
from poptorch._logging import setLogLevel as setLogLevel
from poptorch.blocks.annotations import BeginBlock as BeginBlock
from poptorch.blocks.annotations import Block as Block
from poptorch.blocks.annotations import BlockFunction as BlockFunction
from poptorch.blocks.annotations import module_repr as module_repr
from poptorch.blocks.annotations import removeBlocks as removeBlocks
from poptorch.custom_types import ICustomArgParser as ICustomArgParser
from poptorch.custom_types import registerCustomArgParser as registerCustomArgParser
from poptorch.data.combined_batches import DataLoader as DataLoader
from poptorch.data.read_ahead import AsynchronousDataAccessor as AsynchronousDataAccessor
from poptorch.enums import AutoStage as AutoStage
from poptorch.enums import CommGroupType as CommGroupType
from poptorch.enums import ConnectionType as ConnectionType
from poptorch.enums import DataLoaderMode as DataLoaderMode
from poptorch.enums import HalfFloatCastingBehavior as HalfFloatCastingBehavior
from poptorch.enums import Liveness as Liveness
from poptorch.enums import MatMulSerializationMode as MatMulSerializationMode
from poptorch.enums import MeanReductionStrategy as MeanReductionStrategy
from poptorch.enums import MultiConvPartialsType as MultiConvPartialsType
from poptorch.enums import MultiConvPlanType as MultiConvPlanType
from poptorch.enums import OutputMode as OutputMode
from poptorch.enums import OverlapMode as OverlapMode
from poptorch.enums import ReductionType as ReductionType
from poptorch.enums import SharingStrategy as SharingStrategy
from poptorch.enums import SyncPattern as SyncPattern
from poptorch.enums import VariableRetrievalMode as VariableRetrievalMode
from poptorch.errors import Error as Error
from poptorch.errors import RecoverableError as RecoverableError
from poptorch.errors import UnrecoverableError as UnrecoverableError
from poptorch.executor.poplar_executor import PoplarExecutor as PoplarExecutor
from poptorch.executor.poplar_executor import inferenceModel as inferenceModel
from poptorch.executor.poplar_executor import load as load
from poptorch.executor.poplar_executor import registerPostCompileHook as registerPostCompileHook
from poptorch.executor.poplar_executor import registerPreCompileHook as registerPreCompileHook
from poptorch.executor.poplar_executor import trainingModel as trainingModel
from poptorch.executor.traced_forward import isRunningOnIpu as isRunningOnIpu
from poptorch.losses import identity_loss as identity_loss
from poptorch.ops import CPU as CPU
from poptorch.ops import Attribute as Attribute
from poptorch.ops import CTCBeamSearchDecoder as CTCBeamSearchDecoder
from poptorch.ops import MultiConv as MultiConv
from poptorch.ops import NameScope as NameScope
from poptorch.ops import cond as cond
from poptorch.ops import ctc_beam_search_decoder as ctc_beam_search_decoder
from poptorch.ops import custom_op as custom_op
from poptorch.ops import dynamic_slice as dynamic_slice
from poptorch.ops import dynamic_update as dynamic_update
from poptorch.ops import for_loop as for_loop
from poptorch.ops import fps as fps
from poptorch.ops import ipu_print_tensor as ipu_print_tensor
from poptorch.ops import nearest as nearest
from poptorch.ops import nop as nop
from poptorch.ops import recomputationCheckpoint as recomputationCheckpoint
from poptorch.ops import registerCustomOp as registerCustomOp
from poptorch.ops import serializedMatMul as serializedMatMul
from poptorch.ops import set_available_memory as set_available_memory
from poptorch.ops import set_overlap_for_input as set_overlap_for_input
from poptorch.ops import set_overlap_for_output as set_overlap_for_output
from poptorch.options import ConfigFileError as ConfigFileError
from poptorch.options import Options as Options
from poptorch.options import TensorLocationSettings as TensorLocationSettings
from poptorch.options.execution_strategies import ParallelPhasedExecution as ParallelPhasedExecution
from poptorch.options.execution_strategies import Phase as Phase
from poptorch.options.execution_strategies import PipelinedExecution as PipelinedExecution
from poptorch.options.execution_strategies import SerialPhasedExecution as SerialPhasedExecution
from poptorch.options.execution_strategies import ShardedExecution as ShardedExecution
from poptorch.options.execution_strategies import Stage as Stage

__version__: str = popdist.__version__

stub_finder.begin()


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """False: models run on CPUs and GPUs."""
    del num_ipus
    return False


def ipuHardwareVersion() -> int:
    """Raise an AssertionError: there is no IPU that has a version."""
    raise AssertionError("No IPU hardware is available: models run on CPUs and GPUs")
