"""The layers of a phased model: each computes with weights that are in memory for its own passes only.

A layer's forward pass keeps its inputs; its backward pass computes the layer again, with the same random numbers
and buffers, and leaves complete gradients of the layer's weights. A weight that is not in memory reads as NaN.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from popdist.errors import BatchError, MicroBatchError, WeightsError, name_first
from popdist.local_tensors import TensorForm, part_itself
from popdist.parallel.describe import runs_of_layers
from popdist.parallel.recompute import LayerState, chosen_layers, without_caches
from popdist.torch_private import skip_tracing
from popdist.training.micro_batches import map_nest

_LOOP: Final = """
    model = popdist.parallel.phased(module, memory="2 GB", store=folder)
    optimizer = popdist.parallel.PhasedOptimizer(model, torch.optim.AdamW)
    for batch in loader:
        for x, y in model.micro_batches(batch):
            loss_fn(model(x), y).backward()
        optimizer.step()"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PhasePiece:
    """Weights that the same layers use: they are read, written and updated together."""

    index: int
    names: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    units: tuple[int, ...]  # the indices of the units that use them; none for weights that stay in memory

    @property
    def named(self) -> list[tuple[str, Parameter]]:
        """The weights with their names."""
        return list(zip(self.names, self.parameters, strict=True))

    @property
    def is_trained(self) -> bool:
        """Whether one of the weights is trained now."""
        return any(it.requires_grad for it in self.parameters)


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """A module that computes with weights of its own: a layer, an embedding, a head."""

    index: int
    name: str
    module: nn.Module
    pieces: tuple[PhasePiece, ...]

    @property
    def is_trained(self) -> bool:
        """Whether one of its weights is trained now."""
        return any(it.is_trained for it in self.pieces)


@dataclass(frozen=True, kw_only=True, eq=False)
class PhasedLayers:
    """What a module is divided into."""

    units: tuple[Unit, ...]
    pieces: tuple[PhasePiece, ...]  # in the order of the units

    @property
    def resident(self) -> tuple[PhasePiece, ...]:
        """The weights that no unit has by itself, which stay in memory."""
        return tuple(piece for piece in self.pieces if not piece.units)


def find_layers(model: nn.Module, layers: Iterable[nn.Module | str] | None) -> PhasedLayers:
    """The units of ``model``: layers that it repeats, or those named, and what else has weights directly."""
    layers = [it for run in runs_of_layers(model) for it in run] if layers is None else [*layers]
    chosen = chosen_layers(model, layers, "phased")
    modules = dict(_walk(model, "", set(chosen), set()))
    if not modules:
        raise WeightsError(
            f"{type(model).__name__} has no layers with weights that could be in memory one after another: it "
            "holds all of its weights itself"
        )
    names = {module: name for name, module in model.named_modules()}
    for outer in chosen:
        if inner := [names[it] for it in outer.modules() if it is not outer and it in chosen]:
            raise WeightsError(f"layers has {names[outer]}, and {inner[0]} within it: name one of them")
    return _divided(model, modules)


