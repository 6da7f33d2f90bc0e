"""Recomputation: the backward pass computes activations again in place of keeping them (torch's checkpointing).

A layer that is computed again starts from the same random states and buffers as before: so the gradients are
bitwise equal, and no buffer is updated twice.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from popdist.errors import WeightsError, name_first
from popdist.gradients.buffers import LARGE
from popdist.gradients.optimizer_steps import training_loop, watch_optimizers
from popdist.ground.accelerators import accelerator
from popdist.ground.torch_private import num_writes
from popdist.job.weights import checksum
from popdist.phases.repeated_layers import repeated_layers
from popdist.step.training.batch_norm import GroupedNorm
from popdist.step.training.micro_batches import leaves_of
from popdist.step.training.norm_sync import NormTurn

_PRODUCTS = ("mm", "addmm")
_ATTENTION = "scaled_dot_product"


def recompute(
    model: nn.Module,
    layers: Iterable[nn.Module | str] | None = None,
    *,
    what: Literal["layer", "attention"] = "layer",
) -> nn.Module:
    """Have the backward pass compute ``layers`` again, so that their forward pass need not keep activations.

    The gradients are bitwise equal to gradients without recomputation. A layer is computed again with the random
    numbers and buffers of its forward pass; anything else that a layer changes, such as a counter in Python, is
    changed twice. Without gradients, as in an evaluation, nothing is different.

    Args:
        model: The model; parameters, buffers and their names stay as they are.
        layers: Modules of the model, or their names; None means the modules that the model repeats most often,
            which are the layers of `popdist.parallel.describe`.
        what: ``"layer"`` keeps only the inputs of a layer. ``"attention"`` also keeps the outputs of fused
            attention and of every second matrix product, and computes the rest again: less time, more memory.

    Returns:
        The model.

    Raises:
        WeightsError: If a layer is not in the model or is recomputed already; in its forward pass, if replicas
            share its BatchNorm statistics.
    """
    if what not in ("layer", "attention"):
        raise WeightsError(f"what={what!r} must be 'layer' or 'attention'")
    if not isinstance(model, nn.Module):
        raise WeightsError(f"recompute() is for an nn.Module, and was given {type(model).__name__}")
    chosen = chosen_layers(model, layers)
    names = {module: name for name, module in model.named_modules()}
    for layer in chosen:
        layer.forward = _Recomputed(layer, names[layer], is_selective=what == "attention")
    watch_optimizers()
    return model


def chosen_layers(model: nn.Module, layers: Iterable[nn.Module | str] | None) -> list[nn.Module]:
    """Return the modules in the list ``layers``, each once; if None, the modules that ``model`` repeats most."""
    names = {module: name for name, module in model.named_modules()}
    modules = {name: module for module, name in names.items()}
    if layers is None:
        found = list(repeated_layers(model))
        if not found:
            raise WeightsError(f"{type(model).__name__} repeats no layer in a list: name them, layers=[...]")
        layers = found
    chosen: dict[nn.Module, None] = {}
    for layer in layers:
        module: Any = modules.get(layer) if isinstance(layer, str) else layer
        if module not in names:
            near = get_close_matches(str(layer), modules, 3, 0.4) or [name for name in modules if name]
            raise WeightsError(
                f"layers has {layer if isinstance(layer, str) else type(layer).__name__!r}, which is no module of "
                f"{type(model).__name__}: it has {name_first(near)}"
            )
        if isinstance(module.forward, _Recomputed):
            raise WeightsError(f"{names[module] or type(model).__name__} is recomputed already")
        chosen[module] = None
    return list(chosen)


class _Recomputed:
    """A replacement for a layer's ``forward`` that runs the layer with torch's activation checkpointing."""

    def __init__(self, layer: nn.Module, name: str, *, is_selective: bool) -> None:
        self._layer = layer
        self._same = SameOutputs(layer, name or type(layer).__name__, "recompute()")
        self._forward: Callable[..., Any] = layer.forward
        self._is_selective = is_selective

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward pass, with torch's checkpointing if gradients are enabled."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if NormTurn.current is not None and any(
            isinstance(it.forward, GroupedNorm) for it in self._layer.modules()
        ):
            raise WeightsError(
                f"{type(self._layer).__name__} is recomputed, and has a BatchNorm layer that shares statistics "
                "with replicas that go on meanwhile: leave out batch_norm_group_size, or recompute other "
                "layers"
            )
        args, kwargs = without_caches(args, kwargs)
        contexts: dict[str, Any] = {"context_fn": self._contexts}
        if torch.compiler.is_compiling():  # the compiler restores states itself, and knows only torch's contexts
            selective = partial(create_selective_checkpoint_contexts, _Policy())
            contexts = {"context_fn": selective} if self._is_selective else {}
            return checkpoint(self._forward, *args, use_reentrant=False, **contexts, **kwargs)
        if not self._same.is_checked():
            return checkpoint(self._forward, *args, use_reentrant=False, **contexts, **kwargs)
        with set_checkpoint_early_stop(False):
            return checkpoint(self._compared(), *args, use_reentrant=False, **contexts, **kwargs)

    def _compared(self) -> Callable[..., Any]:
        """Return a function that runs the layer's ``forward``; it checks that a second run has equal results."""
        first: list[str] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            result = self._forward(*args, **kwargs)
            results = [it for _, it in leaves_of(result) if isinstance(it, Tensor)]
            if first:
                self._same.check(first[0], results)
            else:
                first.append(digest_of_tensors(results))
            return result

        return forward

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return two contexts, in which torch's checkpoint runs the layer's first and later forward passes."""
        state = LayerState(self._layer)
        if not self._is_selective:
            return _Contexts(state.watched), _Contexts(state.restored)
        first, again = create_selective_checkpoint_contexts(_Policy())
        return _Contexts(state.watched, lambda: first), _Contexts(state.restored, lambda: again)


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments, with None for each key-value cache, which a second forward pass would extend."""
    cleared = tuple(None if hasattr(it, "get_seq_length") else it for it in args)
    return cleared, {key: None if hasattr(it, "get_seq_length") else it for key, it in kwargs.items()}


