"""A small training as an example of a job: ``poprun -n 2 --num-replicas 4 python -m popdist.launching.demo``.

For any number of instances the program prints the same loss and the same checksum of the weights.
"""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import popdist


def main() -> None:
    """Train a small network for five epochs; instance 0 prints the loss and the checksum of the weights."""
    torch.manual_seed(0)
    popdist.init()
    points = torch.randn(1024, 8, dtype=torch.float32, device="cpu")
    loader = popdist.data_loader(TensorDataset(points, points.sin().sum(1, keepdim=True)), 16, shuffle=True)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model = popdist.ReplicatedModel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(5):
        mean = popdist.Mean()
        for batch in loader:
            optimizer.zero_grad()
            for x, y in model.micro_batches(batch):
                loss = mse_loss(model(x), y)
                loss.backward()
                mean.add(loss.item() * len(x), len(x))
            optimizer.step()
        loss_of_epoch = mean.compute()
        if popdist.is_main():
            print(f"epoch {epoch + 1}: loss {loss_of_epoch:.4f}, weights {popdist.checksum(model)}")  # noqa: T201 - the numbers are the program's output


if __name__ == "__main__":
    main()
