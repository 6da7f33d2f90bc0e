"""Calls of a layer of a phased model: the forward pass keeps only the inputs, the backward pass runs it again.

Both passes run the layer with gradients, on detached inputs, so that torch takes the same branches in both passes.
The graph of the forward pass keeps no tensor. A backward pass that reaches this graph has come by a tensor that
left the layer in another way than as its result, and raises an error that names the layer.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from popdist.errors import WeightsError
from popdist.ground.local_tensors import part_itself
from popdist.ground.torch_private import num_writes, skip_tracing
from popdist.phases.phased_layers import Unit
from popdist.phases.phased_run import PhasedRun
from popdist.phases.recompute import LayerState, SameOutputs, digest_of_tensors, without_caches
from popdist.step.training.micro_batches import leaves_of, map_nest

_INSIDE: Final = (
    "{} computes gradients in its forward pass (torch.autograd.grad, torch.func.grad), which a layer of a phased "
    "model cannot: train the model in memory, or name layers=[...] such that what computes gradients is in none"
)
_WORDS_OF_TORCH: Final = {
    "saved tensor hooks": _INSIDE,
    "is a view of another Tensor": "{} has changed an input in place that is a view of another tensor: give a "
    "clone() to the layer",
    "backward through the graph a second time": "{} reads a tensor with a graph of its own that is none of its "
    "arguments, and that another call reads, too: give it to the layer as an argument",
}
"""Parts of torch's error messages, and the message about the layer that replaces each of these errors."""

_OTHER_LAYERS: Final = "or name a larger module that holds the layer and what it shares, layers=[...]"


def install(run: PhasedRun) -> None:
    """Replace each layer's ``forward``, so that ``run`` has the layer's weights in memory during each call."""
    for unit in run.layers.units:
        module: Any = unit.module
        module.forward = PhasedForward(unit, run)
        if not isinstance(module, torch.jit.ScriptModule):
            # a hook of the program may read the weights, as the hooks of torch.nn.utils.weight_norm do
            module.register_forward_pre_hook(partial(_bring_weights, unit, run), prepend=True)
    for piece in run.layers.pieces:
        for name, parameter in piece.weights.items() if piece.units else ():
            run.calls.watch(piece, name, parameter)


@skip_tracing
def _bring_weights(unit: Unit, run: PhasedRun, *_: object) -> None:
    run.bring(unit)


class PhasedForward:
    """A replacement for a layer's ``forward``: it keeps the inputs, and the backward pass runs the layer again."""

    def __init__(self, unit: Unit, run: PhasedRun) -> None:
        self.unit = unit
        self.forward: Callable[..., Any] = unit.module.forward
        self.run = run
        self.written: dict[int, set[int]] = {}  # the inputs that the layer writes, by the number of its inputs
        self.same = SameOutputs(unit.module, unit.name, "phased() computes a layer again in the backward pass")
        self._is_parametrized = any(map(is_parametrized, unit.module.modules()))
        self._anchor = torch.zeros((), dtype=torch.float32, requires_grad=True, device="cpu")
        self._function: Any = type(f"PhasedLayer[{unit.name}]", (_PhasedFunction,), {})

    @skip_tracing  # a compiled model runs its layers as they are
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward pass with its weights in memory, and return the result."""
        inputs: list[Tensor] = []
        structure = _take_out(without_caches(args, kwargs), inputs)
        is_passed_back = self.unit.is_trained or any(it.requires_grad for it in inputs)
        if not torch.is_grad_enabled() or not is_passed_back:
            with self.run.running(self.unit, backward=False):
                return self.forward(*args, **kwargs)
        self._check_weights()
        call = _Call(self, structure)
        with _explained(self.unit):
            call.first(inputs)
            returned = self._function.apply(call, self._anchor, *inputs) if call.returned else ()
        return call.result_of(inputs, returned)

    def _check_weights(self) -> None:
        """Check that each parameter of the layer is the same object as when ``phased()`` put the model's weights
        into the store (a file or memory). Raise WeightsError if a parameter is another tensor.
        """
        stored_ids = {id(it) for piece in self.unit.pieces for it in piece.weights.values()}
        for name, parameter in self.unit.module.named_parameters():
            if id(parameter) not in stored_ids:
                raise WeightsError(
                    f"{self.unit.name}.{name} is another tensor than the parameter that phased() has in its "
                    "store, as torch.func.functional_call() or an assignment puts there: train with the "
                    "parameters of the model, or compute with other tensors under torch.no_grad()"
                )
        if self._is_parametrized and _cached_probe().weight is _cached_probe().weight:
            raise WeightsError(
                f"{self.unit.name} is called within torch.nn.utils.parametrize.cached(), whose cached weights the "
                "backward pass cannot use, as it computes the layer again: leave out cached()"
            )


@lru_cache(maxsize=1)
def _cached_probe() -> Any:
    """Return a module to detect ``parametrize.cached()``: only there two reads of ``weight`` are one object."""
    module = nn.Linear(1, 1, bias=False, device="meta", dtype=torch.float32)  # which draws no random numbers
    return register_parametrization(module, "weight", nn.ReLU())


@contextmanager
def _explained(unit: Unit) -> Iterator[None]:
    """A context in which torch's errors about unsupported operations become WeightsErrors that name the layer."""
    try:
        yield
    except RuntimeError as error:
        for text, words in _WORDS_OF_TORCH.items():
            if text in str(error):
                raise WeightsError(words.format(unit.name)) from error
        raise


