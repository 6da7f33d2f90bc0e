"""LARS: momentum whose learning rate for each parameter follows the norms (You et al., arXiv 1708.03888)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from popdist.errors import OptimizerError
from popdist.optim.pieces import check_number
from popdist.optim.trust_ratio import PreparedUpdate, Settings, TrustRatioOptimizer


class LARS(TrustRatioOptimizer):
    """LARS, algorithm 1 of arXiv 1708.03888, for batches of thousands of samples.

    With the gradient g, each parameter has the local rate
    λ = trust_coefficient · ‖w‖ / (‖g‖ + weight_decay · ‖w‖), and 1 where one of the norms is 0. Then
    v = momentum · v + lr · λ · (g + weight_decay · w), and w moves by -v. So v holds the learning rates of the
    steps that made it, as the paper has it; torch's SGD multiplies by that of the present step. With ``nesterov``
    w moves by -(momentum · v + lr · λ · (g + weight_decay · w)).

    The norms are over the whole parameter, added in one fixed order in float64, so that
    ``popdist.ShardedOptimizer(model, popdist.optim.LARS, ...)`` gives the same bits.

    Args:
        params: Parameters or groups of them, as torch's optimizers take them.
        lr: Learning rate, at least 0.
        momentum: How much of v is kept in a step, from 0 to below 1.
        weight_decay: At least 0.
        trust_coefficient: The paper's η, at least 0.
        nesterov: Whether a step looks ahead by the momentum, which must be above 0.
        trust_ratio: False for a group whose λ is 1, such as biases and normalization layers.
        foreach: Whether all parameters of a group are updated by each call of torch's foreach functions; None
            decides by the device. The bits are the same.
        maximize: Whether to go up the gradient.

    Raises:
        OptimizerError: If a setting is out of its range.
    """

    element_names = frozenset({"momentum_buffer"})

    def __init__(  # noqa: PLR0913 - torch's habit
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        *,
        nesterov: bool = False,
        trust_ratio: bool = True,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "nesterov": nesterov,
            "trust_ratio": trust_ratio,
            "foreach": foreach,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimizers do.

        Raises:
            OptimizerError: If a setting is out of its range.
        """
        settings = self.defaults | param_group
        for name in ("lr", "weight_decay", "trust_coefficient"):
            check_number(name, settings[name])
        check_number("momentum", settings["momentum"], below=1.0)
        if settings["nesterov"] and not settings["momentum"]:
            raise OptimizerError("nesterov=True needs a momentum above 0: there is nothing to look ahead by")
        super().add_param_group(param_group)

    def prepare(self, group: Settings, parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:  # noqa: ARG002 - all that is wanted is the gradients
        """Return the gradients, whose norms are needed."""
        return gradients

    def finish_update(self, prepared: PreparedUpdate, norms: Sequence[tuple[float, float]] | None) -> None:
        """Update the momentum v and the weights."""
        group, parameters = prepared.group, prepared.parameters
        rate, decay, momentum = float(group["lr"]), float(group["weight_decay"]), float(group["momentum"])
        rates = [rate] * len(parameters)
        if norms is not None:
            rates = [rate * _local_rate(*both, decay, float(group["trust_coefficient"])) for both in norms]
        if decay:
            moves = list(torch._foreach_add(prepared.measured, parameters, alpha=decay))  # noqa: SLF001 - as torch's own optimizers do
            torch._foreach_mul_(moves, rates)
        else:
            moves = list(torch._foreach_mul(prepared.measured, rates))  # noqa: SLF001
        if momentum:
            speeds = [self._speed_of(parameter) for parameter in parameters]
            torch._foreach_mul_(speeds, momentum)
            torch._foreach_add_(speeds, moves)
            if group["nesterov"]:
                torch._foreach_add_(moves, speeds, alpha=momentum)
            else:
                moves = speeds
        torch._foreach_sub_(parameters, moves)

    def _speed_of(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        speed: Tensor = state["momentum_buffer"]
        return speed


def _local_rate(weight_norm: float, gradient_norm: float, decay: float, coefficient: float) -> float:
    if weight_norm == 0 or gradient_norm == 0:
        return 1.0
    return coefficient * weight_norm / (gradient_norm + decay * weight_norm)
