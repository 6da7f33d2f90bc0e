"""The optimizer of torch or popdist that computes the steps of a group of parameters, and its state."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

import popdist
from poptorch._logging import logger
from poptorch.optim.optimizer_kinds import SGD_KIND, OptimizerKind
from poptorch.optim.variants import UNCORRECTED_STEPS, UncorrectedAdamW, WidenedLAMB
from poptorch.options import Options

_EXACT: Final = (torch.float32, torch.float64)

_SEEDS_OF_A_JOB: Final = 1 << 62


class GroupStepper:
    """Updates the parameters of one group of the program's optimizer."""

    def __init__(
        self,
        group: int,  # its index
        kind: OptimizerKind,
        settings: Mapping[str, Any],  # of the group
        types: Mapping[str, torch.dtype],  # dtypes of the state that were asked for, by attribute
        parameters: Mapping[str, Parameter],  # those of the group that the model has, by name; at least one
        options: Options,  # say how half precision is rounded
        model: popdist.ReplicatedModel | None,  # whose instances share the state; None where each keeps all of it
    ) -> None:
        self.group = group
        self._kind = kind
        self._types = types
        self._parameters = parameters
        is_uncorrected = kind.class_of(settings) is UncorrectedAdamW
        self._counts_steps = kind is not SGD_KIND and not is_uncorrected
        held = {*kind.moment_types(settings, types).values()}
        # whether weights and state are computed as they are held; others are computed in float32, and rounded
        self._is_exact = all(it.dtype in _EXACT for it in parameters.values()) and held <= {torch.float32}
        self._inside = self._optimizer_of(settings, options, model)
        self.step = self._inside.step
        if kind is not SGD_KIND and {*self._moments().values()} != {torch.float32}:
            self._load(self.read())  # so that the state has the dtypes asked for, not those of torch

    def set(self, settings: Mapping[str, Any]) -> None:
        """Use the settings of the group from the next step on."""
        before = self._moments()
        self._inside.param_groups[0].update(self._kind.arguments_of(settings))
        if self._kind is not SGD_KIND and self._moments().keys() - before.keys():
            self._load(self.read())

    def scale_gradients(self, factor: float | Tensor | None) -> None:
        """Have the next step multiply its gradients by ``factor``, in float32; None: leave them as they are."""
        if not self._is_exact:
            vars(self._inside)["grad_scale"] = (
                None if factor is None else 1 / torch.as_tensor(factor, dtype=torch.float32)
            )
        elif factor is not None:
            gradients = [it.grad for it in self._parameters.values() if it.grad is not None]
            torch._foreach_mul_(gradients, factor)

    def read(self) -> dict[str, Tensor]:
        """The state by PopTorch's names: text → tensor on the CPU. What there is none of yet is 0."""
        states = self._inside.state_dict()["state"]
        moments = self._moments()
        read = {}
        for index, (name, parameter) in enumerate(self._parameters.items()):
            state = states.get(index, {})
            for moment, dtype in moments.items():
                value = state.get(moment)
                if value is None:
                    value = torch.zeros_like(parameter, dtype=dtype, device="cpu", requires_grad=False)
                read[self._text(moment, name)] = value.detach().to("cpu", copy=True)
            if self._counts_steps:
                step = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32)
                read[f"Step___{name}"] = step.detach().to("cpu", copy=True)
        return read

    def write(self, named: Mapping[str, Tensor]) -> None:
        """Go on from a state that ``read`` gave; what is missing stays as it is."""
        before = self.read()
        if found := {name: torch.as_tensor(named[name]) for name in before if name in named}:
            self._load({**before, **found})

    def _load(self, named: Mapping[str, Tensor]) -> None:
        moments = self._moments()
        states: dict[int, dict[str, Tensor]] = {}
        for index, (name, parameter) in enumerate(self._parameters.items()):
            state = {
                moment: named[self._text(moment, name)]
                .to(parameter.device, dtype, copy=True)
                .view(parameter.shape)
                for moment, dtype in moments.items()
            }
            if self._counts_steps:
                state["step"] = named[f"Step___{name}"].clone().float().view(())
            elif self._kind is not SGD_KIND:
                state["step"] = torch.tensor(UNCORRECTED_STEPS, dtype=torch.float32, device="cpu")
            elif not any(bool(value.any()) for value in state.values()):
                continue  # torch's first step, which has no velocity yet
            states[index] = state
        self._inside.load_state_dict({**self._inside.state_dict(), "state": states})

    def _moments(self) -> dict[str, torch.dtype]:
        return self._kind.moment_types(self._inside.param_groups[0], self._types)

    def _text(self, moment: str, name: str) -> str:
        return f"{self._kind.moments[moment].name}___{name}"

    def _optimizer_of(
        self, settings: Mapping[str, Any], options: Options, model: popdist.ReplicatedModel | None
    ) -> torch.optim.Optimizer:
        """The optimizer of torch or popdist that updates the parameters."""
        kind, parameters = self._kind, list(self._parameters.values())
        found, known = kind.class_of(settings), kind.arguments_of(settings)
        if not self._is_exact:
            moments = kind.moment_types(settings, self._types)
            seed: int = options.random_seed if options.exists("random_seed") else 0
            own: dict[str, Any] = {
                "rounding": "stochastic" if options.Precision.stochastic_rounding else "nearest",
                "seed": (seed + self.group * 0x9E3779B97F4A7C15) % _SEEDS_OF_A_JOB,  # other bits for each group
            }
            if found is popdist.optim.LAMB:
                if model is not None:
                    logger.debug("LAMB in half precision needs whole parameters: its state is not sharded")
                return WidenedLAMB(parameters, moments=moments, **own, **known)
            first = next(iter(moments.values()), torch.float32)
            held = first if set(moments.values()) == {first} and kind is SGD_KIND else torch.float32
            known |= {"optimizer_class": found, "moments": held, **own}
            found = popdist.optim.LowPrecision
        if model is not None:
            return popdist.ShardedOptimizer(model, found, parameters, **known)
        return found(parameters, **known)