class _Taken(int):
    """A number that stands for a tensor in nested arguments or results: the tensor's index in a list."""


def _take_out(nest: Any, tensors: list[Tensor]) -> Any:
    """Return the nested value ``nest`` with indices in place of its tensors; append each tensor to ``tensors``."""
    if isinstance(nest, Tensor):
        place = next((place for place, it in enumerate(tensors) if it is nest), len(tensors))
        if place == len(tensors):
            tensors.append(nest)
        return _Taken(place)
    return map_nest(nest, lambda child: _take_out(child, tensors))


def _put_back(nest: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the nested value ``nest`` with each index replaced by the tensor in ``tensors`` at this index."""
    if isinstance(nest, _Taken):
        return tensors[nest]
    return map_nest(nest, lambda child: _put_back(child, tensors))


@lru_cache(maxsize=8)
def _probe(device: torch.device) -> Tensor:
    """Return a tensor on ``device`` to identify autocast's cache: each cache has its own cast of the tensor."""
    return torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)


def _cast_node(leaf: Tensor) -> Any:
    """Return the autograd node of autocast's cast of ``leaf``; None if autocast does not cast ``leaf`` here."""
    with torch.enable_grad():  # a product without elements costs nothing, and takes the cast from autocast's cache
        product = torch.matmul(leaf, torch.zeros(leaf.shape[-1], 0, dtype=leaf.dtype, device=leaf.device))
    node, last = product.grad_fn, None
    while node is not None and getattr(node, "variable", None) is not leaf:
        node, last = node.next_functions[0][0], node
    return last if last is not None and last.name().startswith("ToCopy") else None


class _Entrance(torch.autograd.Function):
    """An autograd function that turns leaf tensors, which a layer cannot write in place, into a layer's inputs."""

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Return the layer's inputs, which share the memory of the leaf tensors ``leaves``."""
        inputs = tuple(it.data for it in leaves)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(it for it, leaf in zip(inputs, leaves, strict=True) if not leaf.requires_grad)
        )
        return inputs

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the layer's inputs unchanged, as the gradients of the leaf tensors."""
        return gradients


class _CallCasts:
    """The autocast settings of a layer's forward pass, which its second computation uses again.

    Attributes:
        cache: An object that identifies autocast's cache; None if autocast keeps no casts.
    """

    def __init__(self, device: torch.device) -> None:
        self._modes = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", device.type}
        }
        self._is_on = any(is_on for is_on, _ in self._modes.values())
        self.cache = _cast_node(_probe(device)) if self._is_on and torch.is_autocast_cache_enabled() else None

    @contextmanager
    def in_place(self, *, is_first: bool) -> Iterator[None]:
        """A context in which autocast has the recorded settings, and leaves no converted weights in its cache."""
        is_on = any(map(torch.is_autocast_enabled, self._modes))
        if not (self._is_on or is_on):
            yield
            return
        caches = self.cache is not None and not is_first
        with ExitStack() as stack:
            for kind, (is_enabled, dtype) in self._modes.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled, cache_enabled=caches))
            yield
        if caches and is_on:
            torch.clear_autocast_cache()


