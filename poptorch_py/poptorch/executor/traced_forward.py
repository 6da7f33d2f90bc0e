"""The forward of a model, as its first call finds it: where the loss is, and what has to be cast."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from poptorch.blocks.pipeline_stages import recording
from poptorch.custom_types import flattened, tensors_of, unflatten
from poptorch.errors import Error
from poptorch.executor.arguments import MicroBatch
from poptorch.executor.module_tensors import counts
from poptorch.executor.outputs import Result
from poptorch.losses import LossPlace, LossSearch, OperationWatch

_WITH_WEIGHTS: Final = {  # operations whose weights get the dtype of their input
    functional.linear,
    *(functional.conv1d, functional.conv2d, functional.conv3d),
    *(functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d),
}
_WITH_STATISTICS: Final = {functional.batch_norm, functional.instance_norm, torch.batch_norm, torch.instance_norm}
_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")


def isRunningOnIpu() -> bool:
    """Whether this is called by the forward of a model that poptorch runs."""
    return counts.running > 0


class WeightCasts(OperationWatch):
    """Within it weights and biases of products and convolutions are cast to the dtype of what they multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.has_cast = False  # whether there was a need
        self.normalized: list[Tensor] = []  # those of normalizing operations, which update running statistics

    def run(self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation, with weights that have the dtype of its input."""
        if operation in _WITH_WEIGHTS and len(args) > 1 and args[0].dtype is not args[1].dtype:
            kind = args[0].dtype
            if kind.is_floating_point and args[1].dtype.is_floating_point:
                self.has_cast = True
                args = (args[0], *(part.to(kind) if isinstance(part, Tensor) else part for part in args[1:]))
        elif operation in _WITH_STATISTICS:
            self.normalized += tensors_of(args)
        return super().run(operation, args, kwargs)


class TracedForward:
    """The forward of one model. It runs once when this is made, which changes neither arguments nor generators."""

    def __init__(self, module: nn.Module, first: MicroBatch, *, is_training: bool) -> None:
        self._module = module
        self._casts_weights = False  # within each forward
        # for each micro batch of the last call, when it began and when it ended, in seconds
        self.moments: list[tuple[float, float]] = []
        self._place: LossPlace | None = None  # of the loss in the result; else each forward is watched for it
        structure, arguments = flattened(first)
        args, kwargs = unflatten(structure, map(Tensor.clone, arguments))
        casts, search = WeightCasts(), LossSearch()
        with _explained(), _generators_as_before(), torch.set_grad_enabled(is_training), ExitStack() as modes:
            modes.enter_context(casts)
            if is_training:
                modes.enter_context(search)
            if "torch._dynamo" in sys.modules:  # nothing can be seen of what torch.compile has compiled
                modes.enter_context(torch.compiler.set_stance("force_eager"))
            seen = modes.enter_context(recording())
            _, tensors = self._called(args, kwargs)
        self.blocks = seen.blocks  # that it enters
        if is_training:
            self._place = LossPlace.of(tensors, search.final())
        self._casts_weights = casts.has_cast
        self.statistics = _statistics(module, casts.normalized)  # names of buffers that such operations update
        self.num_outputs = len(tensors)

    def infer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        """The result for a micro batch."""
        begin = perf_counter()
        result = self._called(args, kwargs)
        self.moments.append((begin, perf_counter()))
        return result

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_scaling: float) -> Result:
        """The result for a micro batch; afterwards the parameters have gradients, times ``loss_scaling``."""
        begin = perf_counter()
        if self._place is not None:
            result = self._called(args, kwargs)
            loss = self._place.loss(result[1])
        else:
            with LossSearch() as search:
                result = self._called(args, kwargs)
            loss = search.final()
        if loss.requires_grad:
            is_plain = loss_scaling == 1 and not loss.dim()
            loss.backward(None if is_plain else torch.full_like(loss, loss_scaling))
        self.moments.append((begin, perf_counter()))
        return result

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        with WeightCasts() if self._casts_weights else nullcontext():
            return flattened(self._module(*args, **kwargs))


def _statistics(module: nn.Module, seen: Sequence[Tensor]) -> frozenset[str]:
    """The buffers among the tensors ``seen``, and what batch norm layers count; of torch.jit's by their names."""
    known = {*map(id, seen)}
    found = set[str]()
    for path, part in module.named_modules():
        own = dict(part.named_buffers(path, recurse=False))
        names = {f"{path}.{key}" if path else key for key in _STATISTICS}
        if isinstance(part, torch.jit.ScriptModule) or any(id(own[name]) in known for name in names & own.keys()):
            found |= names & own.keys()
        found |= {name for name, buffer in own.items() if id(buffer) in known}
    return frozenset(found)


@contextmanager
def _explained() -> Iterator[None]:
    """Explain errors of operations that torch.jit compiled: no mode sees where these needed a cast of weights."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "TorchScript" not in text or not ("Half" in text or "BFloat16" in text):
            raise
        raise Error(
            f"what torch.jit compiled has weights of another dtype than its input ({text.splitlines()[-1]}), and "
            "poptorch casts weights in plain modules only: call half() or bfloat16() of that part before it is "
            "trained, or do not compile it"
        ) from error


@contextmanager
def _generators_as_before() -> Iterator[None]:
    """Put back the generators of Python, numpy and torch when the block ends."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kind = {} if found is None else {"device_type": found.type}
        with torch.random.fork_rng(range(torch.accelerator.device_count()), **kind):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
