"""A Fabric script that knows nothing of poprun: it trains on scikit-learn's handwritten digits.

    poprun -n 2 python examples/with_fabric.py --devices 2
    poprun -n 2 --num-replicas 4 python examples/with_fabric.py --replicas

With ``--replicas`` a strategy of popdist trains several replicas in an instance, and
the weights are bitwise equal for any number of instances.

Needs ``pip install 'poprun[examples,neighbours]'``.
"""

import argparse

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def main() -> None:
    """Train for three epochs, test, and print from rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--replicas", action="store_true")
    arguments = parser.parse_args()
    if arguments.replicas:
        import popdist.fabric

    strategy = popdist.fabric.FabricStrategy() if arguments.replicas else None
    fabric = Fabric(devices=arguments.devices, strategy=strategy or "auto")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [1437, 360])
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=0.005))
    train_loader, test_loader = fabric.setup_dataloaders(
        DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=90)
    )
    num_steps = 0
    for _ in range(3):
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            num_steps += strategy is None or strategy.sync_gradients  # else an iteration is one replica's batch
    right: list[Tensor] = []
    with torch.no_grad():
        for inputs, labels in test_loader:
            right.append((model(inputs).argmax(dim=1) == labels).float())
    accuracy = fabric.all_reduce(torch.cat(right).mean())
    if fabric.is_global_zero:
        print(f"world size {fabric.world_size}, test accuracy {accuracy:.2%}")
        if arguments.replicas:
            print(f"{num_steps} steps, weights {popdist.checksum(model)}")
    fabric.barrier()  # no rank ends before rank 0 has printed


if __name__ == "__main__":
    main()
