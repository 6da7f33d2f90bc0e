"""Train on a WebDataset: tar files that are read from start to end.

    poprun --num-instances 2 --num-replicas 4 python examples/stream_webdataset.py --folder /tmp/digits

The last line is the same for ``--num-instances`` 1, 2 and 4. Needs ``pip install 'poprun[examples,neighbours]'``.
"""

import argparse
import io
from pathlib import Path

import numpy as np
import torch
import webdataset
from sklearn.datasets import load_digits
from torch import Tensor, nn

import popdist

NUM_SHARDS = 3


def write_shards(folder: Path) -> None:
    """1797 images with their digits, in a few tar files."""
    digits = load_digits()
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(NUM_SHARDS):
        with webdataset.TarWriter(str(folder / f"digits-{shard}.tar")) as writer:
            for index in range(shard, len(digits.target), NUM_SHARDS):
                image = (digits.images[index] / 16).astype("float32")
                writer.write({"__key__": f"{index:04}", "npy": image, "cls": int(digits.target[index])})


def to_tensors(samples: list[tuple[bytes, bytes]]) -> tuple[Tensor, Tensor]:
    """A micro batch of what was read; so every process decodes only what it keeps."""
    images = [np.load(io.BytesIO(image)).ravel() for image, _ in samples]
    return torch.from_numpy(np.stack(images)), torch.tensor([int(digit) for _, digit in samples])


def main() -> None:
    """Write the shards once for each host, train on them for two epochs, print from one instance."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="where the shards are, or will be")
    folder = parser.parse_args().folder
    popdist.init()
    torch.manual_seed(0)
    with popdist.first_on_host():
        if not folder.exists():
            write_shards(folder)
    shards = [str(folder / f"digits-{shard}.tar") for shard in range(NUM_SHARDS)]
    # shard_iterable deals the samples, so WebDataset must give all of them to everyone.
    stream = webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=None, workersplitter=None)
    images = popdist.shard_iterable(stream.to_tuple("npy", "cls"))
    loader = popdist.data_loader(images, 16, collate_fn=to_tensors, num_workers=1, persistent_workers=True)
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
