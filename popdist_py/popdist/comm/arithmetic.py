"""How this process computes: the threads of a replica and torch's choice of algorithms, on which bits depend."""

import torch

from popdist.contract import Contract


def prepare(contract: Contract) -> None:
    """Compute from now on as the launcher told; what it left open stays as the program or torch has it."""
    if contract.num_threads is not None:
        torch.set_num_threads(contract.num_threads)
    if contract.is_deterministic:
        torch.use_deterministic_algorithms(mode=True)


def describe() -> str:
    """What must be the same on all instances, in words."""
    algorithms = "deterministic" if torch.are_deterministic_algorithms_enabled() else "any"
    return f"{torch.get_num_threads()} threads for each replica, {algorithms} algorithms"