class _Contexts(ExitStack):
    """A context that at each entry makes new contexts by ``makers``: a graph may have several backward passes."""

    def __init__(self, *makers: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._makers = makers

    def __enter__(self) -> Self:
        for make in self._makers:
            self.enter_context(make())
        return self


class SameOutputs:
    """A check that a layer's second forward pass, in the backward pass, has the same results as its first.

    The check runs in the first step of each mode (training or evaluation) and set of trained weights.
    """

    def __init__(self, layer: nn.Module, name: str, reason: str) -> None:
        """Make a check of ``layer``; ``reason``, for error messages, says why the layer is computed again."""
        self._layer, self._name, self._reason = layer, name, reason
        self._first_steps: dict[object, int] = {}

    def is_checked(self) -> bool:
        """Whether this is the first step with this mode and these trained weights, which compares the results."""
        state = (self._layer.training, tuple(it.requires_grad for it in self._layer.parameters()))
        step = training_loop.num_optimizer_steps
        return self._first_steps.setdefault(state, step) == step

    def check(self, first: str | None, again: Iterable[Tensor] | None) -> None:
        """Raise WeightsError if the layer's second results ``again`` have another digest than its first results.

        ``again`` is None if the second call has other results; ``first`` is None if the call is not compared.
        """
        if again is None or (first is not None and digest_of_tensors(again) != first):
            raise WeightsError(
                f"{self._name} has computed something else the second time ({self._reason}): it reads what has "
                "changed meanwhile, such as an attribute or a ContextVar that is set before each call, a "
                "generator of its own, a default dtype or a context manager around the forward pass only. Give it "
                "to the layer as an argument, or let it stay as it is until backward() has ended"
            )


def digest_of_tensors(results: Iterable[Tensor]) -> str:
    """Return a digest of the bits of the tensors ``results``, their shapes, and their ``requires_grad``."""
    tensors = [it for it in results if it.layout is torch.strided]
    return checksum({f"{number} {it.requires_grad}": it.detach() for number, it in enumerate(tensors)})


class LayerState:
    """The buffers and random states at the start of a layer's forward pass, for its second computation."""

    _random: "_RandomStates"

    def __init__(self, layer: nn.Module) -> None:
        self._places = [(owner, key) for owner in layer.modules() for key, _ in owner.named_buffers(recurse=False)]
        self._starts: list[tuple[nn.Module, str, Tensor]] = []
        tensors = (*layer.parameters(), *layer.buffers())
        # torch's checkpoint looks for devices among the layer's positional arguments only
        self._devices = {it.device for it in tensors} - {torch.device("cpu"), torch.device("meta")}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context for a layer's forward pass, which saves the random states and buffers from before the pass."""
        self._random = _RandomStates(self._devices)
        before = [
            (owner, key, it := getattr(owner, key), it.detach().clone(), num_writes(it))
            for owner, key in self._places
        ]
        yield
        self._starts = [
            (owner, key, start)
            for owner, key, tensor, start, number in before
            # batch norm writes its buffers, which are small, and torch does not count that
            if start.numel() <= LARGE or getattr(owner, key) is not tensor or num_writes(tensor) != number
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context with the layer's saved random states and buffers; its end restores the present values."""
        random_now = _RandomStates(self._devices)
        self._random.put_in()
        now = [(owner, key, getattr(owner, key)) for owner, key, _ in self._starts]
        for owner, key, start in self._starts:
            setattr(owner, key, start.clone())  # the layer writes the copy; a further pass needs ``start`` again
        try:
            yield
        finally:
            for owner, key, tensor in now:
                setattr(owner, key, tensor)
            random_now.put_in()


class _RandomStates:
    """The present states of all random generators: Python's, numpy's, torch's, and those of some devices."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)
        self._torch = torch.get_rng_state()
        self._of_devices = {device: accelerator.random_state(device) for device in devices}

    def put_in(self) -> None:
        """Set all random generators of this process to the saved states."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for device, state in self._of_devices.items():
            accelerator.set_random_state(device, state)


class _Policy:
    """The policy of selective recomputation: keep outputs of fused attention and every second matrix product."""

    def __init__(self) -> None:
        self._num_products = {False: 0, True: 0}

    def __call__(self, context: Any, operator: Any, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        """Return torch's policy for ``operator``: whether its output is kept or computed again."""
        name = operator.overloadpacket.__name__.lstrip("_")
        if name in _PRODUCTS:
            self._num_products[context.is_recompute] += 1
            is_kept = self._num_products[context.is_recompute] % 2 == 1
        else:
            is_kept = name.startswith(_ATTENTION)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
