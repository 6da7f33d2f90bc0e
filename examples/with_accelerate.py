"""An accelerate script that knows nothing of poprun: it trains on scikit-learn's handwritten digits.

    poprun -n 2 python examples/with_accelerate.py
    poprun -n 2 --num-replicas 4 python examples/with_accelerate.py --replicas

With ``--replicas`` the Accelerator of popdist trains several replicas in an instance, and
the weights are bitwise equal for any number of instances.

Needs ``pip install 'poprun[examples,neighbours]'``.
"""

import argparse

import accelerate
import torch
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def main() -> None:
    """Train for three epochs, test, and print from rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", action="store_true")
    trains_replicas = parser.parse_args().replicas
    if trains_replicas:
        import popdist.accelerate

    kind = popdist.accelerate.Accelerator if trains_replicas else accelerate.Accelerator
    accelerator = kind()
    set_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [1437, 360])
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        network,
        torch.optim.Adam(network.parameters(), lr=0.005),
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(test, batch_size=90),
    )
    num_steps = 0
    for _ in range(3):
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            num_steps += accelerator.sync_gradients  # with --replicas an iteration is the batch of one replica
    right: list[bool] = []
    with torch.no_grad():
        for inputs, labels in test_loader:
            predicted = model(inputs).argmax(dim=1)
            right += accelerator.gather_for_metrics(predicted == labels).tolist()
    accuracy = sum(right) / len(test)
    accelerator.print(f"world size {accelerator.num_processes}, test accuracy {accuracy:.2%}")
    accelerator.wait_for_everyone()  # no rank ends before rank 0 has printed
    if trains_replicas:
        accelerator.print(f"{num_steps} steps, weights {popdist.checksum(model)}")
    (model,) = accelerator.free_memory(model)  # where only DDP still holds a gloo group, torch can hang
    accelerator.end_training()


if __name__ == "__main__":
    main()
