"""The layers of a phased model, and the count of the layers' calls in a micro batch.

Each layer computes with weights that are in memory for its own passes only. A weight that is not in memory reads
as NaN.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import nan
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from popdist.errors import BatchError, MicroBatchError, WeightsError, name_first
from popdist.ground.local_tensors import TensorForm, part_itself
from popdist.ground.torch_private import is_compiled_in_place, num_gradient_hooks, num_writes
from popdist.phases.recompute import chosen_layers
from popdist.phases.repeated_layers import runs_of_layers

_LOOP: Final = """
    model = popdist.parallel.phased(module, memory="2 GB", store=folder)
    optimizer = popdist.parallel.PhasedOptimizer(model, torch.optim.AdamW)
    for batch in loader:
        for x, y in model.micro_batches(batch):
            loss_fn(model(x), y).backward()
        optimizer.step()"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PhasePiece:
    """A piece: weights that the same layers use, so that these weights are read, written and updated together."""

    index: int
    weights: Mapping[str, Parameter]  # by name
    units: tuple[int, ...]  # the indices of the layers that use the weights; empty if these stay in memory

    @property
    def is_trained(self) -> bool:
        """Whether at least one of the weights in this piece requires a gradient now."""
        return any(it.requires_grad for it in self.weights.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """A unit: a module that is in memory as a whole while it computes, such as a layer, an embedding or a head."""

    index: int
    name: str
    module: nn.Module
    pieces: tuple[PhasePiece, ...]

    @property
    def is_trained(self) -> bool:
        """Whether at least one weight of the layer requires a gradient now."""
        return any(it.is_trained for it in self.pieces)


@dataclass(frozen=True, kw_only=True, eq=False)
class PhasedLayers:
    """The layers of a phased model, and the model's weights, grouped by the layers that use them (pieces)."""

    units: tuple[Unit, ...]
    pieces: tuple[PhasePiece, ...]  # in the order of the units

    @cached_property
    def weights(self) -> dict[str, Parameter]:
        """All weights of the model by name; weights that the same layers use stand beside each other."""
        return {name: it for piece in self.pieces for name, it in piece.weights.items()}

    @property
    def resident(self) -> tuple[PhasePiece, ...]:
        """The weights that are used outside of the layers; these weights always stay in memory."""
        return tuple(piece for piece in self.pieces if not piece.units)


def find_layers(model: nn.Module, layers: Iterable[nn.Module | str] | None) -> PhasedLayers:
    """Return the layers that popdist reads into memory one after another: the modules ``layers`` (if None, the
    modules that ``model`` repeats), and every other module that itself holds weights.
    """
    layers = [it for run in runs_of_layers(model) for it in run] if layers is None else [*layers]
    chosen = chosen_layers(model, layers)
    modules = dict(_walk(model, "", set(chosen), set()))
    if not modules:
        raise WeightsError(
            f"{type(model).__name__} has no layers with weights that could be in memory one after another: it "
            "holds all of its weights itself"
        )
    if compiled := [name for name, module in modules.items() if is_compiled_in_place(module)]:
        raise WeightsError(
            f"{compiled[0]} was compiled by its method compile(), which phased() cannot keep: put "
            "torch.compile(layer) in the place of the layer"
        )
    names = {module: name for name, module in model.named_modules()}
    for outer in chosen:
        if inner := [names[it] for it in outer.modules() if it is not outer and it in chosen]:
            raise WeightsError(f"layers has {names[outer]}, and {inner[0]} within it: name one of them")
    return _divided(model, modules)


def _walk(
    module: nn.Module, name: str, chosen: set[nn.Module], seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module of each layer in ``module``, in the order of the model's modules."""
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
    """Whether ``module`` itself, and not only one of its children, holds parameters for its forward pass."""
    lists = (it for it in module.children() if isinstance(it, nn.ParameterList | nn.ParameterDict))
    return any(next(it.parameters(recurse=False), None) is not None for it in (module, *lists))


def _divided(model: nn.Module, modules: dict[str, nn.Module]) -> PhasedLayers:
    """Return ``modules`` as layers, and the weights of ``model`` in pieces: weights that the same layers use."""
    users: dict[Parameter, list[int]] = {}
    for index, module in enumerate(modules.values()):
        for parameter in module.parameters():
            users.setdefault(parameter, []).append(index)
    inside = {part for unit in modules.values() for part in unit.modules()}
    outside = {it for part in model.modules() if part not in inside for it in part.parameters(recurse=False)}
    groups: dict[tuple[int, ...], dict[str, Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(() if parameter in outside else tuple(users[parameter]), {})[name] = parameter
    in_order = sorted(groups.items(), key=lambda item: item[0] or (len(modules),))
    pieces = [
        PhasePiece(index=index, weights=weights, units=units) for index, (units, weights) in enumerate(in_order)
    ]
    return PhasedLayers(
        units=tuple(
            Unit(index=index, name=name, module=module, pieces=tuple(it for it in pieces if index in it.units))
            for index, (name, module) in enumerate(modules.items())
        ),
        pieces=tuple(pieces),
    )


def check_same(layers: PhasedLayers, module: nn.Module, forms: Mapping[str, TensorForm]) -> None:
    """Raise WeightsError unless ``module`` still has the same layers, and weights of the same dtype and shape."""
    names = {id(it): name for name, it in layers.weights.items()}
    now = {id(it): (name, part_itself(it)) for name, it in module.named_parameters()}
    changed = [name for key, name in names.items() if key not in now]
    for key, (name, part) in now.items():
        form = forms[names[key]] if key in names else None
        if form is None or (form.dtype, form.shape) != (part.dtype, tuple(part.shape)):
            changed.append(name)
    changed += [it.name for it in layers.units if getattr(it.module.forward, "unit", None) is not it]
    if changed:
        raise WeightsError(
            f"{name_first([*dict.fromkeys(changed)])} of {type(module).__name__}: added, replaced, moved or "
            "removed after phased(), whose store has the weights that it had. Change a module before, as adapters "
            "and dtypes, and then call phased(module)"
        )


def set_data(parameter: Tensor, data: Tensor) -> None:
    """Set the data of ``parameter``, or of this instance's part of a DTensor, to the tensor ``data``."""
    with torch.inference_mode(mode=False):
        part_itself(parameter).data = data


def make_absent(parameter: Parameter, device: torch.device) -> None:
    """Release the memory of ``parameter``, which keeps its shape and dtype on ``device``, and reads as NaN."""
    part: Any = part_itself(parameter)
    if not hasattr(part, "_popdist_absent"):  # each weight has its own number, so that a write changes no other
        is_float = part.is_floating_point() or part.is_complex()
        part._popdist_absent = torch.full((), nan if is_float else 0, dtype=part.dtype, device=device)  # noqa: SLF001 - popdist sets the attribute
    set_data(parameter, part._popdist_absent.expand(part.shape))  # noqa: SLF001 - popdist sets the attribute


@contextmanager
def writing(parameter: Tensor) -> Iterator[None]:
    """A context in which the optimizer writes ``parameter``: this write does not count for :func:`is_written`."""
    part: Any = part_itself(parameter)
    try:
        yield
    finally:
        part._popdist_writes = num_writes(part)  # noqa: SLF001 - popdist sets the attribute


def is_written(parameter: Parameter) -> bool:
    """Whether code other than the optimizer has written ``parameter`` in place since the last call."""
    part: Any = part_itself(parameter)
    before, absent = getattr(part, "_popdist_writes", None), getattr(part, "_popdist_absent", None)
    part._popdist_writes = num_writes(part)  # noqa: SLF001 - popdist sets the attribute
    is_lost = absent is not None and absent.is_cpu and absent.is_floating_point() and not absent.isnan()
    is_changed = is_lost or before not in (None, num_writes(part))
    if is_changed and absent is not None:
        absent.fill_(nan if absent.is_floating_point() or absent.is_complex() else 0)
    return is_changed


class CallCounts:
    """A counter, for each group of weights, of a micro batch's forward passes without a backward pass yet."""

    def __init__(self) -> None:
        self.micro_batch: object = None  # identifies the micro batch that runs; None between micro batches
        self._counts: Counter[int] = Counter()  # the number of calls by the index of a piece
        self._is_passed_back = False
        self._unit: int | None = None  # the layer in its backward pass
        self._num_casts: Counter[tuple[int, object]] = Counter()  # calls by a piece and autocast's cache
        # sums of gradients in autocast's dtype
        self._casts: dict[tuple[int, object], dict[Parameter, Tensor]] = {}

    def begin_micro_batch(self) -> None:
        """Begin a micro batch: forget the last one's calls of layers, and its gradients in autocast's dtype."""
        self.micro_batch, self._is_passed_back, self._unit = object(), False, None
        for it in (self._counts, self._num_casts, self._casts):
            it.clear()

    def end_micro_batch(self) -> None:
        """End a micro batch, and add the unfinished sums of gradients in autocast's dtype to ``.grad``."""
        self.micro_batch = None
        for key in [*self._casts]:
            self._add_held(key)

    def begin(self, unit: Unit, cache: object) -> object:
        """Count a forward pass of the layer ``unit``; return an object that identifies its micro batch."""
        if self.micro_batch is not None and self._is_passed_back:
            raise BatchError(
                "a forward pass of a phased model after a backward pass of the same micro batch: gradients may be "
                "used already. Compute all losses of a micro batch, and call backward() on their sum"
            )
        for piece in unit.pieces:
            self._counts[piece.index] += 1
            if self._counts[piece.index] == 2:
                _refuse_hooks(piece)
            if cache is not None:
                self._num_casts[piece.index, cache] += 1
        return self.micro_batch

    def check(self, unit: Unit, micro_batch: object) -> None:
        """Raise an error unless the layer ``unit``, called in ``micro_batch``, may run its backward pass now."""
        if micro_batch is None:
            raise BatchError(f"backward() of a phased model outside micro_batches. Write\n{_LOOP}")
        if self.micro_batch is not micro_batch:
            raise MicroBatchError(
                f"backward() through {unit.name}, whose forward pass belongs to another micro batch: compute the "
                "loss and call backward() within one turn of the loop"
            )
        if self._unit is not None:
            raise WeightsError(
                f"another layer reads a tensor that {unit.name} has computed, and was not given it as an "
                "argument: a layer of a phased model gets such tensors by its arguments only"
            )
        if any(self._counts[piece.index] < 1 for piece in unit.pieces):
            raise BatchError(
                f"a second backward pass through one forward pass of {unit.name}: its gradients may be used "
                "already. Call backward() once, on the sum of the losses"
            )
        self._is_passed_back, self._unit = True, unit.index

    def end(self, unit: Unit, cache: object) -> list[PhasePiece]:
        """Count a backward pass of the layer ``unit``; return the weights whose gradients are complete now."""
        self._unit = None
        for piece in unit.pieces:
            self._counts[piece.index] -= 1
            if cache is not None:
                self._num_casts[piece.index, cache] -= 1
                if not self._num_casts[piece.index, cache]:
                    self._add_held((piece.index, cache))
        return [piece for piece in unit.pieces if not self._counts[piece.index]]

    def is_cast_shared(self, piece: PhasePiece, cache: object) -> bool:
        """Whether several calls of layers use the same cast of a weight of ``piece`` from autocast's ``cache``."""
        key = (piece.index, cache)
        return self._num_casts[key] > 1 or key in self._casts

    def add_cast(
        self, piece: PhasePiece, parameter: Parameter, cache: object, gradients: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """Add one layer call's gradient of a weight's autocast copy to a sum over all calls that share this copy.
        Return the sum in the last of these calls, otherwise None.
        """
        key = (piece.index, cache)
        held = self._casts.setdefault(key, {})
        total = held.pop(parameter) + gradients[0] if parameter in held else gradients[0]
        if self._num_casts[key] == 1:
            return (total,)
        held[parameter] = total
        return (None,)

    def _add_held(self, key: tuple[int, object]) -> None:
        """Add gradient sums in autocast's dtype to ``.grad``; ``key`` names their weights and autocast's cache."""
        for parameter, total in self._casts.pop(key, {}).items():
            total = total.to(parameter.dtype)  # noqa: PLW2901 - the same gradient
            parameter.grad = total if parameter.grad is None else parameter.grad + total

    def watch(self, piece: PhasePiece, name: str, parameter: Parameter) -> None:
        """Have backward passes raise WeightsError if ``parameter`` gets a gradient outside its layers' passes."""

        def refuse_others(_: Tensor) -> None:
            if self._unit not in piece.units:
                raise WeightsError(
                    f"{name} was used outside the forward pass of its layer, where it is not in memory and reads "
                    "as NaN, or left the layer in another way than as its result: use it in that pass only, or "
                    "name a larger module that holds both, layers=[...]"
                )

        is_trained = parameter.requires_grad
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_().register_post_accumulate_grad_hook(refuse_others)
            parameter.requires_grad_(is_trained)


def _refuse_hooks(piece: PhasePiece) -> None:
    """Raise WeightsError if a weight of ``piece`` has a gradient hook, which would run once per layer call."""
    for name, parameter in piece.weights.items():
        if num_gradient_hooks(parameter) > 1:  # one hook comes from CallCounts.watch()
            raise WeightsError(
                f"{name} has a hook of its own for gradients, and its layer is called twice in a micro batch: in "
                "memory the hook gets the sum of both calls' gradients, here each by itself. Remove the hook, or "
                "name a larger module that makes both calls, layers=[...]"
            )
