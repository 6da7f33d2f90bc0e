"""Models that run: what a call takes, and what it gives."""

from poptorch.executor.arguments import CallArguments as CallArguments
from poptorch.executor.outputs import Outputs as Outputs
