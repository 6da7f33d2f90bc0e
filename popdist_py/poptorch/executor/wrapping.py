"""`trainingModel` and `inferenceModel`: what wraps a module."""

import os
from collections.abc import Callable
from typing import Final

import torch
from torch import nn

from poptorch.blocks import is_pipeline
from poptorch.errors import Error
from poptorch.executor.poplar_executor import PoplarExecutor, is_wrapped
from poptorch.executor.saved_models import read, unpickled
from poptorch.options import Options, check_options

_DEFAULT_RATE: Final = 0.01


def trainingModel(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap ``model`` so that a call trains it with a combined batch, over all replicas of the job.

    Args:
        model: Its ``forward`` gives results, and among them one loss. It runs in the modes, training or
            evaluation, that its parts have now.
        options: None for those of ``Options()``.
        optimizer: torch's or poptorch's, over its parameters; None for SGD with a learning rate of 0.01.

    Raises:
        RuntimeError: If another training model wraps it.
    """
    module = _module_of(model)
    if is_wrapped(module):
        raise RuntimeError(
            "the module has already been wrapped by poptorch.trainingModel: call destroy() on it to wrap it again"
        )
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=_DEFAULT_RATE)
    options = check_options("poptorch.trainingModel", Options() if options is None else options)
    return PoplarExecutor(module, options, optimizer)


def inferenceModel(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap ``model`` so that a call computes the results of a combined batch, on this process's replicas alone.

    Args:
        model: Runs in the modes, training or evaluation, that its parts have now.
        options: None for those of ``Options()``.
        optimizer: None.

    Raises:
        AssertionError: If there is an optimizer.
        Error: If the options accumulate gradients.
    """
    if optimizer is not None:
        raise AssertionError("an optimizer is for poptorch.trainingModel, and inferenceModel has none")
    options = check_options("poptorch.inferenceModel", Options() if options is None else options)
    if options.Training.gradient_accumulation != 1:
        is_pipelined = is_pipeline(options._execution_strategy)  # noqa: SLF001 - programs reach for it so, too
        instead = "; a pipeline is filled by options.deviceIterations(n)" if is_pipelined else ""
        raise Error(
            f"options.Training.gradientAccumulation({options.Training.gradient_accumulation}) is for training: "
            f"set gradientAccumulation to 1 for inferenceModel, or leave it{instead}"
        )
    return PoplarExecutor(_module_of(model), options, None)


def load(
    filename: str | os.PathLike[str], edit_opts_fn: Callable[[Options], object] | None = None
) -> PoplarExecutor:
    """The model that ``compileAndExport`` or ``save`` wrote, compiled.

    Its module is unpickled, which runs what the file says: load files that you trust.

    Args:
        filename: The file, or the folder that it was written into.
        edit_opts_fn: Called with the options, which it may change.

    Raises:
        Error: If there is no such file, or it holds no module.
    """
    saved = read(filename)
    module, options, optimizer = unpickled(saved, filename)
    options = options.clone()
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    model = PoplarExecutor(module, options, optimizer)
    model.restore(saved)
    return model


def _module_of(model: nn.Module | PoplarExecutor) -> nn.Module:
    module = model.model if isinstance(model, PoplarExecutor) else model
    if not isinstance(module, nn.Module):
        raise Error(f"a torch.nn.Module can be wrapped, and this is a {type(module).__name__}")
    return module
