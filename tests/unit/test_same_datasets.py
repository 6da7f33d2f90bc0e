"""The samples that a dataset has in memory: which are read, and that no dataset is asked for an item."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from popdist.data.same_datasets import checksum_of_contents


class Images(Dataset[object]):
    """A dataset that holds arrays, and cannot be read."""

    def __init__(self, seed: int) -> None:
        self.kept = np.random.default_rng(seed).normal(size=(20, 3))

    def __getitem__(self, _index: int) -> object:
        """Refuse."""
        raise AssertionError


@pytest.mark.parametrize(
    "make",
    [
        Images,
        lambda seed: [Images(seed).kept],
        lambda seed: TensorDataset(torch.zeros(9), torch.full((9, 2), seed).to(torch.bfloat16)),
        lambda seed: [(torch.tensor([seed]), "text")],
    ],
)
def test_other_samples_have_another_checksum(make: Callable[[int], object]) -> None:
    """Equal samples have an equal checksum."""
    assert checksum_of_contents(make(1)) == checksum_of_contents(make(1)) != 0
    assert checksum_of_contents(make(1)) != checksum_of_contents(make(2))


@pytest.mark.parametrize("dataset", [None, [], range(9), ["a", "b"], [(1, "a")], torch.empty(0), torch.tensor(1)])
def test_a_dataset_without_tensors_has_none(dataset: object) -> None:
    """Nor is a sample read whose tensors are made when it is asked for."""
    assert checksum_of_contents(dataset) == 0
