"""How an instance computes: with how many threads, and by which algorithms of torch.

The bits of a sum depend on both, so all instances of a job must have them alike.
"""

from typing import Any

import torch

from popdist.ground import torch_private
from popdist.ground.accelerators import accelerator
from popdist.ground.contract import Contract


def prepare(contract: Contract) -> str:
    """Compute from now on as the launcher asked; return what all instances must have alike, in words."""
    if contract.num_replicas > 1:
        torch_private.compile_scripts_at_once()
    if contract.num_threads is not None:
        torch.set_num_threads(contract.num_threads)
    if contract.is_deterministic:
        torch.use_deterministic_algorithms(mode=True)
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False  # which is for finding faults, and takes time
        accelerator.stop_choosing_by_time()
    algorithms = "deterministic" if torch.are_deterministic_algorithms_enabled() else "any"
    products = torch.get_float32_matmul_precision()
    words = (
        f"{torch.get_num_threads()} threads for each replica, {algorithms} algorithms, {products} float32 products"
    )
    return f"{words}{accelerator.arithmetic_in_words()}"
