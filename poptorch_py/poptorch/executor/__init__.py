"""Models that run: what a call takes, what it does, and what it gives."""

from poptorch.executor.poplar_executor import PoplarExecutor as PoplarExecutor
from poptorch.executor.poplar_executor import inferenceModel as inferenceModel
from poptorch.executor.poplar_executor import load as load
from poptorch.executor.poplar_executor import registerPostCompileHook as registerPostCompileHook
from poptorch.executor.poplar_executor import registerPreCompileHook as registerPreCompileHook
from poptorch.executor.poplar_executor import trainingModel as trainingModel
from poptorch.executor.traced_forward import isRunningOnIpu as isRunningOnIpu
