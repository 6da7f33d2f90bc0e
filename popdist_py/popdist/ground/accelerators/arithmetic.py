"""The arithmetic settings of an instance: the number of threads, and the algorithms of torch.

The bits of a sum depend on the threads and the algorithms, so all instances of a job must have equal settings.
"""

from typing import Any

import torch

from popdist.ground import torch_private
from popdist.ground.accelerators import accelerator
from popdist.ground.contract import Contract


def prepare(contract: Contract) -> str:
    """Set torch's threads and algorithms as the job's ``contract`` says; return text to compare instances."""
    if contract.num_replicas > 1:
        torch_private.compile_scripts_at_once()
    if contract.num_threads is not None:
        torch.set_num_threads(contract.num_threads)
    if contract.is_deterministic:
        torch.use_deterministic_algorithms(mode=True)
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False  # the fill finds faults in programs, and takes time
        accelerator.stop_choosing_by_time()
    algorithms = "deterministic" if torch.are_deterministic_algorithms_enabled() else "any"
    products = torch.get_float32_matmul_precision()
    words = (
        f"{torch.get_num_threads()} threads for each replica, {algorithms} algorithms, {products} float32 products"
    )
    return f"{words}{accelerator.arithmetic_in_words()}"
