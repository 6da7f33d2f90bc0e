"""Parts of a model that a program gives names and virtual IPUs: annotated, dealt to stages, placed, reported."""

from poptorch.blocks.annotations import BeginBlock as BeginBlock
from poptorch.blocks.annotations import Block as Block
from poptorch.blocks.annotations import BlockFunction as BlockFunction
from poptorch.blocks.annotations import module_repr as module_repr
from poptorch.blocks.annotations import removeBlocks as removeBlocks
from poptorch.blocks.first_forward import FirstForward as FirstForward
from poptorch.blocks.first_forward import record_forward as record_forward
from poptorch.blocks.placing import MovedArguments as MovedArguments
from poptorch.blocks.placing import check_stages as check_stages
from poptorch.blocks.placing import devices_of_tensors as devices_of_tensors
from poptorch.blocks.placing import is_pipeline as is_pipeline
from poptorch.blocks.report import ModelReport as ModelReport
from poptorch.blocks.report import memory_of as memory_of
from poptorch.blocks.report import report_of as report_of
