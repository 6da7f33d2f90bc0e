"""How long a step of poptorch's optimizers takes in a model, beside torch's.

    python benchmarks/poptorch_optimizers.py --rounds 9

25 million parameters in 300 tensors. Every round times a step of ours and one of torch's, in turn; what counts is
the median over the rounds of the ratio within a round. torch has no LAMB; AdamW by torch's foreach functions
stands for it. In half precision ours are compared with torch's in float32.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring.documents import put, table
from optimizers import timed
from torch import nn

from poptorch import Options, optim
from poptorch.optim.model_optimizer import ModelOptimizer

LIMIT = 1.1
HALF: dict[str, Any] = {"first_order_momentum_accum_type": torch.half}

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Clipped(torch.optim.AdamW):
    """Its gradients are limited before each step, as a program does."""

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - as torch's
        """Limit, and step."""
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


COMPARISONS: dict[str, tuple[torch.dtype, Make, str, Make, float]] = {
    "SGD": (torch.float32, partial(optim.SGD, lr=1e-3), "SGD", torch.optim.SGD, LIMIT),
    "SGD, momentum": (
        *(torch.float32, partial(optim.SGD, lr=1e-3, momentum=0.9)),
        *("SGD, momentum", partial(torch.optim.SGD, momentum=0.9), LIMIT),
    ),
    "Adam": (torch.float32, optim.Adam, "Adam", torch.optim.Adam, LIMIT),
    "AdamW": (torch.float32, optim.AdamW, "AdamW", torch.optim.AdamW, LIMIT),
    "AdamW, bias_correction=False": (
        *(torch.float32, partial(optim.AdamW, bias_correction=False)),
        *("AdamW", torch.optim.AdamW, LIMIT),
    ),
    "AdamW, max_grad_norm": (
        *(torch.float32, partial(optim.AdamW, max_grad_norm=1.0, loss_scaling=8.0)),
        *("AdamW, clip_grad_norm_", Clipped, LIMIT),
    ),
    "RMSprop": (torch.float32, optim.RMSprop, "RMSprop", torch.optim.RMSprop, LIMIT),
    "RMSprop, use_tf_variant": (
        *(torch.float32, partial(optim.RMSprop, use_tf_variant=True)),
        *("RMSprop", torch.optim.RMSprop, LIMIT),
    ),
    "LAMB": (torch.float32, optim.LAMB, "AdamW(foreach=True)", partial(torch.optim.AdamW, foreach=True), LIMIT),
    "AdamW, half weights and moments": (torch.half, partial(optim.AdamW, **HALF), "AdamW", torch.optim.AdamW, 1.5),
    "LAMB, half weights and moments": (
        *(torch.half, partial(optim.LAMB, **HALF), "AdamW(foreach=True)"),
        *(partial(torch.optim.AdamW, foreach=True), 2.0),
    ),
}
"""What is ours → the dtype of its weights, ours, what it is compared with in float32, and the most it may take."""


def parameters_of(dtype: torch.dtype, shapes: list[tuple[int, int]]) -> list[nn.Parameter]:
    """Random ones with gradients."""
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    return parameters


def in_model(make: Make, parameters: list[nn.Parameter]) -> ModelOptimizer:
    """An optimizer as a model that trains has it."""
    options = Options()
    options.Precision.enableStochasticRounding(enabled=True)
    return ModelOptimizer(make(parameters), {str(number): it for number, it in enumerate(parameters)}, options)


def compare(name: str, rounds: int, shapes: list[tuple[int, int]]) -> list[str]:
    """A row of the table."""
    dtype, make, their_name, make_theirs, most = COMPARISONS[name]
    ours = in_model(make, parameters_of(dtype, shapes))
    theirs = make_theirs(parameters_of(torch.float32, shapes))
    timed(ours.step, theirs.step, 2)
    found, (mine, its, shown) = timed(ours.step, theirs.step, rounds)
    return [name, mine, f"{its}, {their_name}", shown, f"≤ {most}", "yes" if found.value <= most else "no"]


def main() -> None:
    """Compare, print a table, and write it into a document if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="how often each step is timed (9)")
    parser.add_argument("--num-tensors", type=int, default=300, help="of 83,333 parameters each (300)")
    parser.add_argument("--document", type=Path, help="a document for the table")
    options = parser.parse_args()
    shapes = [(271, 307)] * options.num_tensors
    rows = [compare(name, options.rounds, shapes) for name in COMPARISONS]
    text = table(["poptorch.optim", "a step", "torch's, in float32", "ratio (95 %)", "limit", "holds"], rows)
    command = shlex.join(["python", *sys.argv])
    text += f"\n\n{torch.get_num_threads()} threads: `{command}`"
    print(text)
    if options.document:
        put(options.document, "poptorch optimizers", text)


if __name__ == "__main__":
    main()
