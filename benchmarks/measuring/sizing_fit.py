"""Finds the constants of the planner again: on a fifth of the groups of one host, and nothing else.

The objective is the error of each row, and what the first proposal of each group loses: the mean of the
measured times, weighed by how early the prediction puts each. Least squares of the errors alone say where to
start; then both together are improved by Nelder and Mead's method. No random number is drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Final

import numpy as np
from measuring.sizing_rows import LEAST_ROWS, Timed, grouped, seconds_of
from numpy.typing import NDArray
from scipy.optimize import least_squares, minimize

from popsize.constants import CONSTANTS, Constants

SHARE: Final = 5

LIMITS: Final[Mapping[str, tuple[float, float, float]]] = {
    "matmul_efficiency": (0.75, 0.6, 0.8),
    "memory_efficiency": (0.75, 0.4, 0.92),
    "link_efficiency": (0.8, 0.7, 0.95),
    "collective_seconds": (5e-5, 1e-5, 1.5e-4),
    "launch_seconds": (3e-5, 1e-5, 6e-5),
    "ramp_seconds": (1e-5, 4e-6, 3e-5),
    "skew_kernels": (4.0, 0.5, 10.0),
    "unfused_kernels": (44.0, 10.0, 60.0),
    "whole_logits_slowdown": (2.0, 1.0, 4.0),
    "drained_logits": (0.12, 0.01, 0.3),
    "outside_seconds": (1.5e-3, 2e-4, 6e-3),
}
"""Where each constant starts, the least and the most that it may be: what an A100 can do.

Matrix products of cuBLAS reach 80 % of the peak at best, STREAM 92 % of the memory's bandwidth, NCCL 70 to 95 %
of a link.
"""

_LEAST, _MOST = (np.log([limit[side] for limit in LIMITS.values()]) for side in (1, 2))
_SCALE: Final = 0.08
_TEMPERATURE: Final = 0.02
_FIRST_STEPS: Final = (0.15, -0.15, 0.06)
_MOST_CALLS: Final = 1500

_Vector = NDArray[np.float64]


def split(cases: Sequence[Timed], offset: int) -> tuple[list[list[Timed]], list[Timed]]:
    """Every fifth of the large groups, in the order of their sizes, from ``offset``; and all other cases."""
    groups = grouped(cases, lambda timed: timed[0].row)
    chosen = [key for key, group in groups.items() if len(group) >= LEAST_ROWS][offset::SHARE]
    return [groups[key] for key in chosen], [
        one for key, group in groups.items() if key not in chosen for one in group
    ]


def fitted(groups: Sequence[Sequence[Timed]]) -> Constants:
    """The constants that predict ``groups`` best, with three digits."""
    cases = [case for group in groups for case, _ in group]
    measured = np.log([seconds for group in groups for _, seconds in group])
    ends = np.cumsum([len(group) for group in groups])[:-1]

    def errors(place: _Vector) -> _Vector:
        constants = constants_at(place)
        return np.log([seconds_of(case, constants) for case in cases]) - measured

    def loss(place: _Vector) -> float:
        off = errors(place)
        lost = [
            _first_proposal(predicted, true)
            for predicted, true in zip(np.split(off + measured, ends), np.split(measured, ends), strict=True)
        ]
        outside = np.maximum(0, place - _MOST) ** 2 + np.maximum(0, _LEAST - place) ** 2
        small = np.mean(np.sqrt(1 + (off / _SCALE) ** 2) - 1) * _SCALE
        return float(small + np.mean(lost) + np.sum(outside))

    start = np.clip(np.log([limit[0] for limit in LIMITS.values()]), _LEAST + 1e-3, _MOST - 1e-3)
    bounds = (_LEAST, _MOST)
    place = least_squares(errors, start, bounds=bounds, loss="soft_l1", f_scale=_SCALE, max_nfev=200).x
    for step in _FIRST_STEPS:
        simplex = np.vstack([place, place + step * np.eye(len(place))])
        options = {"maxfev": _MOST_CALLS, "maxiter": _MOST_CALLS, "adaptive": True, "initial_simplex": simplex}
        place = minimize(loss, place, method="Nelder-Mead", options=options).x
    return rounded(constants_at(place))


def _first_proposal(predicted: _Vector, measured: _Vector) -> float:
    """How much longer than the fastest the first proposal of a group takes; close proposals share that place."""
    weights = np.exp((predicted.min() - predicted) / _TEMPERATURE)
    return float(weights @ np.expm1(measured - measured.min()) / weights.sum())


def constants_at(place: _Vector) -> Constants:
    """The constants at a place: logarithms, in the order of `LIMITS`."""
    values = np.exp(np.clip(place, _LEAST, _MOST))
    return Constants(context_bytes=CONSTANTS.context_bytes, **dict(zip(LIMITS, map(float, values), strict=True)))


def rounded(constants: Constants) -> Constants:
    """The constants with three digits, as they are written down."""
    return Constants(**{field.name: float(f"{getattr(constants, field.name):.3g}") for field in fields(constants)})