def _walk(
    module: nn.Module, name: str, chosen: set[nn.Module], seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each unit, in the order in which the model holds them."""
    if module in seen:
        return
    seen.add(module)
    holds_chosen = any(part in chosen for part in module.modules())
    is_unit = module in chosen or (name and not holds_chosen and _has_own_weights(module))
    if is_unit and next(module.parameters(), None) is not None:
        yield name, module
        return
    for key, child in module.named_children():
        yield from _walk(child, f"{name}.{key}" if name else key, chosen, seen)


def _has_own_weights(module: nn.Module) -> bool:
    """Whether the module, and not one of its layers, uses parameters in its forward pass."""
    lists = (it for it in module.children() if isinstance(it, nn.ParameterList | nn.ParameterDict))
    return any(next(it.parameters(recurse=False), None) is not None for it in (module, *lists))


def _divided(model: nn.Module, modules: dict[str, nn.Module]) -> PhasedLayers:
    """The units of these modules, with the pieces of all weights."""
    users: dict[Parameter, list[int]] = {}
    for index, module in enumerate(modules.values()):
        for parameter in module.parameters():
            users.setdefault(parameter, []).append(index)
    inside = {part for unit in modules.values() for part in unit.modules()}
    outside = {it for part in model.modules() if part not in inside for it in part.parameters(recurse=False)}
    groups: dict[tuple[int, ...], list[tuple[str, Parameter]]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(() if parameter in outside else tuple(users[parameter]), []).append((name, parameter))
    pieces = list[PhasePiece]()
    for units, named in sorted(groups.items(), key=lambda item: item[0] or (len(modules),)):
        names, parameters = zip(*named, strict=True)
        pieces.append(PhasePiece(index=len(pieces), names=names, parameters=parameters, units=units))
    return PhasedLayers(
        units=tuple(
            Unit(index=index, name=name, module=module, pieces=tuple(it for it in pieces if index in it.units))
            for index, (name, module) in enumerate(modules.items())
        ),
        pieces=tuple(pieces),
    )


@lru_cache(maxsize=64)
def _absent_number(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The one number that all elements of an absent weight are."""
    is_float = dtype.is_floating_point or dtype.is_complex
    return torch.full((), math.nan if is_float else 0, dtype=dtype, device=device)


def set_data(parameter: Tensor, data: Tensor) -> None:
    """Let ``parameter``, or the part of it that is here, have its numbers in the memory of ``data``."""
    with torch.inference_mode(mode=False):
        part_itself(parameter).data = data


def make_absent(parameter: Parameter) -> None:
    """Take the memory of ``parameter`` away: it keeps its shape and dtype, and reads as NaN."""
    part = part_itself(parameter)
    set_data(parameter, _absent_number(part.dtype, part.device).expand(part.shape))


def check_same(module: nn.Module, layers: PhasedLayers, forms: Mapping[str, TensorForm]) -> None:
    """Check that ``module`` has these layers and parameters, whose parts that are here have these forms."""
    names = {id(it): name for piece in layers.pieces for name, it in piece.named}
    now = {id(it): (name, part_itself(it)) for name, it in module.named_parameters()}
    changed = [name for key, name in names.items() if key not in now]
    for key, (name, part) in now.items():
        form = forms[names[key]] if key in names else None
        if form is None or (form.dtype, form.shape) != (part.dtype, tuple(part.shape)):
            changed.append(name)
    changed += [it.name for it in layers.units if not isinstance(it.module.forward, PhasedForward)]
    if changed:
        raise WeightsError(
            f"{name_first([*dict.fromkeys(changed)])} of {type(module).__name__}: added, replaced, moved or "
            "removed after phased(), whose store has the weights that it had. Change a module before, as adapters "
            "and dtypes, and then call phased(module)"
        )


class CallCounts:
    """The forward passes of units in one micro batch that a backward pass has not followed yet."""

    def __init__(self) -> None:
        self.micro_batch: object = None  # stands for the micro batch that runs; None between two
        self._counts: dict[int, int] = {}  # by piece
        self._is_passed_back = False
        self._is_passing_back = False  # whether a unit is in its backward pass

    def begin_micro_batch(self) -> None:
        """A micro batch begins."""
        self.micro_batch, self._counts = object(), {}
        self._is_passed_back = self._is_passing_back = False

    def end_micro_batch(self) -> None:
        """A micro batch has ended; forward passes without a backward pass add nothing to its gradients."""
        self.micro_batch = None

    def begin(self, unit: Unit) -> object:
        """Count a forward pass; gives the micro batch that it belongs to."""
        if self.micro_batch is not None and self._is_passed_back:
            raise BatchError(
                "a forward pass of a phased model after a backward pass of the same micro batch: gradients may be "
                "used already. Compute all losses of a micro batch, and call backward() on their sum"
            )
        for piece in unit.pieces:
            self._counts[piece.index] = self._counts.get(piece.index, 0) + 1
        return self.micro_batch

    def check(self, unit: Unit, micro_batch: object) -> None:
        """Check that a backward pass may begin, of a forward pass in ``micro_batch``."""
        if micro_batch is None:
            raise BatchError(f"backward() of a phased model outside micro_batches. Write\n{_LOOP}")
        if self.micro_batch is not micro_batch:
            raise MicroBatchError(
                f"backward() through {unit.name}, whose forward pass belongs to another micro batch: compute the "
                "loss and call backward() within one turn of the loop"
            )
        if any(self._counts[piece.index] < 1 for piece in unit.pieces):
            raise BatchError(
                f"a second backward pass through one forward pass of {unit.name}: its gradients may be used "
                "already. Call backward() once, on the sum of the losses"
            )
        self._is_passed_back = self._is_passing_back = True

    def end(self, unit: Unit) -> list[PhasePiece]:
        """Count a backward pass; gives the pieces whose gradients are complete now."""
        self._is_passing_back = False
        for piece in unit.pieces:
            self._counts[piece.index] -= 1
        return [piece for piece in unit.pieces if not self._counts[piece.index]]

    def watch(self, name: str, parameter: Parameter) -> None:
        """Have each gradient of ``parameter`` that comes from elsewhere than its unit's backward pass refused."""

        def refuse_others(_: Tensor) -> None:
            if not self._is_passing_back:
                raise WeightsError(
                    f"{name} was used outside the forward pass of its layer, where it is not in memory and reads "
                    "as NaN: use it in that pass only, or name a larger module that holds both, layers=[...]"
                )

        is_trained = parameter.requires_grad
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_().register_post_accumulate_grad_hook(refuse_others)
            parameter.requires_grad_(is_trained)


class LayerRunner(Protocol):
    """What runs the passes of units: it brings their weights, and takes their gradients."""

    device: torch.device  # of the weights
    calls: CallCounts

    def running(self, unit: Unit, *, backward: bool) -> AbstractContextManager[None]:
        """Within it the weights of ``unit`` are in memory."""

    def end_call(self, unit: Unit) -> None:
        """Take the gradients that a backward pass of ``unit`` has left in ``.grad``."""


def install(layers: PhasedLayers, runner: LayerRunner) -> None:
    """Have all units compute by way of ``runner`` from now on."""
    for unit in layers.units:
        cast("Any", unit.module).forward = PhasedForward(unit, runner)
    for piece in layers.pieces:
        for name, parameter in piece.named if piece.units else ():
            runner.calls.watch(name, parameter)


class PhasedForward:
    """Takes the place of a unit's ``forward``."""

    def __init__(self, unit: Unit, runner: LayerRunner) -> None:
        self.unit = unit
        self.forward: Callable[..., Any] = unit.module.forward
        self.runner = runner
        self._anchor = torch.zeros((), dtype=torch.float32, requires_grad=True)

    @skip_tracing  # a compiled model runs its units as they are
    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the layer takes and gives
        """Run the unit's forward pass with its weights in memory."""
        tensors: list[Tensor] = []
        structure = _take_out((args, kwargs), tensors)
        is_passed_back = self.unit.is_trained or any(it.requires_grad for it in tensors)
        if not torch.is_grad_enabled() or not is_passed_back:
            with self.runner.running(self.unit, backward=False):
                return self.forward(*args, **kwargs)
        call = _Call(self, without_caches(*structure))
        outputs = _PhasedFunction.apply(call, self._anchor, *tensors)  # type: ignore[no-untyped-call] # torch's
        return _put_back(call.outputs, outputs)


class _Taken:
    """The place of a tensor in a nest."""

    def __init__(self, index: int) -> None:
        self.index = index


def _take_out(nest: Any, tensors: list[Tensor]) -> Any:  # noqa: ANN401 - whatever layers take and give
    """``nest`` with places where it has tensors, which are appended to ``tensors``, each once."""
    if isinstance(nest, Tensor):
        place = next((place for place, it in enumerate(tensors) if it is nest), len(tensors))
        if place == len(tensors):
            tensors.append(nest)
        return _Taken(place)
    return map_nest(nest, lambda child: _take_out(child, tensors))


def _put_back(nest: Any, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401 - as above
    """``nest`` with tensors in their places."""
    if isinstance(nest, _Taken):
        return tensors[nest.index]
    return map_nest(nest, lambda child: _put_back(child, tensors))


class _Call:
    """One call of a unit: what its second computation needs beside the inputs."""

    def __init__(self, owner: PhasedForward, inputs: Any) -> None:  # noqa: ANN401 - as above
        self.unit = owner.unit
        self.runner = owner.runner
        self.outputs: Any = None
        self._forward = owner.forward
        self._inputs = inputs
        self._state = LayerState(owner.unit.module)
        device = owner.runner.device
        self._devices = [device] if device.type == "cuda" else []
        self._micro_batch: object = None
        self._torch_state = torch.get_rng_state()
        self._cuda_states = [torch.cuda.get_rng_state(it) for it in self._devices]
        kinds = {"cpu", device.type}
        self._autocast = {
            kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)
        }

    def first(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs of the forward pass."""
        self._micro_batch = self.runner.calls.begin(self.unit)
        with self.runner.running(self.unit, backward=False), self._state.watched(), self._casting():
            result = self._compute(tensors)
        outputs: list[Tensor] = []
        self.outputs = _take_out(result, outputs)
        return tuple(outputs)

    def backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs; those of the weights are added to their ``.grad``."""
        self.runner.calls.check(self.unit, self._micro_batch)
        found: dict[int, Tensor] = {}
        with self.runner.running(self.unit, backward=True):
            with self._as_first(), torch.enable_grad(), self._casting():
                outputs: list[Tensor] = []
                inputs = [it.detach().requires_grad_(it.requires_grad) for it in tensors]
                for place, it in enumerate(inputs):
                    if it.requires_grad:  # ``.grad`` may be in another order of memory, which shows in sums
                        it.register_hook(partial(found.__setitem__, place))
                _take_out(self._compute(inputs), outputs)
            pairs = [
                (output, gradient)
                for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and output.requires_grad
            ]
            del inputs, outputs
            if pairs:
                torch.autograd.backward([it for it, _ in pairs], [it for _, it in pairs])
            pairs.clear()
            self.runner.end_call(self.unit)
        return [found.get(place) for place in range(len(tensors))]

    def _compute(self, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401 - as above
        args, kwargs = _put_back(self._inputs, tensors)
        return self._forward(*args, **kwargs)

    @contextmanager
    def _casting(self) -> Iterator[None]:
        """With the autocast of the forward pass, which keeps no copies of weights that leave memory."""
        with ExitStack() as stack:
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            yield

    @contextmanager
    def _as_first(self) -> Iterator[None]:
        """With the states of generators, and the buffers, of the forward pass."""
        with torch.random.fork_rng(self._devices), self._state.restored():
            torch.set_rng_state(self._torch_state)
            for device, state in zip(self._devices, self._cuda_states, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


class _PhasedFunction(torch.autograd.Function):
    """A unit in autograd's graph: of its own operations nothing is kept between the passes."""

    @staticmethod
    def forward(ctx: Any, call: _Call, _anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401 - torch's context
        """The outputs of the unit; ``_anchor`` has a gradient, so that the backward pass comes by."""
        outputs = call.first(tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(it for it in outputs if not (it.is_floating_point() or it.is_complex())))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - as above
        """The gradients of the inputs."""
        return None, None, *ctx.call.backward(ctx.saved_tensors, gradients)
