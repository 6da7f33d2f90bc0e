"""Models that run: what a call takes, what it does, and what it gives."""

from poptorch.executor.poplar_executor import PoplarExecutor as PoplarExecutor
from poptorch.executor.traced_forward import isRunningOnIpu as isRunningOnIpu
from poptorch.executor.wrapping import inferenceModel as inferenceModel
from poptorch.executor.wrapping import load as load
from poptorch.executor.wrapping import trainingModel as trainingModel
