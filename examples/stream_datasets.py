"""Train on a stream of Hugging Face's ``datasets``, shuffled as it is read.

    poprun --num-instances 2 --num-replicas 4 python examples/stream_datasets.py

The last line is the same for ``--num-instances`` 1, 2 and 4. Needs ``pip install 'poprun[examples,neighbours]'``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from datasets import IterableDataset
from sklearn.datasets import load_digits
from torch import Tensor, nn

import popdist


def read_digits() -> Iterator[dict[str, Any]]:
    """1797 images with their digits, one after the other."""
    digits = load_digits()
    for image, digit in zip(digits.images, digits.target, strict=True):
        yield {"pixels": (image / 16).astype("float32").ravel().tolist(), "digit": int(digit)}


def to_tensors(samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """A micro batch."""
    return torch.tensor([it["pixels"] for it in samples]), torch.tensor([it["digit"] for it in samples])


def main() -> None:
    """Train for two epochs, each in an order of its own, and print from one instance."""
    popdist.init()
    torch.manual_seed(0)
    stream = IterableDataset.from_generator(read_digits).shuffle(seed=0, buffer_size=500)
    loader = popdist.data_loader(popdist.shard_iterable(stream), 16, collate_fn=to_tensors, num_workers=1)
    model = popdist.ReplicatedModel(nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    num_samples = 0
    for _ in range(2):
        for batch in loader:
            for x, y in model.micro_batches(batch):
                nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            num_samples += batch.num_samples_job
    if popdist.is_main():
        print(f"{num_samples} samples, weights {popdist.checksum(model)}")


if __name__ == "__main__":
    main()
