"""LAMB: Adam whose update of each parameter is scaled to the parameter's norm (You et al., arXiv 1904.00962)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from popdist.errors import OptimizerError
from popdist.optim.pieces import check_number
from popdist.optim.trust_ratio import PreparedUpdate, Settings, TrustRatioOptimizer


class LAMB(TrustRatioOptimizer):
    """LAMB, algorithm 2 of arXiv 1904.00962, for batches of thousands of samples.

    With m and v the running means of the gradient and of its square, as in Adam, and
    u = m / (sqrt(v) + eps) + weight_decay · w, each parameter moves by -lr · r · u. Its trust ratio r is
    min(‖w‖, max_weight_norm) / ‖u‖, and 1 where one of the norms is 0. The norms are over the whole parameter,
    added in one fixed order in float64, so that
    ``popdist.ShardedOptimizer(model, popdist.optim.LAMB, ...)`` gives the same bits.

    Biases and the parameters of normalization layers are commonly left out::

        decayed = [it for it in model.parameters() if it.dim() > 1]
        others = [it for it in model.parameters() if it.dim() <= 1]
        LAMB([{"params": decayed}, {"params": others, "weight_decay": 0.0, "trust_ratio": False}], lr=2e-3)

    Args:
        params: Parameters or groups of them, as torch's optimizers take them.
        lr: Learning rate, at least 0.
        betas: How much of m and of v is kept in a step, each from 0 to below 1.
        eps: Added to sqrt(v), at least 0.
        weight_decay: At least 0.
        bias_correction: Whether m and v are divided by 1 - beta**step, as in Adam.
        max_weight_norm: The largest norm that a parameter counts with, above 0; None for no limit.
        trust_ratio: False for a group whose updates are not scaled: they are AdamW's.
        foreach: Whether all parameters of a group are updated by each call of torch's foreach functions; None
            decides by the device. The bits are the same.
        maximize: Whether to go up the gradient.

    Raises:
        OptimizerError: If a setting is out of its range.
    """

    element_names = frozenset({"exp_avg", "exp_avg_sq"})

    def __init__(  # noqa: PLR0913 - torch's habit
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        max_weight_norm: float | None = None,
        trust_ratio: bool = True,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_weight_norm": max_weight_norm,
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
        for name in ("lr", "eps", "weight_decay"):
            check_number(name, settings[name])
        betas = settings["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:  # noqa: PLR2004 - as Adam has them
            raise OptimizerError(f"betas={betas!r} must be two numbers")
        for index, beta in enumerate(betas):
            check_number(f"betas[{index}]", beta, below=1.0)
        if settings["max_weight_norm"] is not None:
            check_number("max_weight_norm", settings["max_weight_norm"], minimum=1e-300)
        super().add_param_group(param_group)

    def prepare(self, group: Settings, parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Update the moments m and v, and return the update u of each parameter."""
        states = [self._state_of(parameter) for parameter in parameters]
        means, squares = [it["exp_avg"] for it in states], [it["exp_avg_sq"] for it in states]
        torch._foreach_add_([it["step"] for it in states], 1.0)
        beta_1, beta_2 = map(float, group["betas"])
        torch._foreach_lerp_(means, gradients, 1 - beta_1)
        torch._foreach_mul_(squares, beta_2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta_2)
        below = torch._foreach_sqrt(squares)  # noqa: SLF001
        if group["bias_correction"]:
            steps = [float(it["step"]) for it in states]
            roots = [(1 - beta_2**step) ** 0.5 for step in steps]
            torch._foreach_div_(below, roots)
            torch._foreach_add_(below, float(group["eps"]))
            torch._foreach_mul_(below, [1 - beta_1**step for step in steps])
        else:
            torch._foreach_add_(below, float(group["eps"]))
        if not group["weight_decay"]:
            return list(torch._foreach_div(means, below))  # noqa: SLF001
        updates = list(torch._foreach_mul(parameters, float(group["weight_decay"])))  # noqa: SLF001
        torch._foreach_addcdiv_(updates, means, below)
        return updates

    def finish_update(self, prepared: PreparedUpdate, norms: Sequence[tuple[float, float]] | None) -> None:
        """Add -lr · r · u to the weights."""
        rate, limit = float(prepared.group["lr"]), prepared.group["max_weight_norm"]
        if norms is None:
            torch._foreach_mul_(prepared.measured, -rate)
        else:
            ratios = [_trust_ratio(*both, limit) for both in norms]
            torch._foreach_mul_(prepared.measured, [-rate * ratio for ratio in ratios])
        torch._foreach_add_(prepared.parameters, prepared.measured)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _trust_ratio(weight_norm: float, update_norm: float, limit: float | None) -> float:
    if weight_norm == 0 or update_norm == 0:
        return 1.0
    return (weight_norm if limit is None else min(weight_norm, float(limit))) / update_norm
