"""Parts of a model that a program gives names and virtual IPUs: they count the stages of a pipeline."""

from poptorch.blocks.annotations import BeginBlock as BeginBlock
from poptorch.blocks.annotations import Block as Block
from poptorch.blocks.annotations import BlockFunction as BlockFunction
from poptorch.blocks.annotations import module_repr as module_repr
from poptorch.blocks.annotations import removeBlocks as removeBlocks
from poptorch.blocks.pipeline_stages import check_stages as check_stages
from poptorch.blocks.pipeline_stages import is_pipeline as is_pipeline
from poptorch.blocks.pipeline_stages import recorded_forward as recorded_forward
from poptorch.blocks.pipeline_stages import recording as recording
