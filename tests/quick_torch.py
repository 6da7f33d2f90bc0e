"""Imports torch in half of the time: ``.ci/run`` puts this module into the environments of the tests.

Each program of a test imports torch, and an import takes longer than most programs run. Two parts of the import
change nothing in a program. First, each program with an optimizer imports torch's compiler, only to keep the
compiler away from the optimizer's methods; here a method is called as it is until the program itself has imported
the compiler. Second, Python looks for garbage among modules while they are imported, and again at the exit; here
Python leaves the objects of torch, and of other libraries that import slowly, alone. ``scripts/test`` alone runs
the same tests without this module, and a test whose program has to exit as slowly as usual sets the environment
variable SLOW_TORCH.
"""

import functools
import gc
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _QuickImports:
    """Finds torch and libraries around it where they lie, and changes how some of their modules are run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the usual spec of one of these modules, whose loader then runs the module in less time."""
        run = _RUN.get(name)
        if run is None:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            vars(spec.loader)["exec_module"] = functools.partial(run, spec.loader.exec_module)
        return spec


def _run_without_collections(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run an import without a collection, and keep the imported objects out of later collections.

    torch itself imports its compiler in the middle of a program, whose objects must stay in the collections.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        execute(module)
    finally:
        if module.__name__ != "torch._dynamo":
            gc.freeze()
        if was_enabled:
            gc.enable()


def _run_and_call_directly(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run ``torch._compile``, then let its decorator import no compiler for a program that uses none."""
    execute(module)
    disable = module._disable_dynamo

    def disable_when_imported(function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(disable_when_imported, **options)
        hidden_from_compiler = disable(function, **options)

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            called = hidden_from_compiler if "torch._dynamo" in sys.modules else function
            return called(*arguments, **named)

        return call

    vars(module)["_disable_dynamo"] = disable_when_imported


def _run_and_step_directly(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run ``torch.optim.optimizer``, then let a step break the compiler's graph only where there is a compiler."""
    execute(module)
    with_breaks = module._use_grad_for_differentiable

    def step_with_breaks_when_imported(function: Any) -> Any:
        breaking = with_breaks(function)

        @functools.wraps(function)
        def step(optimizer: Any, *arguments: Any, **options: Any) -> Any:
            if "torch._dynamo" in sys.modules:
                return breaking(optimizer, *arguments, **options)
            with module.torch.set_grad_enabled(optimizer.defaults["differentiable"]):
                return function(optimizer, *arguments, **options)

        return step

    vars(module)["_use_grad_for_differentiable"] = step_with_breaks_when_imported


_SLOW = (
    "torch",
    "torch._dynamo",
    "accelerate",
    "lightning",
    "transformers",
    "transformers.trainer",
    "jax",
    "sklearn",
)
_RUN = {
    **dict.fromkeys(_SLOW, _run_without_collections),
    "torch._compile": _run_and_call_directly,
    "torch.optim.optimizer": _run_and_step_directly,
}

if "SLOW_TORCH" not in os.environ:
    sys.meta_path.insert(0, _QuickImports())