class _Call:
    """One call of a layer: its results, and all values except inputs that the second computation needs.

    The graph of the call keeps these values, and frees them after the backward pass.
    """

    def __init__(self, owner: PhasedForward, structure: Any) -> None:
        self.unit, self.run = owner.unit, owner.run
        # copies of the inputs that the layer writes or returns, by the index of the input
        self.copies: dict[int, Tensor] = {}
        self.owned: frozenset[int] = frozenset()  # the indices of the copied inputs
        self.written: list[int] = []  # the indices of inputs with a gradient that the layer has written
        self.returned: list[Tensor] = []  # written inputs, then results with a gradient: autograd returns them
        self._owner, self._structure = owner, structure
        self._results: list[Tensor | Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]] = []
        self._differentiable: list[int] = []  # the indices of inputs that get a gradient
        self._own: list[int] = []  # the indices of the results that the autograd function returns
        self._nest: Any = None
        self._has_run = False
        self._digest: str | None = None
        self._state = LayerState(owner.unit.module)
        self._micro_batch: object = None
        self._casts = _CallCasts(owner.run.store.device)

    def first(self, inputs: Sequence[Tensor]) -> None:
        """Run the layer's forward pass, and record its results and the inputs that the layer has written."""
        self._micro_batch = self.run.calls.begin(self.unit, self._casts.cache)
        self._differentiable = [place for place, it in enumerate(inputs) if it.requires_grad]
        known = self._owner.written.get(len(inputs))  # None in the first call, which finds the written inputs
        places = range(len(inputs)) if known is None else known
        self.copies = {place: inputs[place].detach().clone() for place in places}
        entered = self._entered(inputs, lambda _: self._refuse)
        with ExitStack() as stack:
            stack.enter_context(self.run.running(self.unit, backward=False))
            stack.enter_context(self._state.watched())
            stack.enter_context(self._casts.in_place(is_first=True))
            stack.enter_context(saved_tensors_hooks(lambda _: None, self._refuse))
            result = self._compute(entered)
            self._has_run = True
            self._record(result, inputs, entered)

    def _entered(
        self, tensors: Sequence[Tensor], hook_of: Callable[[int], Callable[[Tensor], object]]
    ) -> Sequence[Tensor]:
        """Return layer inputs that share memory with ``tensors``; a hook ``hook_of(index)`` gets each gradient."""
        leaves = [it.detach() for it in tensors]
        for place in self._differentiable:  # ``.grad`` may be in another order of memory, which shows in sums
            leaves[place].requires_grad_().register_hook(hook_of(place))
        with torch.enable_grad():
            entered: Sequence[Tensor] = _Entrance.apply(*leaves) if leaves else ()  # type: ignore[no-untyped-call]
        return entered

    def _compute(self, entered: Sequence[Tensor]) -> Any:
        args, kwargs = arguments = _put_back(self._structure, entered)
        before = [*leaves_of(arguments)]
        with torch.enable_grad():
            result = self._owner.forward(*args, **kwargs)
        after = [*leaves_of(arguments)]
        pairs = zip(before, after, strict=False)
        if len(before) != len(after) or any(one[0] != two[0] or one[1] is not two[1] for one, two in pairs):
            raise WeightsError(
                f"{self.unit.name} adds to or changes a list, dict or dataclass that it was given, which a layer "
                f"of a phased model cannot: return what it adds, {_OTHER_LAYERS}"
            )
        return result

    def _refuse(self, _: object) -> NoReturn:
        if not self._has_run:
            raise WeightsError(_INSIDE.format(self.unit.name))
        raise WeightsError(
            f"backward() came to a tensor that {self.unit.name} has computed and not returned. The layers of a "
            "phased model give tensors by their results only: in tuples, lists, dicts, dataclasses and classes "
            "that are registered with torch's pytree. Return what stands in an attribute, in an object of another "
            f"class or comes to a hook inside the layer, {_OTHER_LAYERS}"
        )

    def _record(self, result: Any, inputs: Sequence[Tensor], entered: Sequence[Tensor]) -> None:
        """Record the results of the layer, and the inputs that the layer has written in place."""
        self._record_written(inputs, entered)
        results: list[Tensor] = []
        self._nest = _take_out(result, results)
        if self._owner.same.is_checked():
            self._digest = digest_of_tensors(results)
        num_uses = Counter(map(_memory_of, results))
        sources = {_memory_of(it): place for place, it in reversed([*enumerate(entered)])} | {0: None}
        weights = {_memory_of(it) for piece in self.unit.pieces for it in piece.weights.values()}
        for number, it in enumerate(results):
            memory = _memory_of(it)
            place = sources.get(memory)
            if place is not None and it.dtype == entered[place].dtype:
                self.copies.setdefault(place, inputs[place].detach().clone())
                self._results.append(partial(_seen_in, place, None if it is entered[place] else it))
                continue
            it_or_copy = it.detach().clone() if memory in weights else it
            if not it.requires_grad:
                self._results.append(it_or_copy)
                continue
            is_alone = place is None and num_uses[memory] == 1
            self._results.append(partial(_returned, len(self.returned)))
            self._own.append(number)
            self.returned.append(it_or_copy.data if is_alone else it_or_copy.detach())

    def _record_written(self, inputs: Sequence[Tensor], entered: Sequence[Tensor]) -> None:
        """Record which inputs the layer has written in place, and keep copies of only these inputs."""
        written = {place for place, it in enumerate(entered) if num_writes(it)}
        known = self._owner.written.setdefault(len(inputs), written)
        if strange := written - known:
            raise WeightsError(
                f"{self.unit.name} has changed an input of shape {tuple(inputs[min(strange)].shape)} in place, "
                "and has not in its first call, so that nobody keeps what the backward pass needs: let it change "
                "a clone() of the input"
            )
        self.copies = {place: self.copies[place] for place in known}
        for place in sorted(written):
            if not entered[place].requires_grad:
                increment_version(inputs[place])
                continue
            self.written.append(place)
            self.returned.append(inputs[place])

    def result_of(self, inputs: Sequence[Tensor], returned: Sequence[Tensor]) -> Any:
        """Return the layer's result, in which ``returned`` are the tensors that the autograd function returned."""
        results = [it if isinstance(it, Tensor) else it(inputs, returned) for it in self._results]
        nest, self._nest, self._results = self._nest, None, []
        return _put_back(nest, results)

    def backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Compute the layer again: add its weights' gradients to ``.grad``, return the gradients of its inputs."""
        calls = self.run.calls
        calls.check(self.unit, self._micro_batch)
        input_gradients: dict[int, Tensor] = {}
        with self.run.running(self.unit, backward=True):
            with self._state.restored(), self._casts.in_place(is_first=False):
                entered = self._entered(tensors, lambda place: partial(input_gradients.__setitem__, place))
                results: list[Tensor] = []
                _take_out(self._compute(entered), results)
                self._check_same(entered, results)
                if self._casts.cache is not None:
                    self._add_casts()
            outputs = [entered[place] for place in self.written] + [results[place] for place in self._own]
            pairs = [
                it for it in zip(outputs, gradients, strict=True) if it[1] is not None and it[0].requires_grad
            ]
            del entered, results, outputs
            if pairs:
                roots, root_gradients = zip(*pairs, strict=True)
                pairs.clear()
                with _explained(self.unit):
                    torch.autograd.backward(roots, root_gradients)
            self.run.use_complete(calls.end(self.unit, self._casts.cache))
        return [input_gradients.get(place) for place in range(len(tensors))]

    def _check_same(self, entered: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Raise WeightsError if the layer's second computation writes other inputs or returns other results."""
        written = {place for place, it in enumerate(entered) if num_writes(it)}
        is_same = written <= self.owned and max(self._own, default=-1) < len(results)
        self._owner.same.check(self._digest, results if is_same else None)

    def _add_casts(self) -> None:
        """Have a weight's gradients summed in autocast's dtype, if several calls share a cast of the weight."""
        calls = self.run.calls
        for piece in self.unit.pieces:
            for parameter in piece.weights.values() if calls.is_cast_shared(piece, self._casts.cache) else ():
                if parameter.requires_grad and parameter.dtype == torch.float32 and parameter.dim():
                    node = _cast_node(parameter)
                    if node is not None:
                        node.register_prehook(partial(calls.add_cast, piece, parameter, self._casts.cache))


def _memory_of(tensor: Tensor) -> int:
    """Return the address of the storage of ``tensor``; 0 if the tensor has no storage."""
    part = part_itself(tensor)
    return part.untyped_storage().data_ptr() if part.layout is torch.strided else 0


def _seen_in(place: int, view: Tensor | None, inputs: Sequence[Tensor], _: Sequence[Tensor]) -> Tensor:
    """Return the layer's input number ``place``, or a view of this input like ``view``, as the layer's result."""
    source = inputs[place]
    if view is None:
        return source
    source = source if view.requires_grad else source.detach()
    return source.as_strided(view.shape, view.stride(), view.storage_offset())


def _returned(number: int, _: Sequence[Tensor], returned: Sequence[Tensor]) -> Tensor:
    return returned[number]


class _PhasedFunction(torch.autograd.Function):
    """The autograd function for one call of a layer; between the passes it keeps only the layer's inputs."""

    @staticmethod
    def forward(ctx: Any, call: _Call, _anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the results of ``call``. Because of ``_anchor``, autograd runs ``backward`` in every case."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(call.copies.get(place, it) for place, it in enumerate(inputs)))
        ctx.mark_dirty(*(inputs[place] for place in call.written))
        returned = tuple(call.returned)
        call.owned = frozenset(call.copies)
        call.returned.clear()
        call.copies.clear()
        return returned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the layer again, and return the gradients of its inputs."""
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            raise WeightsError(
                f"an input of {ctx.call.unit.name} was changed in place after the call, and the backward pass "
                "computes the layer again: change a clone() of the input"
            ) from error
        return None, None, *ctx.call.backward(saved, gradients)
