"""Run laws of the test suite with tensors on the device that is checked: law_modules.py MODULE...

A law makes its tensors by the functions of torch. Those that it gives no device are made on the checked device.
"""

import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from gpu_check.jobs import RESULT
from gpu_check.programs.device import chosen_device
from torch.overrides import TorchFunctionMode

import popdist
from tests.contract.laws import TIMEOUT_SECONDS

_NAMES: Final = "arange empty eye full linspace ones rand randint randn randperm tensor zeros"
MAKERS: Final = frozenset(getattr(torch, name) for name in _NAMES.split())


LEFT_OUT: Final = {
    "law_gradients_are_added_where_they_lie": ("cuda", "simulated"),
    "law_memory_of_models_that_are_gone_is_given_back": ("cuda", "simulated"),
    "law_the_threads_that_carry_gradients_step_back": ("cuda", "simulated"),
    "law_init_is_once_and_again_after_finalize": ("cuda", "simulated"),
    "law_recomputed_layers_have_the_same_bits": ("cuda", "simulated"),
    "law_sparse_gradients_are_refused": ("simulated",),
    "law_what_no_collective_takes_is_refused": ("simulated",),
}
"""Laws, and the types of devices they do not speak of: the first three are of the host's memory, the fourth
sends by gloo, the fifth makes tensors in threads of the backward pass, in which no mode is active; the simulated
device has no sparse tensors."""


class OnDevice(TorchFunctionMode):
    """A context in which tensors are made on a device; those of a generator of the CPU are copied to it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Any,
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        is_seed = func is torch.empty and args == (
            (),
        )  # of torch's loaders, which draw it from the CPU's generator
        if func not in MAKERS or is_seed or given.get("device") is not None:
            return func(*args, **given)
        generator = given.get("generator")
        if generator is not None and generator.device.type == "cpu":
            return func(*args, **given).to(self._device)
        return func(*args, **{**given, "device": self._device})


def is_of(name: str, device: torch.device) -> bool:
    """Whether ``name`` is that of a law that speaks of ``device``."""
    return name.startswith("law_") and device.type not in LEFT_OUT.get(name, ())


def run_law(law: Callable[..., object], folder: Path) -> str:
    """Run a law; return why it fails, empty if it holds."""
    try:
        law(*([folder] if inspect.signature(law).parameters else []))
    except Exception as error:  # noqa: BLE001 - whatever it finds
        words = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {words[0][:160]}"
    return ""


def main() -> None:
    """Run the laws of the modules until one fails, and print each with what it found."""
    device = chosen_device()
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    folder = Path(popdist.broadcast_object(tempfile.mkdtemp(dir=sys.argv[1])))
    for name in sys.argv[2:]:
        laws = {key: law for key, law in vars(import_module(name)).items() if is_of(key, device)}
        for key, law in laws.items():
            popdist.barrier()
            with OnDevice(device) if device.type != "cpu" else nullcontext():
                wrong = run_law(law, folder / key)
            print(f"{RESULT}{json.dumps({'law': f'{name}.{key}', 'wrong': wrong})}", flush=True)
            if wrong and popdist.num_instances() > 1:
                return


if __name__ == "__main__":
    main()
