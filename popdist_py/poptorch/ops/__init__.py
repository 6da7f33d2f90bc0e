"""The operations that PopTorch adds to torch's."""

from poptorch.blocks import BeginBlock as BeginBlock
from poptorch.blocks import Block as Block
from poptorch.blocks import BlockFunction as BlockFunction
from poptorch.blocks import removeBlocks as removeBlocks
from poptorch.losses import identity_loss as identity_loss
from poptorch.ops.beam_search import CTCBeamSearchDecoder as CTCBeamSearchDecoder
from poptorch.ops.beam_search import ctc_beam_search_decoder as ctc_beam_search_decoder
from poptorch.ops.hints import Attribute as Attribute
from poptorch.ops.hints import MultiConv as MultiConv
from poptorch.ops.hints import NameScope as NameScope
from poptorch.ops.hints import ipu_print_tensor as ipu_print_tensor
from poptorch.ops.hints import serializedMatMul as serializedMatMul
from poptorch.ops.hints import set_available_memory as set_available_memory
from poptorch.ops.hints import set_overlap_for_input as set_overlap_for_input
from poptorch.ops.hints import set_overlap_for_output as set_overlap_for_output
from poptorch.ops.program_functions import CPU as CPU
from poptorch.ops.program_functions import cond as cond
from poptorch.ops.program_functions import custom_op as custom_op
from poptorch.ops.program_functions import for_loop as for_loop
from poptorch.ops.program_functions import nop as nop
from poptorch.ops.program_functions import recomputationCheckpoint as recomputationCheckpoint
from poptorch.ops.program_functions import registerCustomOp as registerCustomOp
from poptorch.ops.selection import dynamic_slice as dynamic_slice
from poptorch.ops.selection import dynamic_update as dynamic_update
from poptorch.ops.selection import fps as fps
from poptorch.ops.selection import nearest as nearest
